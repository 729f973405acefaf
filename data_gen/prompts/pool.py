"""The prompts of a run, from the sets of `data.prompts`."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from configs.schema import DataConfig, PromptSource
from data_gen.prompts.hub import load, read, set_name, set_of
from data_gen.prompts.prompt import Prompt, say_once
from data_gen.prompts.splits import Split, in_hash_order, split_by_id, without_duplicates
from data_gen.prompts.stories import stories

WEIGHTS = (40, 10, 2)
"""Default shares of train, dev and test: those of SpecDec++ on Alpaca."""


def load_prompts(
    config: DataConfig, split: Split, *, may_be_fewer: bool = False, section: str = "data"
) -> list[Prompt]:
    """The run's prompts of one split, in the order of the shards; a longer list begins with the shorter one.

    Args:
        config: the `data` section of the run, `settled` (`data_gen.pipeline.sizes`).
        split: train, dev or test.
        may_be_fewer: accept fewer prompts than requested, but at least one.
        section: the section of the experiment that requests them, for errors.

    Raises:
        FileNotFoundError: not a known set, a file, or a set on the hub.
        ValueError: a malformed record, a repeated id, or fewer prompts than requested.
    """
    requested = {"train": config.num_train, "dev": config.num_dev, "test": config.num_test}[split]
    count = sys.maxsize if requested is None else requested
    if count < 0:
        raise ValueError(f"{section}.num_{split} is {count}; it must be at least 0")
    if count == 0:
        return []
    sources = sources_of(config)
    pools = {name: _pool(source, config, split, count) for name, source in sources.items()}
    if len(sources) > 1:
        pools = _apart(pools, sources, config, split)
        weights = {name: source.weight for name, source in sources.items()}
        named = {
            name: [replace(prompt, id=f"{name}/{prompt.id}", set=name) for prompt in pool]
            for name, pool in pools.items()
        }
        prompts = _in_proportion(named, weights, count)
    else:
        prompts = next(iter(pools.values()))[:count]
    if len(prompts) < (1 if may_be_fewer or requested is None else count):
        raise ValueError(
            f"{section}.num_{split} is {requested}, but {', '.join(source.path for source in sources.values())} has "
            f"{len(prompts)} {split} prompts{' in these proportions' if len(sources) > 1 else ''}; set "
            f"{section}.num_{split} to at most {len(prompts)}"
        )
    return prompts


def sources_of(config: DataConfig) -> dict[str, PromptSource]:
    """Name of each set of prompts -> its source.

    Raises:
        ValueError: no set, two of one name, or a weight that is not above 0.
    """
    sources = config.prompt_sources
    names = [set_name(source.path) for source in sources]
    if not names:
        raise ValueError("data.prompts is an empty list; name at least one set")
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(
            f"data.prompts has two sets named {twice[0]!r}; rename a file, or list it once with a larger weight"
        )
    for source in sources:
        if not source.weight > 0:
            raise ValueError(
                f"the weight of {source.path} in data.prompts is {source.weight}; it must be greater than 0"
            )
    return dict(zip(names, sources, strict=True))


def unreadable(config: DataConfig) -> tuple[dict[str, str], int]:
    """Location -> reason of each unreadable record, and the number of all records."""
    problems, num_records = dict[str, str](), 0
    for source in config.prompt_sources:
        if source.path != "stories" or Path(source.path).exists():
            prompt_set = set_of(source)
            parts: tuple[Split, ...] = ("train",) if prompt_set.test_split is None else ("train", "test")
            for prompts, failed in (read(prompt_set, part) for part in parts):
                problems |= failed
                num_records += len(prompts) + len(failed)
    return problems, num_records


def _apart(
    pools: Mapping[str, list[Prompt]], sources: Mapping[str, PromptSource], config: DataConfig, split: Split
) -> dict[str, list[Prompt]]:
    """The pools without prompts that another set has in an earlier split (test, dev, train) or that an earlier set has
    in the same split.
    """
    order: tuple[Split, ...] = ("test", "dev", "train")
    earlier = [
        prompt
        for before in order[: order.index(split)]
        for source in sources.values()
        if source.path != "stories"
        for prompt in _pool(source, config, before, sys.maxsize)
    ]
    apart: dict[str, list[Prompt]] = {}
    for name, pool in pools.items():
        apart[name] = without_duplicates(pool, earlier)
        earlier += apart[name]
        if len(apart[name]) < len(pool):
            repeats = len(pool) - len(apart[name])
            say_once(f"{name}: {repeats} {split} prompts are also in another set and are left out")
    return apart


def _in_proportion(pools: Mapping[str, Sequence[Prompt]], weights: Mapping[str, float], count: int) -> list[Prompt]:
    """Up to `count` prompts, of which every prefix is as close to the weights as possible; sets without prompts of the
    split are ignored.
    """
    taken = {name: 0 for name, pool in pools.items() if pool}
    total = sum(weights[name] for name in taken)
    prompts: list[Prompt] = []
    while taken and len(prompts) < count:
        name = max(taken, key=lambda name: weights[name] / total * (len(prompts) + 1) - taken[name])
        if taken[name] == len(pools[name]):
            break
        prompts.append(pools[name][taken[name]])
        taken[name] += 1
    return prompts


def _pool(source: PromptSource, config: DataConfig, split: Split, count: int) -> list[Prompt]:
    if source.path == "stories" and not Path(source.path).exists():
        return [Prompt(s.id, (s.prompt,), category=s.kind) for s in stories(split, count, seed=config.seed)]
    prompt_set = set_of(source)
    own_test: list[Prompt] = []
    if prompt_set.test_split is not None:  # a fixed test part is not split
        own_test = without_duplicates(in_hash_order(load(prompt_set, "test"), config.seed))
        if split == "test":
            return own_test
    prompts = load(prompt_set, split)
    splits = split_by_id(
        without_duplicates(prompts, own_test) if own_test else prompts,
        weights=prompt_set.shares or config.split_weights or WEIGHTS,
        seed=config.seed,
        split_ids=config.split_ids,
    )
    if repeats := len(prompts) - sum(map(len, splits.values())):
        say_once(f"{source.path}: {repeats} of {len(prompts)} prompts are duplicates and are left out")
    return splits[split]

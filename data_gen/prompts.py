"""Prompts of a run: where they come from, and which split each belongs to.

Splits depend on the run's seed and on each prompt's stable id only, never on file order: ids are ordered by sha256(seed / id), the head of
that order is test, then dev, then train, in the proportions of `split_weights`; a run takes the first `num_*` of each. A larger run
therefore contains the smaller one, and no choice of sizes moves a prompt from one split to another.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, get_args

from configs.schema import DataConfig
from data_gen import records
from data_gen.draws import seed_of
from data_gen.records import Prompt

Split = Literal["train", "dev", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)


def load_prompts(config: DataConfig, split: Split) -> list[Prompt]:
    """The run's prompts of one split, in the order in which they are cut into shards.

    Raises:
        FileNotFoundError: neither a known set nor a file.
        ValueError: a malformed line, a repeated id, or fewer prompts than asked for.
    """
    count = {"train": config.num_train, "dev": config.num_dev, "test": config.num_test}[split]
    if count < 0:
        raise ValueError(f"data.num_{split} is {count}; it must be at least 0")
    if count == 0:
        return []
    pool = _pool(config, split, count)
    if len(pool) < count:
        raise ValueError(
            f"data.num_{split} is {count} and {config.prompts} has {len(pool)} {split} prompts; set data.num_{split}={len(pool)}"
        )
    return pool[:count]


def _pool(config: DataConfig, split: Split, count: int) -> list[Prompt]:
    """Every prompt that the split could take."""
    from data_gen import prompt_sets

    if config.prompts == "stories":
        from data_gen.stories import stories

        return [Prompt(s.id, (s.prompt,), category=s.kind) for s in stories(split, count, seed=config.seed)]
    if config.prompts in prompt_sets.SETS and not Path(config.prompts).exists():
        own_split, prompts = prompt_sets.load(config.prompts, split)
        weights = prompt_sets.SETS[config.prompts].weights or config.split_weights
        return _ordered(prompts, config.seed) if own_split else split_by_id(prompts, config, weights)[split]
    return split_by_id(records.read_jsonl(config.prompts), config, config.split_weights)[split]


def split_by_id(prompts: Iterable[Prompt], config: DataConfig, weights: tuple[int, int, int]) -> dict[Split, list[Prompt]]:
    """Every prompt in exactly one split, each split in its hash order.

    Args:
        prompts: with ids that differ.
        config: for its seed and its `split_ids`.
        weights: shares of train, dev and test.
    """
    ordered = _ordered(prompts, config.seed)
    if config.split_ids is not None:
        return _split_by_list(ordered, config.split_ids)
    if min(weights) < 0 or sum(weights) == 0:
        raise ValueError(f"data.split_weights is {list(weights)}; three shares of at least 0 that are not all 0, for train, dev and test")
    num_test, num_dev = (round(len(ordered) * weight / sum(weights)) for weight in (weights[2], weights[1]))
    return {"test": ordered[:num_test], "dev": ordered[num_test : num_test + num_dev], "train": ordered[num_test + num_dev :]}


def _ordered(prompts: Iterable[Prompt], seed: int) -> list[Prompt]:
    return sorted(prompts, key=lambda prompt: (seed_of(seed, "split", prompt.id), prompt.id))


def _split_by_list(ordered: list[Prompt], path: str) -> dict[Split, list[Prompt]]:
    """The split that a file of id lists decides."""
    try:
        lists = json.loads(Path(path).read_text())
        named = {str(prompt_id): split for split, ids in lists.items() for prompt_id in ids}
    except (json.JSONDecodeError, AttributeError, TypeError) as error:
        raise ValueError(f'{path} is no JSON object of id lists such as {{"dev": [3, 5], "test": [8]}}: {error}') from error
    if unknown := set(lists) - set(SPLITS):
        raise ValueError(f"{path} names the split {sorted(unknown)[0]!r}; one of {', '.join(SPLITS)}")
    result: dict[Split, list[Prompt]] = {split: [] for split in SPLITS}
    for prompt in ordered:
        result[named.get(prompt.id, "train")].append(prompt)
    return result

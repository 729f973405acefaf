"""The prompts of a run, and their splits: known sets by name, others by hub id, local files and directories, in
proportion to weights.

Prompts are ordered by sha256(seed / content); the first part is test, then dev, then train, in the proportions
of `split_weights`, and a run takes the first `num_*` of each. So a larger run contains the smaller one, and
neither sizes, file order nor ids move a prompt from one split to another. Prompts that are added to a set after
the first run in a directory move none either (`data_gen.prompts.growth`).

JSON is read in `data_gen.prompts.prompt`, since `datasets` refuses a whole file for one malformed record.
"""

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal, get_args

from configs.schema import DataConfig, PromptSource
from data_gen.prompts.exact import exact_source
from data_gen.prompts.files import Record, json_records, states_of, table_records
from data_gen.prompts.growth import FirstSplit, first_split, hash_of, limits_between, split_within
from data_gen.prompts.listed import check_listed, listed_splits
from data_gen.prompts.prompt import Prompt, prompts_of, say_once, without_replaced
from data_gen.prompts.stories import stories
from store.hub import NETWORK_ERRORS

Split = Literal["train", "dev", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)
WEIGHTS = (40, 10, 2)
"""Default shares of train, dev and test: those of SpecDec++ on Alpaca."""


@dataclass(frozen=True, kw_only=True)
class PromptSet(PromptSource):
    """The location of a set, and how its records are read."""

    data_files: str | None = None
    """The files to read, if a repository holds plain files."""
    shares: tuple[int, int, int] | None = None
    """Fixed shares of train, dev and test; None: those of the run."""


SETS = {
    "alpaca": PromptSet(path="tatsu-lab/alpaca"),
    "gsm8k": PromptSet(path="openai/gsm8k", name="main", test_split="test", shares=(4, 1, 0)),
    "humaneval": PromptSet(path="openai/openai_humaneval", split="test", shares=(0, 0, 1)),
    "mt_bench": PromptSet(
        path="HuggingFaceH4/mt_bench_prompts", shares=(0, 0, 1), columns={"turns": "prompt", "id": "prompt_id"}
    ),
    # 480 prompts: 160 to choose thresholds by, 320 to test with
    "spec_bench": PromptSet(
        path="json",
        data_files="https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl",
        shares=(0, 1, 2),
    ),
}
"""The path of a prompt source -> the set."""
_BUILDERS = {".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".arrow": "arrow", ".txt": "text"}
"""Suffix of a file -> its builder in `datasets`; all others are JSONL."""
_LOADED = _BUILDERS | {".jsonl": "json", ".json": "json"}
"""Suffix of a file in a directory -> its builder."""
_BEFORE: dict[Split, tuple[Split, ...]] = {"test": (), "dev": ("test",), "train": ("test", "dev")}
"""Split -> those that keep a repeated prompt instead of it."""
_HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")
_FORMS = (
    f"stories, {', '.join(SETS)}, a file (JSONL, .json, {', '.join(_BUILDERS)}), a directory of such files, or "
    "org/name of a set on the hub"
)


def load_prompts(
    config: DataConfig, split: Split, *, may_be_fewer: bool = False, section: str = "data"
) -> list[Prompt]:
    """The run's prompts of one split, in the order of the shards; a longer list begins with the shorter one.
    `config` is `settled` (`data_gen.pipeline.stages`); `section` of the experiment requests the prompts.
    ValueError: a malformed record, a repeated id, or fewer prompts than requested, unless there `may_be_fewer`.
    """
    requested: int | None = getattr(config, f"num_{split}")
    count = sys.maxsize if requested is None else requested
    if count == 0:
        return []
    sources = sources_of(config)
    if config.split_ids is not None:
        _check_split_ids(config.split_ids, sources)
    pools = {name: _pool(source, config, split, count) for name, source in sources.items()}
    if len(sources) > 1:
        pools = _apart(pools, sources, config, split)
    prompts = _in_proportion(pools, {name: source.weight for name, source in sources.items()}, count)
    if len(prompts) < (1 if may_be_fewer or requested is None else count):
        raise ValueError(
            f"{section}.num_{split} is {requested}, but {', '.join(source.path for source in sources.values())} has "
            f"{len(prompts)} {split} prompts{' in these proportions' if len(sources) > 1 else ''}; set "
            f"{section}.num_{split} to at most {len(prompts)}"
        )
    return prompts


def _check_split_ids(path: str, sources: Mapping[str, PromptSource]) -> None:
    split_of = listed_splits(path, SPLITS)
    ids: set[str] = set()
    for name, source in sources.items():
        if is_generated(source):
            continue
        prompt_set = set_of(source)
        if prompt_set.test_split is not None and "test" in split_of.values():
            raise ValueError(
                f"{path} (data.split_ids) lists test ids, but {name} has a separate part for test "
                f"({prompt_set.test_split}); list train and dev only, or remove data.split_ids"
            )
        ids.update(prompt.id for prompt in load(prompt_set))
    check_listed(path, split_of, ids)


def sources_of(config: DataConfig) -> dict[str, PromptSource]:
    """Name of each set of prompts -> its source; ValueError: no set, or a repeated name."""
    sources: dict[str, PromptSource] = {}
    for source in config.prompt_sources:
        if (name := set_name(source.path)) in sources:
            raise ValueError(
                f"data.prompts has two sets named {name!r}; rename a file, or list it once with a larger weight"
            )
        sources[name] = source
    if not sources:
        raise ValueError("data.prompts is an empty list; name at least one set")
    return sources


def unreadable(config: DataConfig) -> tuple[dict[str, str], int]:
    """Location -> reason of each unreadable record, and the number of all records."""
    problems = dict[str, str]()
    num_records = 0
    for prompt_set in (set_of(source) for source in config.prompt_sources if not is_generated(source)):
        for part in dict.fromkeys((None, prompt_set.test_split)):
            prompts, failed = read(prompt_set, part)
            problems |= failed
            num_records += len(prompts) + len(failed)
    return problems, num_records


def is_generated(source: PromptSource) -> bool:
    """Whether a set is the stories that the project generates."""
    return source.path == "stories" and not Path(source.path).exists()


def _apart(
    pools: Mapping[str, list[Prompt]], sources: Mapping[str, PromptSource], config: DataConfig, split: Split
) -> dict[str, list[Prompt]]:
    """The pools, with the set in each id, without prompts that another set has in an earlier split (test, dev,
    train) or that an earlier set has in the same split.
    """
    earlier = [
        prompt
        for before in _BEFORE[split]
        for source in sources.values()
        if not is_generated(source)
        for prompt in _pool(source, config, before, sys.maxsize)
    ]
    apart: dict[str, list[Prompt]] = {}
    for name, pool in pools.items():
        unique = without_duplicates(pool, earlier)
        earlier += unique
        apart[name] = [replace(prompt, id=f"{name}/{prompt.id}", set=name) for prompt in unique]
        if repeats := len(pool) - len(unique):
            say_once(f"{name}: {repeats} {split} prompts are also in another set and are left out")
    return apart


def _in_proportion(pools: Mapping[str, Sequence[Prompt]], weights: Mapping[str, float], count: int) -> list[Prompt]:
    """Up to `count` prompts, of which every prefix is as close to the weights as possible, until a set is used
    up; sets without prompts of the split are ignored.
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
    if is_generated(source):
        return [Prompt(s.id, (s.prompt,), category=s.kind) for s in stories(split, count, seed=config.seed)]
    prompt_set = set_of(source)
    first = first_split(config, set_name(source.path), source)
    own_test = _own_test(prompt_set, config.seed, first)
    if split == "test" and prompt_set.test_split is not None:
        return own_test
    prompts = load(prompt_set)
    splits = _splits(prompts, own_test, prompt_set, config, first=first)
    if repeats := len(prompts) - sum(map(len, splits.values())):
        say_once(f"{source.path}: {repeats} of {len(prompts)} prompts are duplicates and are left out")
    return splits[split]


def splittable(prompt_set: PromptSet, seed: int) -> list[Prompt]:
    """The prompts of a set that are split: each content once, none that a fixed test part has."""
    return without_duplicates(load(prompt_set), _own_test(prompt_set, seed, None))


def _own_test(prompt_set: PromptSet, seed: int, first: FirstSplit | None) -> list[Prompt]:
    """The prompts of a fixed test part, which is not split."""
    if prompt_set.test_split is None:
        return []
    part = load(prompt_set, prompt_set.test_split)
    num_first = len(part) if first is None else first["num_first_test"]
    return without_duplicates([*in_hash_order(part[:num_first], seed), *part[num_first:]])


def _splits(
    prompts: Sequence[Prompt],
    own_test: Sequence[Prompt],
    prompt_set: PromptSet,
    config: DataConfig,
    *,
    first: FirstSplit | None = None,
) -> dict[Split, list[Prompt]]:
    earlier = prompts if first is None else prompts[: first["num_first"]]
    return split_by_id(
        without_duplicates(earlier, own_test) if own_test else earlier,
        weights=prompt_set.shares or config.split_weights or WEIGHTS,
        seed=config.seed,
        split_ids=config.split_ids,
        added=without_duplicates(prompts[len(earlier) :], [*own_test, *earlier]),
        first=first,
    )


def split_by(config: DataConfig) -> dict[str, FirstSplit]:
    """The manifest's entry of that name: how the first run in data.dir splits each set that is not generated."""
    entries: dict[str, FirstSplit] = {}
    for name, source in sources_of(config).items():
        if is_generated(source):
            continue
        entry = first_split(config, name, source)
        if entry is None:
            prompt_set = set_of(source)
            prompts = load(prompt_set)
            splits = _splits(prompts, _own_test(prompt_set, config.seed, None), prompt_set, config)
            num_first_test = 0 if prompt_set.test_split is None else len(load(prompt_set, prompt_set.test_split))
            entry = {"path": source.path, "num_first": len(prompts), "num_first_test": num_first_test}
            if config.split_ids is None:
                weights = prompt_set.shares or config.split_weights or WEIGHTS
                entry |= limits_between(*map(splits.__getitem__, SPLITS), weights=weights, seed=config.seed)
        entries[name] = entry
    return entries


def split_by_id(
    prompts: Iterable[Prompt],
    *,
    weights: tuple[int, int, int],
    seed: int,
    split_ids: str | None = None,
    added: Sequence[Prompt] = (),
    first: FirstSplit | None = None,
) -> dict[Split, list[Prompt]]:
    """Every prompt in exactly one split, each split in hash order, by shares of train, dev and test or by the
    file `split_ids`. Of duplicates one is kept, in test before dev before train. Prompts that were `added` since
    the `first` run follow in their own order. ValueError: no share, or a file of another form.
    """
    in_order = [*in_hash_order(prompts, seed), *added]
    if split_ids is not None:
        listed = listed_splits(split_ids, SPLITS)  # other ids are train
        test_first = sorted(in_order, key=lambda prompt: SPLITS[::-1].index(listed.get(prompt.id, "train")))
        unique = without_duplicates(test_first)
        return {split: [p for p in unique if listed.get(p.id, "train") == split] for split in SPLITS}
    if sum(weights) == 0:
        raise ValueError(f"data.split_weights is {list(weights)}; give train, dev or test a share above 0")
    in_order = without_duplicates(in_order)
    if first is not None:
        splits: dict[Split, list[Prompt]] = {split: [] for split in SPLITS}
        for prompt in in_order:
            splits[split_within(prompt, first, seed)].append(prompt)
        return splits
    num_test, num_dev = (round(len(in_order) * weight / sum(weights)) for weight in (weights[2], weights[1]))
    rest = in_order[num_test:]
    return {"train": rest[num_dev:], "dev": rest[:num_dev], "test": in_order[:num_test]}


def in_hash_order(prompts: Iterable[Prompt], seed: int) -> list[Prompt]:
    """The prompts by the hash of seed and content: a shuffle that other prompts do not change."""
    return sorted(prompts, key=lambda prompt: (hash_of(prompt, seed), prompt.id))


def without_duplicates(prompts: Iterable[Prompt], earlier: Iterable[Prompt] = ()) -> list[Prompt]:
    """The prompts whose content neither an earlier one has nor one of `earlier`."""
    excluded = {prompt.content for prompt in earlier}
    first_of = dict[tuple[str, ...], Prompt]()
    for prompt in prompts:
        first_of.setdefault(prompt.content, prompt)
    return [prompt for content, prompt in first_of.items() if content not in excluded]


def set_of(source: PromptSource) -> PromptSet:
    """The set that a source names; FileNotFoundError if it is no known set, file, directory or hub id."""
    path = Path(source.path)
    if not path.name:
        raise ValueError(f"data.prompts is {source.path!r}, which names no set; set it to {_FORMS}")
    if path.is_file():  # a file may have the name of a set
        suffix = Path(path.name.removesuffix(".gz")).suffix
        return PromptSet(**vars(source) | {"path": _LOADED.get(suffix, "json"), "data_files": source.path})
    if source.path in SETS and not path.is_dir():
        known = SETS[source.path]
        columns = without_replaced(known.columns, source.columns) | source.columns
        prompt_set = replace(known, name=source.name or known.name, columns=columns)
        if source.split not in (PromptSource.split, known.split):  # the set's own test part belongs to its default part
            prompt_set = replace(prompt_set, split=source.split, test_split=None, shares=None)
        return replace(prompt_set, test_split=source.test_split or prompt_set.test_split)
    if path.is_dir() or (_HUB_ID.fullmatch(source.path) and path.suffix not in _LOADED):
        return PromptSet(**vars(source))
    raise FileNotFoundError(
        f"data.prompts is {source.path!r}, which does not exist and is not a known set; set it to {_FORMS}"
    )


def set_name(path: str) -> str:
    """The name of a set: its file name without suffix, or the last part of a path or hub id."""
    name = Path(path.removesuffix(".gz"))
    return name.stem if name.suffix in _LOADED else Path(path).name


def load(prompt_set: PromptSet, part: str | None = None) -> list[Prompt]:
    """The prompts of `read`; unreadable records are left out, and counted once on stderr."""
    prompts, problems = read(prompt_set, part)
    if problems:
        where, reason = next(iter(problems.items()))
        say_once(
            f"{len(problems)} of {len(problems) + len(prompts):,} records cannot be read and are left out, the first "
            f"at {where}: {reason}; `data` lists them in errors.jsonl"
        )
    if not prompts:
        raise ValueError(f"{prompt_set.data_files or prompt_set.path} contains no prompt; check data.prompts")
    return prompts


def read(prompt_set: PromptSet, part: str | None = None) -> tuple[list[Prompt], dict[str, str]]:
    """The prompts of one part of a set (None: the part that is split), and its unreadable records: where ->
    reason. A process parses a part once, and again if one of its files changed.

    Raises:
        FileNotFoundError: the hub cannot be reached and the set is not in its cache.
        ValueError: an unreadable file, or one with at least half of its records unreadable.
    """
    states = states_of(Path(prompt_set.data_files or prompt_set.path))
    prompts, problems = parsed(prompt_set, part or prompt_set.split, *states)
    return list(prompts), dict(problems)


@lru_cache(maxsize=8)
def parsed(prompt_set: PromptSet, part: str, *_states: str) -> tuple[list[Prompt], dict[str, str]]:
    """What `read` returns, for files in these states."""
    file = str(prompt_set.data_files)
    if prompt_set.path == "json" and Path(file).is_file():
        records = json_records(file)
    elif prompt_set.path == "csv" and part == PromptSource.split:
        records = table_records(file)
    else:
        records = _records(prompt_set, part)
    return prompts_of(records, prompt_set.columns)


def _records(prompt_set: PromptSet, part: str) -> Iterator[Record]:
    from datasets import load_dataset  # takes seconds to import
    from datasets.exceptions import DatasetsError
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # the final error reports the retries
    name = prompt_set.data_files or prompt_set.path
    source = exact_source(prompt_set.path, prompt_set.data_files, _LOADED)
    try:
        records = load_dataset(name=prompt_set.name, split=part, **source)
        for index, record in enumerate(records):
            yield f"{name} [{part}] record {index}", str(index), record
    except NETWORK_ERRORS as error:
        raise FileNotFoundError(
            f"prompt set {name} cannot be reached and is not in the cache: {_line(error)}; set data.prompts to {_FORMS}"
        ) from error
    except (ValueError, DatasetsError) as error:
        raise ValueError(f"prompt set {name}: {_line(error.__cause__ or error)}") from error


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]

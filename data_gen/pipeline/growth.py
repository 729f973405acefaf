"""Splits that grow: a larger run keeps every shard of the smaller one, byte for byte, and adds its own.

A split is made in parts. Where more prompts are asked for than are there, those beyond become a part of their own, cut
into shards by itself, so that a short last shard stays as it is. The manifest tells the parts, each with the sha256 of
all prompts up to its end. Where fewer are asked for, no shard beyond them is made, and those that are there stay.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from configs.schema import DataConfig
from data_gen.prompts.pool import load_prompts
from data_gen.prompts.prompt import Prompt
from data_gen.prompts.splits import SPLITS, Split
from data_gen.responses.conversation import ShardSpec
from data_gen.store.manifest import Parts, digest, read_manifest


class Order(NamedTuple):
    """The splits and shards that a run is to make."""

    split: dict[Split, Parts]
    """The entry `split` of the manifest."""
    specs: list[ShardSpec]
    """Shards with prompts that are asked for, in the order in which they are made."""
    others: list[ShardSpec]
    """Shards that an earlier run asked for."""


def order_of(data: DataConfig) -> Order:
    """The shards of all splits, with those that lie in data.dir as they are.

    Raises:
        ValueError: fewer prompts than asked for, or than were asked for then.
    """
    order = Order({}, [], [])
    for split in SPLITS:
        made, num_asked = _ends_on_disk(data, split), getattr(data, f"num_{split}")
        ends = made if made and num_asked <= made[-1] else [*made, num_asked]
        size: dict[str, Any] = {f"num_{split}": ends[-1]}
        try:
            prompts = load_prompts(replace(data, **size), split)
        except ValueError as error:
            if ends[-1] == num_asked:
                raise
            raise ValueError(
                f"{data.dir} was made of {ends[-1]:,} {split} prompts, not of these ({error}); choose another data.dir"
            ) from error
        order.split[split] = [_part(prompts[:end]) for end in ends]
        num_before = 0
        for spec in _shards(split, prompts, ends=ends, size=data.rows_per_shard):
            (order.specs if num_before < num_asked else order.others).append(spec)
            num_before += len(spec.prompts)
    return order


def _part(prompts: Sequence[Prompt]) -> dict[str, Any]:
    """A split up to some size, for the manifest; with the prompts of each set, where there are several."""
    sets = Counter(prompt.set for prompt in prompts if prompt.set)
    return {"prompts": len(prompts), "sha256": digest(repr(prompts)), **({"sets": dict(sets)} if sets else {})}


def cut_shards(split: str, prompts: Sequence[Prompt], size: int, *, first: int = 0) -> list[ShardSpec]:
    """Shards of `size` consecutive prompts; `first`: the index of the first shard."""
    starts = range(0, len(prompts), size)
    return [
        ShardSpec(split, index, tuple(prompts[start : start + size])) for index, start in enumerate(starts, start=first)
    ]


def _shards(split: Split, prompts: Sequence[Prompt], *, ends: Sequence[int], size: int) -> list[ShardSpec]:
    """Shards of every part, numbered through."""
    specs: list[ShardSpec] = []
    for start, end in pairwise([0, *ends]):
        specs += cut_shards(split, prompts[start:end], size, first=len(specs))
    return specs


def _ends_on_disk(data: DataConfig, split: Split) -> list[int]:
    """Number of prompts up to the end of each part of a split, as data.dir was made; empty where nothing was made."""
    if not (Path(data.dir) / "manifest.json").is_file():
        return []
    return [part["prompts"] for part in read_manifest(data.dir).get("split", {}).get(split, [])]

"""The LightningDataModule: train, dev and test batches of cached features, or of rows for online features."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cached_property
from itertools import accumulate, zip_longest
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytorch_lightning as pl
import torch
from jaxtyping import Float
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from torch import Tensor

from configs.schema import DataConfig, HeadsConfig, ModelSource, PairConfig
from data_gen.store.identity import describe_model
from data_gen.store.manifest import read_manifest
from data_gen.store.rows import read_rows
from heads.batches.features import FEATURE_SETS, LABELS, FeatureShard
from heads.batches.loader import BatchLoader, block_reader
from heads.batches.order import Item, Share
from heads.grid import grid, scalar_names
from store.shards import list_shards, read_sidecar
from store.sums import Look, check_sums


class FeatureData(pl.LightningDataModule):
    """Batches of `heads.batch_size` responses from data.dir, of which each process takes its part; each block is read
    by one of them.

    Attributes:
        timings: the feature sets that the sweep reads.
        scalars: the scalars that it reads.
        columns: those, and the labels of prefix and of candidate heads if there are any.
        hidden_size: width of the draft's hidden states.
    """

    def __init__(self, data: DataConfig, heads: HeadsConfig, *, pair: PairConfig) -> None:
        """Args:
            data: where the features are, and how they were made.
            heads: which features are read, and how they are batched.
            pair: the models that the data must have been made with.

        Raises:
            FileNotFoundError: no data.
            ValueError: shards missing, empty, of several widths, not what was written, or made for another draft.
        """
        super().__init__()
        self.data, self.heads, shapes = data, heads, grid(heads)
        timings = dict.fromkeys(shape.timing for shape in shapes)
        self.timings = tuple(dict.fromkeys(FEATURE_SETS[timing] for timing in timings))
        self.scalars = scalar_names(shapes)
        self.columns = (*self.scalars, *(LABELS[timing] for timing in timings if LABELS[timing] != "acceptance_prob"))
        self.manifest = read_manifest(data.dir, keys=("target", "draft", "sampling", "prompts"))
        check_manifest(self.manifest, data, pair=pair)
        if heads.features == "cached":
            _check_features(self.manifest, self.timings, directory=data.dir)
        self._rows_per_item: dict[str, int] = {timing: data.mixes if timing == "fed" else 1 for timing in self.timings}
        self._names: dict[str, list[list[str]]] = {}
        splits = [split for split in ("train", "dev", "test") if split != "test" or data.num_test]
        if is_first_process():  # which starts the others, or is waited for
            paths = (
                path for split in splits for paths in self._read(split) for path in self._of_num_train(split, paths)
            )
            check_sums(paths, look=self._look())
        self._shards = {split: self._open(split) for split in splits}
        self.hidden_size = self._width()

    def train_dataloader(self) -> BatchLoader:
        return self.loader("train", seed=self.heads.seed)

    def val_dataloader(self) -> BatchLoader:
        return self.loader("dev")

    @cached_property
    def tested(self) -> tuple[str, ...]:
        """Names of the sets that a finished sweep is measured on: dev, train and test, and where prompts come from
        several sets dev/NAME and test/NAME.
        """
        held_out = [split for split in ("dev", "test") if split in self._shards]
        by_set = [
            f"{split}/{name}"
            for split in held_out
            for name in sorted({name for shard in self._sets(split) for name in shard})
        ]
        return "dev", "train", *held_out[1:], *by_set

    def test_dataloader(self) -> list[BatchLoader]:
        """Loaders in the order of `tested`; that of train has as many responses as dev has, which is enough to see how
        far heads overfit.
        """
        num_train = min(self.num_responses("train"), self.num_responses("dev"))
        parts = [name.partition("/") for name in self.tested]
        return [self.loader(split, num=num_train if split == "train" else None, only=name) for split, _, name in parts]

    def loader(self, split: str, *, seed: int | None = None, num: int | None = None, only: str = "") -> BatchLoader:
        """Batches of one split, of its first `num` responses, or of those of one set (`only`); shuffled if there is a
        seed.
        """
        read, lengths = self._source(split)
        if split == "train" and self.heads.num_train is not None:
            lengths = _first(lengths, self.heads.num_train)
        if num is not None:
            lengths = _first(lengths, num)
        sets = self._sets(split) if only else None
        chosen = None if sets is None else lambda item: sets[item.block.shard][item.block.start + item.place] == only
        share = Share(self.trainer.global_rank, self.trainer.world_size) if self.trainer else None
        return BatchLoader(read, lengths, batch_size=self.heads.batch_size, seed=seed, share=share, chosen=chosen)

    def first_scalars(self, timing: str) -> Float[Tensor, "tokens scalar"]:
        """The scalars that the sweep reads, of the first training shard that has any."""
        for shard in (shard for shard in self._shards["train"][timing] if shard.num_rows):
            columns = torch.cat([row.features.columns(self.scalars) for row in shard.read(0, shard.num_rows)])
            if len(columns):
                return columns
        raise ValueError(f"train features of {self.data.dir} hold no drafted token; make them with more prompts")

    def num_responses(self, split: str) -> int:
        """Responses of one split."""
        return self.loader(split).num_items

    def _source(self, split: str) -> tuple[Callable[[Sequence[Item]], Any], list[list[int]]]:
        """A function that reads some responses of a split, and the tokens of each response of each shard."""
        shards, first = self._shards[split], self.timings[0]
        times = self._rows_per_item[first]
        # a response has the tokens of all of its mixings
        lengths = [
            [sum(rows[i : i + times]) for i in range(0, len(rows), times)]
            for rows in (shard.row_lengths() for shard in shards[first])
        ]
        return block_reader(shards, self._rows_per_item), lengths

    def _sets(self, split: str) -> list[list[str]]:
        """The set of each response of each shard; no shard where prompts come from one set.

        Raises:
            ValueError: rows without sets, which were made from one.
        """
        if split not in self._names:
            paths = list_shards(self.data.dir, split) if isinstance(self.manifest["prompts"], list) else []
            if paths and "set" not in pq.read_schema(paths[0]).names:
                raise ValueError(
                    f"{paths[0]} has no column set, and data.prompts of {self.data.dir} is a list of sets; make the "
                    "data again"
                )
            self._names[split] = [read_rows(path, ("set",)).column("set").to_pylist() for path in paths]
        return self._names[split]

    def _read(self, split: str) -> list[list[Path]]:
        """The shards that are read of a split: those of each feature set, and for dev and test the rows that tell which
        set a response is of.
        """
        has_sets = split != "train" and isinstance(self.manifest["prompts"], list)
        return [list_shards(self.data.dir, split, timing) for timing in (*self.timings, *([None] if has_sets else []))]

    def _of_num_train(self, split: str, paths: list[Path]) -> list[Path]:
        """The shards of train that hold the first heads.num_train responses; all shards of any other split."""
        if split != "train" or self.heads.num_train is None:
            return paths
        times = self.data.mixes if "fed" in paths[0].parts else 1
        ends = accumulate((read_sidecar(path, keys=("rows",))["rows"] for path in paths), initial=0)
        return [path for path, start in zip(paths, ends, strict=False) if start < self.heads.num_train * times]

    def _look(self) -> Look | None:
        """Check of each shard, beside its sum: its numbers are finite and in their range."""

        def at(path: Path) -> None:
            if path.suffix == ".safetensors":
                FeatureShard(path, self.columns).check()

        return at

    def _open(self, split: str) -> dict[str, list[FeatureShard]]:
        shards: dict[str, list[FeatureShard]] = {
            timing: [FeatureShard(path, self.columns) for path in list_shards(self.data.dir, split, timing)]
            for timing in self.timings
        }
        for of_index in zip_longest(*shards.values()):
            present = [shard for shard in of_index if shard is not None]
            counts = [
                shard.num_rows / self._rows_per_item[timing] for timing, shard in zip(shards, present, strict=False)
            ]
            if len(present) < len(of_index) or len(set(counts)) > 1 or counts[0] != int(counts[0]):
                raise ValueError(
                    f"{split} features do not fit together: {', '.join(str(shard.path) for shard in present)} hold "
                    f"{counts} responses with data.mixes {self.data.mixes}; make them again with this config"
                )
        if not sum(shard.num_tokens for of_timing in shards.values() for shard in of_timing):
            raise ValueError(
                f"{split} features of {self.data.dir} hold no token at all; raise data.num_{split} and make the data "
                "again"
            )
        return shards

    def _width(self) -> int:
        widths = {
            shard.path: shard.hidden_size
            for split in self._shards.values()
            for of_timing in split.values()
            for shard in of_timing
        }
        first = next(iter(widths.values()))
        for path, width in widths.items():
            if width != first:
                raise ValueError(
                    f"{path} has hidden states of width {width}, other shards {first}: features of different drafts; "
                    "make them again"
                )
        return first


def is_first_process() -> bool:
    """Whether this is the first of the processes that train together, which writes and speaks for all."""
    return getattr(rank_zero_only, "rank", 0) == 0


def _first(lengths: Sequence[list[int]], count: int) -> list[list[int]]:
    """The lengths of the first `count` responses, shard by shard.

    Raises:
        ValueError: there are fewer.
    """
    total = sum(map(len, lengths))
    if not 0 < count <= total:
        raise ValueError(
            f"heads.num_train is {count} and there are {total} training responses; take at most those, or null for all"
        )
    first = []
    for shard in lengths:
        if count > 0:
            first.append(shard[:count])
        count -= len(shard)
    return first


def _check_features(manifest: dict[str, Any], needed: Sequence[str], *, directory: str) -> None:
    """Raise ValueError where the data was made without features that the heads read."""
    made = manifest.get("features", needed)
    if lacking := [name for name in needed if name not in made]:
        raise ValueError(
            f"{directory} was made with {' and '.join(made) or 'no'} features, and heads.timings and heads.specdec ask "
            f"for {lacking[0]} features as well: train heads without, or leave data.features out and make the data in "
            "another data.dir (`acceptance-heads responses` keeps the responses)"
        )


def check_manifest(manifest: dict[str, Any], data: DataConfig, *, pair: PairConfig) -> None:
    """Raise ValueError unless the data was made with the models and the sampling of this pair.

    Training on cached features reads no model. So one that lay in a directory where the data was made, and is not on
    this machine, counts as the one that the manifest holds the hash of, if the directory's name is the same; a warning
    says so.
    """
    expected = {"sampling": asdict(pair.sampling), "mixing_ratio": data.mixing_ratio, "mixes": data.mixes}
    on_disk = {name: manifest.get(name) for name in expected}
    for name, source in (("target", pair.target), ("draft", pair.draft)):
        described = _described(source)
        if described is None and manifest[name].get("weights") and manifest[name].get("name") == Path(source.path).name:
            if is_first_process():
                print(
                    f"warning: the {name} {source.path} is not on this machine, so it is not compared: the data was "
                    f"made with weights {manifest[name]['weights'][:12]} of a directory of this name, by "
                    f"{data.dir}/manifest.json",
                    file=sys.stderr,
                )
            continue
        keys = ("weights",) if described else ("name", "revision")
        described = described or {"name": source.path, "revision": source.revision}
        expected |= {f"{name} {key}": described[key] for key in keys}
        on_disk |= {f"{name} {key}": manifest[name].get(key) for key in keys}
    for key, value in expected.items():
        if on_disk[key] != value:
            raise ValueError(
                f"{data.dir}/manifest.json: the data was made with {key} {on_disk[key]!r}, and this config has "
                f"{value!r}; point data.dir at data of this pair, or make it with `acceptance-heads data`"
            )


def _described(source: ModelSource) -> dict[str, Any] | None:
    """The description of a model that lies in a directory of this machine; None where there is none, or nothing that
    can be read.
    """
    if not Path(source.path).is_dir():
        return None
    try:
        return describe_model(source)
    except FileNotFoundError:  # a directory without config.json: an empty mount point, a tokenizer alone
        return None

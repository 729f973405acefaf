"""The LightningDataModule: train, dev and test batches of cached features, or of rows for online features."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytorch_lightning as pl

from configs.schema import Config
from data_gen.store.manifest import describe_model, read_manifest
from data_gen.store.shards import list_shards
from heads.batches.features import Batch, Features, FeatureShard, join
from heads.batches.loader import BatchLoader, BlockReader, pinned
from heads.batches.order import Item
from heads.grid import grid


class FeatureData(pl.LightningDataModule):
    """Batches of `heads.batch_size` responses per process, from data.dir.

    Attributes:
        timings: the feature sets that the sweep reads.
        hidden_size: width of the draft's hidden states.
    """

    def __init__(self, config: Config) -> None:
        """Raises:
        FileNotFoundError: no data.
        ValueError: shards missing, empty or of several widths, or made for another draft.
        """
        super().__init__()
        self.config = config
        self.timings = tuple(dict.fromkeys(shape.timing for shape in grid(config.heads)))
        self.manifest = read_manifest(config.data.dir)
        check_manifest(self.manifest, config)
        self._shards = {split: self._open(split) for split in ("train", "dev", "test") if split != "test" or config.data.num_test}
        self.hidden_size = self._width()

    @property
    def num_train_batches(self) -> int:
        """Training batches per epoch, before Lightning's limits."""
        return len(self.train_dataloader())

    def train_dataloader(self) -> BatchLoader:
        return self.loader("train", seed=self.config.heads.seed)

    def val_dataloader(self) -> BatchLoader:
        return self.loader("dev")

    def test_dataloader(self) -> list[BatchLoader]:
        return [self.loader(split) for split in self._shards if split != "train"]

    def loader(self, split: str, *, seed: int | None = None) -> BatchLoader:
        """Batches of one split, shuffled if there is a seed."""
        shards = self._shards[split]
        sizes = [shard.num_rows // self._rows_per_item()[self.timings[0]] for shard in shards[self.timings[0]]]
        return self._loader(batch_reader(shards, self._rows_per_item()), sizes, split, seed)

    def first_rows(self, timing: str) -> Features:
        """The rows of the first training shard."""
        shard = self._shards["train"][timing][0]
        return join(shard.read(0, shard.num_rows))

    def num_responses(self, split: str) -> int:
        """Responses of one split."""
        return self.loader(split).num_items

    def _loader(self, read: Callable[[Sequence[Item]], Any], sizes: list[int], split: str, seed: int | None) -> BatchLoader:
        if split == "train" and self.config.heads.num_train is not None:
            sizes = _first(sizes, self.config.heads.num_train)
        share = (self.trainer.global_rank, self.trainer.world_size) if self.trainer is not None else (0, 1)
        return BatchLoader(read, sizes, batch_size=self.config.heads.batch_size, seed=seed, share=share)

    def _rows_per_item(self) -> dict[str, int]:
        return {timing: self.config.data.mixes if timing == "fed" else 1 for timing in self.timings}

    def _open(self, split: str) -> dict[str, list[FeatureShard]]:
        shards: dict[str, list[FeatureShard]] = {
            timing: [FeatureShard(path) for path in list_shards(self.config.data.dir, split, timing)] for timing in self.timings
        }
        times = self._rows_per_item()
        counts = {timing: [shard.num_rows / times[timing] for shard in found] for timing, found in shards.items()}
        if len({tuple(count) for count in counts.values()}) > 1 or any(count != int(count) for found in counts.values() for count in found):
            raise ValueError(
                f"{split} features of {self.config.data.dir} do not fit together: responses per shard are {counts} with data.mixes "
                f"{self.config.data.mixes}; make them again with this config"
            )
        if not sum(shard.num_tokens for found in shards.values() for shard in found):
            raise ValueError(
                f"{split} features of {self.config.data.dir} hold no token at all; raise data.num_{split} and make the data again"
            )
        return shards

    def _width(self) -> int:
        widths = {shard.path: shard.hidden_size for split in self._shards.values() for found in split.values() for shard in found}
        first = next(iter(widths.values()))
        for path, width in widths.items():
            if width != first:
                raise ValueError(
                    f"{path} has hidden states of width {width}, other shards {first}: features of different drafts; make them again"
                )
        return first


def batch_reader(shards: dict[str, list[FeatureShard]], rows_per_item: dict[str, int]) -> Callable[[Sequence[Item]], Batch]:
    """What turns some responses into a batch."""
    reader = BlockReader(shards, rows_per_item)
    return lambda items: pinned(reader.batch(items))


def _first(sizes: Sequence[int], count: int) -> list[int]:
    """Sizes of the shards that hold the first `count` responses, the last one cut.

    Raises:
        ValueError: there are fewer.
    """
    if not 0 < count <= sum(sizes):
        raise ValueError(f"heads.num_train is {count} and there are {sum(sizes)} training responses; take at most those, or null for all")
    kept = []
    for size in sizes:
        if count > 0:
            kept.append(min(size, count))
        count -= size
    return kept


def check_manifest(manifest: dict[str, Any], config: Config) -> None:
    """Raise ValueError unless the data was made with the models and the sampling of this config."""
    here = {"sampling": asdict(config.pair.sampling), "mixing_ratio": config.data.mixing_ratio, "mixes": config.data.mixes}
    there = {name: manifest.get(name) for name in here}
    for name, source in (("target", config.pair.target), ("draft", config.pair.draft)):
        keys = ("fingerprint",) if Path(source.path).is_dir() else ("name", "revision")
        described = describe_model(source, trust_remote_code=config.pair.trust_remote_code) if Path(source.path).is_dir() else {}
        described = described or {"name": source.path, "revision": source.revision}
        here |= {f"{name} {key}": described[key] for key in keys}
        there |= {f"{name} {key}": manifest[name].get(key) for key in keys}
    for key, value in here.items():
        if there[key] != value:
            raise ValueError(
                f"the data at {config.data.dir} was made with {key} {there[key]!r}, and this config has {value!r}; point data.dir at data "
                "of this pair, or make it with `python -m data_gen`"
            )

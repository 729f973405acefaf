"""The LightningDataModule: train, dev and test batches of labels and hidden states."""

import math
import os
import sys
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cached_property, partial
from itertools import accumulate, chain
from pathlib import Path

import pytorch_lightning as pl
from pytorch_lightning.utilities.rank_zero import rank_zero_only

from configs.schema import DataConfig, HeadsConfig, PairConfig
from data_gen.pipeline.share import Share
from data_gen.store.manifest import Manifest, describe_model, read_manifest, refuse_older
from data_gen.store.rows import read_rows
from heads.batches.features import (
    LABELS,
    STATE_TIMINGS,
    Batch,
    FeatureShard,
    check_numbers,
    has_exact_logits,
    without_states,
)
from heads.batches.loader import BatchLoader, block_reader
from heads.batches.states import States
from heads.grid import grid, scalar_names
from lm.features.released import released_layout_of, without_mtp
from lm.signals import POSITION
from store.shards import check_sums, list_shards, read_sidecar


class FeatureData(pl.LightningDataModule):
    """Batches of `heads.batch_size` responses from data.dir, shared by all processes.

    Attributes:
        timings: those of the hidden states that the sweep reads.
        scalars: scalars that the sweep reads.
        columns: `scalars` that data stores, and the labels of prefix and candidate heads if there are any.
        hidden_size: width of the draft's hidden states.
    """

    def __init__(self, data: DataConfig, heads: HeadsConfig, *, pair: PairConfig) -> None:
        """`data` and `heads` are sections of the config, and `pair` has the models that the data must be made with.
        FileNotFoundError if there is no data; ValueError for shards that are missing, empty, corrupted, of several
        widths, or made for other models.
        """
        super().__init__()
        self.data, self.heads, self._draft, shapes = data, heads, pair.draft, grid(heads)
        timings = dict.fromkeys(shape.timing for shape in shapes)
        self.timings = tuple(dict.fromkeys(STATE_TIMINGS[timing] for timing in timings))
        self.scalars = scalar_names(shapes)
        stored = (name for name in self.scalars if name != POSITION)
        self.columns = (*stored, *(LABELS[timing] for timing in timings if LABELS[timing] != "acceptance_prob"))
        self.manifest = read_manifest(data.dir, keys=("target", "draft", "sampling", "prompts"))
        self._states = States(pair, data, heads=heads, manifest=self.manifest)
        self._is_ready = False
        _check_manifest(self.manifest, data, pair=pair)
        self.hidden_size = int(self.manifest["draft"]["hidden_size"])
        splits = ("train", "dev", "test") if data.num_test else ("train", "dev")
        paths = {split: self._paths(split) for split in splits}
        if is_first_process():  # the others start later, or wait for it
            shards = [of_shard for of_split in paths.values() for of_shard in of_split]
            check = partial(check_numbers, columns=self.columns, width=self.hidden_size)
            fact = f"finite {' '.join(self.columns)} {self.hidden_size}"
            check_sums([path for of_shard in shards for path in of_shard.values()], check=check, fact=fact)
            if "logit_token_prob" in self.columns and not has_exact_logits(paths["train"][0]["labels"]):
                print(
                    f"warning: {data.dir} was made by version 0.2.0 or earlier: logit q(y) is computed from "
                    "log q(y), whose float32 rounds 1 - q(y) to about 1e-6, so logits above 10 are inexact; "
                    f"for exact ones delete {data.dir}/labels and run `acceptance-heads data` again",
                    file=sys.stderr,
                )
        self._shards = {split: self._open(split, of_split) for split, of_split in paths.items()}
        # tokens of each response of each shard; of train, of the responses that heads are trained on
        self._lengths = {split: [shard.lengths for shard in of_split] for split, of_split in self._shards.items()}
        if heads.num_train is not None:
            self._lengths["train"] = _first(self._lengths["train"], heads.num_train)

    def setup(self, stage: str | None = None) -> None:
        """Fill the cache of hidden states, or load the draft that computes them; Lightning calls this in every process,
        which computes its share of the shards. Other callers call it before they read batches.
        """
        if self._is_ready:
            return
        share = Share(0, 1)
        if self.trainer:
            self._states.use(self.trainer.strategy.root_device)
            share = Share(self.trainer.global_rank, self.trainer.world_size, launcher="Lightning")
        if not self._states.is_online:
            self._states.fill([shard for of_split in self._shards.values() for shard in of_split], share)
        self._is_ready = True

    def train_dataloader(self) -> BatchLoader:
        return self.loader("train", seed=self.heads.seed)

    def val_dataloader(self) -> BatchLoader:
        return self.loader("dev")

    @cached_property
    def tested(self) -> tuple[str, ...]:
        """Splits that a finished sweep is measured on: dev, train, test, and dev/SET, test/SET if there are sets."""
        held_out = [split for split in ("dev", "test") if split in self._shards]
        sets = {split: sorted({name for shard in self._sets.get(split, ()) for name in shard}) for split in held_out}
        return "dev", "train", *held_out[1:], *(f"{split}/{name}" for split in held_out for name in sets[split])

    def test_dataloader(self) -> list[BatchLoader]:
        """Loaders in the order of `tested`; train has as many responses as dev, enough to measure overfitting."""
        num_train = min(self.num_responses("train"), self.num_responses("dev"))
        parts = [name.partition("/") for name in self.tested]
        return [self.loader(split, num=num_train if split == "train" else None, only=name) for split, _, name in parts]

    def loader(self, split: str, *, seed: int | None = None, num: int | None = None, only: str = "") -> BatchLoader:
        """Batches of one split, of its first `num` responses or of one prompt set (`only`); shuffled with a seed."""
        lengths = self._lengths[split]
        return BatchLoader(
            block_reader(self._shards[split]),
            lengths if num is None else _first(lengths, num),
            batch_size=self.heads.batch_size,
            seed=seed,
            process=(self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1),
            features=self._states.of_rows if self._states.is_online else None,
            is_included=lambda item: not only or self._sets[split][item[0]][item[1]] == only,
        )

    def first_shard(self) -> BatchLoader:
        """The responses of the first training shard that has drafted tokens, and of empty ones before it."""
        lengths = self._lengths["train"]
        first = next(index for index, of_shard in enumerate(lengths) if any(of_shard))
        return self.loader("train", num=sum(map(len, lengths[: first + 1])))

    def first_tokens(self, limit: int) -> BatchLoader:
        """The first training responses, of at most `limit` tokens; at least one response with tokens."""
        ends = list(accumulate(chain.from_iterable(self._lengths["train"])))
        return self.loader("train", num=max(1, bisect_right(ends, limit)))

    def training_labels(self, num: int) -> Iterator[Batch]:
        """Labels and scalars of about `num` training responses, without hidden states: of each shard its first ones, in
        proportion to its size.
        """
        share = min(1.0, num / self.num_responses("train"))
        for shard, lengths in zip(self._shards["train"], self._lengths["train"], strict=False):
            if lengths:
                of_timings = shard.read(0, math.ceil(share * len(lengths)), has_states=False)
                yield {timing: without_states(rows) for timing, rows in of_timings.items()}

    def num_responses(self, split: str) -> int:
        return sum(map(len, self._lengths[split]))

    @cached_property
    def _sets(self) -> dict[str, list[list[str]]]:
        """Split -> the prompt set of each response of each shard; empty if the data has one set."""
        splits = ("dev", "test") if isinstance(self.manifest["prompts"], list) else ()
        paths = {split: list_shards(self.data.dir, split) for split in splits}
        return {name: [read_rows(path, ("set",))["set"].to_pylist() for path in each] for name, each in paths.items()}

    def _paths(self, split: str) -> list[dict[str, Path]]:
        """The labels and rows of each shard of a split, by folder. Of train, only the shards with the first
        heads.num_train responses.
        """
        paths = {folder: list_shards(self.data.dir, split, folder) for folder in ("labels", "rows")}
        counts = {folder: len(of_folder) for folder, of_folder in paths.items()}
        if len(set(counts.values())) > 1:
            raise ValueError(
                f"{self.data.dir} has different numbers of {split} shards: {counts}; run `acceptance-heads "
                "data` with this config to finish the data"
            )
        shards = [dict(zip(paths, of_shard, strict=True)) for of_shard in zip(*paths.values(), strict=True)]
        if split != "train" or self.heads.num_train is None:
            return shards
        starts = accumulate((read_sidecar(path, keys=("rows",))["rows"] for path in paths["labels"]), initial=0)
        return [shard for shard, start in zip(shards, starts, strict=False) if start < self.heads.num_train]

    def _open(self, split: str, paths: Sequence[dict[str, Path]]) -> list[FeatureShard]:
        shards = []
        starts = self._draft_starts()
        for of_shard in paths:
            states = {timing: self._states.path(of_shard["labels"], timing) for timing in self.timings}
            shards.append(FeatureShard(**of_shard, states=states, columns=self.columns, draft_starts=starts))
        if not any(any(shard.lengths) for shard in shards):
            raise ValueError(
                f"{split} features of {self.data.dir} have no tokens; raise data.num_{split} and make the data again"
            )
        return shards

    def _draft_starts(self) -> tuple[int, int] | None:
        """`FeatureShard`'s draft_starts; blocks begin at a response's second token, as in decoding."""
        if POSITION not in self.scalars:
            return None
        if not self.manifest.get("draft_length"):
            return 0, 1
        if (layout := released_layout_of(self._draft)) is None:
            raise ValueError(
                f"{POSITION} of drafts depends on the draft's layout, but there is no draft at "
                f"{self._draft.path}; set pair.draft to it, or remove {POSITION} from heads.scalars"
            )
        return int(layout == "dspark"), self.manifest.get("draft_every") or 1


def is_first_process() -> bool:
    """Whether this is rank 0, the process that writes files and prints. Before a Trainer exists, Lightning knows only
    the rank on the node.
    """
    return getattr(rank_zero_only, "rank", 0) == 0 and os.environ.get("NODE_RANK", "0") == "0"


def _first(lengths: Sequence[list[int]], count: int) -> list[list[int]]:
    """The lengths of the first `count` responses, by shard; ValueError if there are fewer."""
    if not 0 < count <= (total := sum(map(len, lengths))):
        raise ValueError(
            f"heads.num_train is {count}, but there are {total} training responses; use 1 to {total}, or null for all"
        )
    starts = accumulate(map(len, lengths), initial=0)
    return [shard[: count - start] for shard, start in zip(lengths, starts, strict=False) if start < count]


def _check_manifest(manifest: Manifest, data: DataConfig, *, pair: PairConfig) -> None:
    """Raise ValueError unless the data was made with the models and the sampling of this pair.

    Training on cached states needs no model. If a model is not on this machine, only the name of its directory is
    compared, with a warning.
    """
    refuse_older(manifest, data.dir)
    compared: dict[str, tuple[object, object]] = {"sampling": (manifest.get("sampling"), asdict(pair.sampling))}
    compared["mixing_ratio"] = manifest.get("mixing_ratio"), data.mixing_ratio
    for name, source in (("target", pair.target), ("draft", pair.draft)):
        recorded = manifest[name]
        described = {"name": source.path, "revision": source.revision}
        with suppress(FileNotFoundError):  # a directory without config.json: an empty mount point, a tokenizer alone
            if Path(without_mtp(source).path).is_dir() and (weights := describe_model(source)["weights"]):
                described = {"weights": weights}
        if "weights" in described or not recorded.get("weights") or recorded.get("name") != Path(source.path).name:
            compared |= {f"{name} {key}": (recorded.get(key), value) for key, value in described.items()}
        elif is_first_process():
            print(
                f"warning: the {name} {source.path} is not on this machine, so only its name was compared with "
                f"{data.dir}/manifest.json; the data was made with weights {recorded['weights'][:12]}",
                file=sys.stderr,
            )
    for key, (old, new) in compared.items():
        if old != new:
            raise ValueError(
                f"{data.dir}/manifest.json: the data was made with {key} {old!r}, but this config has {new!r}; "
                "set data.dir to data of this pair, or make it with `acceptance-heads data`"
            )

"""What heads train on: the positions of some responses, flat, as `data_gen` stored them.

    hidden [tokens, hidden]      at the timing's state, stored dtype
    scalars {name: [tokens]}     those that the sweep reads (`data_gen.labels.scalars`), and acceptance_rate where a
                                 prefix head learns it
    acceptance_prob [tokens]     the label; acceptance_rate takes its place for prefix heads (`of_timing`)
    token [tokens]               the drafted token y
    row_lengths [rows]           tokens of each row, for what needs to know where a response ends; in a feature draft's
                                 data the tokens of each draft

acceptance_rate (the mean of acceptance_prob over y) was tried as the label of the others too: on a 6.2M/0.95M pair and
Alpaca it made every drawn-time head worse on dev, at 1,024 responses (KL 0.382 against 0.374) and at 4,096 (0.368
against 0.356).

Only positions whose token the draft drew are kept (law 4.6): the loss is taken nowhere else.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from lightning_utilities.core.apply_func import apply_to_collection
from safetensors import SafetensorError, safe_open
from torch import Tensor

from store.shards import read_sidecar

RATE = "acceptance_rate"
"""Label of prefix heads, where other heads are trained on acceptance_prob."""
TARGET_PROB = "target_prob"
"""Label of candidate heads."""
LABELS = {"fed": "acceptance_prob", "drawn": "acceptance_prob", "prefix": RATE, "candidate": TARGET_PROB}
"""Timing of a head -> what it predicts."""
FEATURE_SETS = {"fed": "fed", "drawn": "drawn", "prefix": "drawn", "candidate": "drawn"}
"""Timing of a head -> the feature set that it reads: a prefix or candidate head, the states that the tokens were drawn
from.
"""
_COLUMNS = ("hidden", "acceptance_prob", "token", "is_drafted")
_PROBABILITIES = ("acceptance_prob", RATE, TARGET_PROB)
NO_RATE = (
    "has no acceptance_rate, which prefix heads are trained on: data made with data.mode sequential, or imported, "
    "lacks it; make the data with data.mode together, or leave prefix out of heads.timings"
)


class Features(NamedTuple):
    """Positions of some rows, one feature set."""

    hidden: Float[Tensor, "tokens hidden"]
    scalars: dict[str, Float[Tensor, " tokens"]]
    acceptance_prob: Float[Tensor, " tokens"]
    token: Int[Tensor, " tokens"]
    row_lengths: Int[Tensor, " rows"]

    def columns(self, names: Sequence[str]) -> Float[Tensor, "tokens scalar"]:
        """The named scalars side by side."""
        return torch.stack([self.scalars[name] for name in names], -1)


Batch = dict[str, Features]
"""Feature set -> features of the same responses."""


def of_timing(batch: Batch, timing: str) -> Features:
    """Inputs of heads of this timing, with the label that they are trained on and measured by as acceptance_prob."""
    features, label = batch[FEATURE_SETS[timing]], LABELS[timing]
    return features if label == "acceptance_prob" else features._replace(acceptance_prob=features.scalars[label])


def has_tokens(batch: Batch) -> bool:
    """Whether there is a token in it: of several processes one may have none."""
    return any(len(features.token) for features in batch.values())


class FeatureShard:
    """One safetensors file of features, mapped, read in runs of rows.

    The caller has compared it with its sidecar (`store.sums`); each reading checks that numbers are finite and that
    probabilities lie in [0, 1].
    """

    def __init__(self, path: Path, scalars: Sequence[str]) -> None:
        self.path, self.scalars = path, tuple(scalars)
        facts = read_sidecar(path, keys=("rows", "tokens"))
        self.num_rows, self.num_tokens = facts["rows"], facts["tokens"]

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states.

        Raises:
            ValueError: the file is broken, or lacks a column that is to be read.
        """
        with self._open("hidden", *self.scalars) as file:
            return int(file.get_slice("hidden").get_shape()[-1])

    def row_lengths(self) -> list[int]:
        """Number of tokens in each row."""
        with self._open("row_offsets") as file:
            return file.get_tensor("row_offsets").diff().tolist()  # type: ignore[no-any-return]

    def read(self, start: int, stop: int) -> list[Features]:
        """Rows start … stop - 1, each by itself.

        Raises:
            ValueError: the file lacks a tensor, or holds numbers that cannot be.
        """
        names = (*_COLUMNS, *self.scalars)
        with self._open("row_offsets", *names) as file:
            offsets = file.get_tensor("row_offsets")[start : stop + 1]
            first, last = int(offsets[0]), int(offsets[-1])
            columns = {name: file.get_slice(name)[first:last] for name in names}
            has_drafts = "draft_lengths" in file.keys()  # noqa: SIM118
            ends = file.get_tensor("draft_lengths").cumsum(0) if has_drafts else None
        self._check(columns, start, offsets - first)
        rows = [self._row(columns, *bounds) for bounds in pairwise((offsets - first).tolist())]
        if ends is None:
            return rows
        # a feature draft's data: `ends` are those of all drafts of the shard, so a row has those that end within it
        return [
            row._replace(row_lengths=ends[(ends > start) & (ends <= stop)].diff(prepend=start.view(1)))
            for row, (start, stop) in zip(rows, pairwise(offsets), strict=True)
        ]

    def _open(self, *names: str) -> safe_open:
        try:
            file = safe_open(self.path, framework="pt")
        except SafetensorError as error:
            raise ValueError(
                f"{self.path} is no whole safetensors file ({error}); delete it and run `acceptance-heads data` again"
            ) from error
        missing = sorted(set(names) - set(file.keys()))
        if RATE in missing:
            raise ValueError(f"{self.path} {NO_RATE}")
        if missing:
            folder = self.path.parents[1]
            raise ValueError(
                f"{self.path} has no tensor {missing[0]!r}; delete {folder} and run `acceptance-heads data` again"
            )
        return file

    def _check(self, columns: dict[str, Tensor], start: int, offsets: Tensor) -> None:
        for name in ("hidden", "acceptance_prob", *self.scalars):
            bad = ~torch.isfinite(columns[name]).reshape(len(columns[name]), -1).all(-1)
            if name in _PROBABILITIES:
                bad |= (columns[name] < 0) | (columns[name] > 1)
            if bad.any():
                position = int(bad.nonzero()[0])
                row = start + int(torch.searchsorted(offsets, position, right=True)) - 1
                kind = "outside [0, 1] or not finite" if name in _PROBABILITIES else "NaN or infinite"
                raise ValueError(
                    f"{self.path}: {name} of row {row} is {kind}; the models or the shard are broken, make the "
                    "features again"
                )

    def _row(self, columns: dict[str, Tensor], start: int, stop: int) -> Features:
        """The drafted positions of one row."""
        drafted = columns["is_drafted"][start:stop].nonzero().squeeze(-1) + start
        return Features(
            hidden=columns["hidden"][drafted],
            scalars={name: columns[name][drafted] for name in self.scalars},
            acceptance_prob=columns["acceptance_prob"][drafted],
            token=columns["token"][drafted].long(),
            row_lengths=torch.tensor([len(drafted)]),
        )


def join(rows: Sequence[Features]) -> Features:
    """Rows one after the other."""
    return Features(
        hidden=torch.cat([row.hidden for row in rows]),
        scalars={name: torch.cat([row.scalars[name] for row in rows]) for name in rows[0].scalars},
        acceptance_prob=torch.cat([row.acceptance_prob for row in rows]),
        token=torch.cat([row.token for row in rows]),
        row_lengths=torch.cat([row.row_lengths for row in rows]),
    )


def none_of(shard: FeatureShard) -> Features:
    """No row, in the types and widths of a shard."""
    return apply_to_collection(shard.read(0, 1)[0], Tensor, lambda values: values[:0])  # type: ignore[no-any-return]

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
from typing import NamedTuple, NoReturn

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


class Row(NamedTuple):
    """One row of a shard."""

    features: Features
    """`hidden` of every position, still in the file, which is mapped; all else of the drafted positions alone."""
    drafted: Int[Tensor, " tokens"]
    """The drafted positions."""


class FeatureShard:
    """One safetensors file of features, mapped, read in runs of rows.

    Before the first is read, the caller has compared the file with its sidecar (`store.sums`) and its numbers with what
    they can be (`check`).
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

    def read(self, start: int, stop: int) -> list[Row]:
        """Rows start … stop - 1.

        Raises:
            ValueError: the file lacks a tensor.
        """
        with self._open("row_offsets", *_COLUMNS, *self.scalars) as file:
            offsets = file.get_tensor("row_offsets")[start : stop + 1]
            first, last = int(offsets[0]), int(offsets[-1])
            columns = {name: file.get_slice(name)[first:last] for name in (*_COLUMNS, *self.scalars)}
            has_drafts = "draft_lengths" in file.keys()  # noqa: SIM118
            ends = file.get_tensor("draft_lengths").cumsum(0) if has_drafts else None
        rows = [self._row(columns, *bounds) for bounds in pairwise((offsets - first).tolist())]
        if ends is None:
            return rows
        # a feature draft's data: `ends` are those of all drafts of the shard, so a row has those that end within it
        lengths = [ends[(ends > a) & (ends <= b)].diff(prepend=a.view(1)) for a, b in pairwise(offsets)]
        return [
            row._replace(features=row.features._replace(row_lengths=of_drafts))
            for row, of_drafts in zip(rows, lengths, strict=True)
        ]

    @property
    def numbers(self) -> tuple[str, ...]:
        """Names of the columns that `check` looks at."""
        return ("hidden", "acceptance_prob", *self.scalars)

    def check(self) -> None:
        """Raise ValueError if a hidden state, a label or a scalar is no finite number, or a probability lies outside
        [0, 1].
        """
        with self._open("row_offsets", *self.numbers) as file:
            for name in self.numbers:
                values = file.get_tensor(name)
                # a NaN is both the least and the greatest; one pass, where isfinite writes a flag per number
                extremes = torch.stack(values.aminmax()) if values.numel() else torch.zeros(2)
                if not _allowed(name, extremes).all():
                    self._refuse(name, ~_allowed(name, values), file.get_tensor("row_offsets"))

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

    def _refuse(self, name: str, is_bad: Tensor, offsets: Tensor) -> NoReturn:
        position = int(is_bad.reshape(len(is_bad), -1).any(-1).nonzero()[0])
        row = int(torch.searchsorted(offsets, position, right=True)) - 1
        kind = "outside [0, 1] or not finite" if name in _PROBABILITIES else "NaN or infinite"
        raise ValueError(
            f"{self.path}: {name} of row {row} is {kind}; the models or the shard are broken, make the features again"
        )

    def _row(self, columns: dict[str, Tensor], start: int, stop: int) -> Row:
        drafted = columns["is_drafted"][start:stop].nonzero().squeeze(-1)
        of_drafted = {name: values[start:stop][drafted] for name, values in columns.items() if name != "hidden"}
        features = Features(
            hidden=columns["hidden"][start:stop],
            scalars={name: of_drafted[name] for name in self.scalars},
            acceptance_prob=of_drafted["acceptance_prob"],
            token=of_drafted["token"].long(),
            row_lengths=torch.tensor([len(drafted)]),
        )
        return Row(features, drafted)


def _allowed(name: str, values: Tensor) -> Tensor:
    """Where the values are such as the column may have."""
    return (values >= 0) & (values <= 1) if name in _PROBABILITIES else torch.isfinite(values)


def gathered(rows: Sequence[Row]) -> Features:
    """The drafted positions of rows, one row after the other; hidden states are copied once, from the file."""
    lengths = [len(row.drafted) for row in rows]
    stored = rows[0].features.hidden
    is_pinned = torch.cuda.is_available()
    hidden = torch.empty(sum(lengths), stored.shape[1], dtype=stored.dtype, pin_memory=is_pinned)
    for row, part in zip(rows, hidden.split(lengths), strict=True):
        torch.index_select(row.features.hidden, 0, row.drafted, out=part)
    return _joined([row.features for row in rows], hidden)


def join(rows: Sequence[Features]) -> Features:
    """Rows one after the other."""
    return _joined(rows, torch.cat([row.hidden for row in rows]))


def _joined(rows: Sequence[Features], hidden: Float[Tensor, "tokens hidden"]) -> Features:
    return Features(
        hidden=hidden,
        scalars={name: torch.cat([row.scalars[name] for row in rows]) for name in rows[0].scalars},
        acceptance_prob=torch.cat([row.acceptance_prob for row in rows]),
        token=torch.cat([row.token for row in rows]),
        row_lengths=torch.cat([row.row_lengths for row in rows]),
    )


def none_of(shards: Sequence[FeatureShard]) -> Features:
    """No row, in the types and widths of some shards, of which one has rows."""
    shard = next(shard for shard in shards if shard.num_rows)
    first: Features = apply_to_collection(shard.read(0, 1)[0].features, Tensor, lambda values: values[:0])
    return first

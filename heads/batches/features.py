"""Training features: the drafted positions of some responses (law 4.6), flat, as `data_gen` stored them.

    hidden [tokens, hidden]      hidden state at the heads' timing, in the stored dtype
    scalars {name: [tokens]}     the scalars that the sweep reads (`lm.signals`), and the labels of prefix
                                 and candidate heads
    acceptance_prob [tokens]     the label; `of_timing` replaces it for prefix and candidate heads
    token [tokens]               the drafted token y
    row_lengths [rows]           tokens of each response, or of each draft of a feature draft

acceptance_rate (the mean of acceptance_prob over y) is a worse label for drawn-time heads: on a 6.2M/0.95M pair and
Alpaca their KL on dev rose from 0.374 to 0.382 at 1,024 responses and from 0.356 to 0.368 at 4,096.
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
"""Label of prefix heads."""
TARGET_PROB = "target_prob"
"""Label of candidate heads."""
LABELS = {"fed": "acceptance_prob", "drawn": "acceptance_prob", "prefix": RATE, "candidate": TARGET_PROB}
"""Timing of a head -> its label."""
FEATURE_SETS = {"fed": "fed", "drawn": "drawn", "prefix": "drawn", "candidate": "drawn"}
"""Timing of a head -> its feature set."""
_COLUMNS = ("hidden", "acceptance_prob", "token", "is_drafted")
_PROBABILITIES = ("acceptance_prob", RATE, TARGET_PROB)
NO_RATE = (
    "has no acceptance_rate, the label of prefix heads (data of data.mode sequential and imported data lack it); make "
    "the data with data.mode together, or remove prefix from heads.timings"
)


class Features(NamedTuple):
    """Drafted positions of some rows, of one feature set."""

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
    """The features of heads of this timing, with their label as acceptance_prob."""
    features, label = batch[FEATURE_SETS[timing]], LABELS[timing]
    return features if label == "acceptance_prob" else features._replace(acceptance_prob=features.scalars[label])


def has_tokens(batch: Batch) -> bool:
    """Whether the batch has any token; with several processes, the part of one process may have none."""
    return any(len(features.token) for features in batch.values())


class Row(NamedTuple):
    """One row of a shard."""

    features: Features
    """`hidden` has every position and is still in the mapped file; all else has only the drafted positions."""
    drafted: Int[Tensor, " tokens"]
    """The drafted positions."""


class FeatureShard:
    """One memory-mapped safetensors file of features.

    Before reading, callers compare the file with its sidecar (`store.shards`) and the range of its numbers (`check`).
    """

    def __init__(self, path: Path, scalars: Sequence[str]) -> None:
        self.path, self.scalars = path, tuple(scalars)
        facts = read_sidecar(path, keys=("rows", "tokens"))
        self.num_rows, self.num_tokens = facts["rows"], facts["tokens"]

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states; ValueError if the file is broken or lacks a column."""
        with self._open("hidden", *self.scalars) as file:
            return int(file.get_slice("hidden").get_shape()[-1])

    def row_lengths(self) -> list[int]:
        """Number of tokens in each row."""
        with self._open("row_offsets") as file:
            return file.get_tensor("row_offsets").diff().tolist()  # type: ignore[no-any-return]

    def read(self, start: int, stop: int) -> list[Row]:
        """Rows start … stop - 1; ValueError if the file lacks a tensor."""
        with self._open("row_offsets", *_COLUMNS, *self.scalars) as file:
            offsets = file.get_tensor("row_offsets")[start : stop + 1]
            first, last = int(offsets[0]), int(offsets[-1])
            columns = {name: file.get_slice(name)[first:last] for name in (*_COLUMNS, *self.scalars)}
            has_drafts = "draft_lengths" in file.keys()  # noqa: SIM118
            ends = file.get_tensor("draft_lengths").cumsum(0) if has_drafts else None
        rows = [self._row(columns, *bounds) for bounds in pairwise((offsets - first).tolist())]
        if ends is None:
            return rows
        # data of a feature draft: `ends` are of all drafts of the shard, and a row has the drafts that end within it
        lengths = [ends[(ends > a) & (ends <= b)].diff(prepend=a.view(1)) for a, b in pairwise(offsets)]
        return [
            row._replace(features=row.features._replace(row_lengths=of_drafts))
            for row, of_drafts in zip(rows, lengths, strict=True)
        ]

    @property
    def numbers(self) -> tuple[str, ...]:
        """Names of the columns that `check` reads."""
        return ("hidden", "acceptance_prob", *self.scalars)

    def check(self) -> None:
        """Raise ValueError if a number is not finite or a probability is outside [0, 1]."""
        with self._open("row_offsets", *self.numbers) as file:
            for name in self.numbers:
                values = file.get_tensor(name)
                # aminmax returns NaN if there is one; it needs one pass, while isfinite writes a flag per number
                extremes = torch.stack(values.aminmax()) if values.numel() else torch.zeros(2)
                if not _allowed(name, extremes).all():
                    self._refuse(name, ~_allowed(name, values), file.get_tensor("row_offsets"))

    def _open(self, *names: str) -> safe_open:
        try:
            file = safe_open(self.path, framework="pt")
        except SafetensorError as error:
            raise ValueError(
                f"{self.path} is not a complete safetensors file ({error}); delete it and run `acceptance-heads data`"
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
            f"{self.path}: {name} of row {row} is {kind}; check the models, delete the shard and run "
            "`acceptance-heads data` again"
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
    """Mask of the values that are in the column's range."""
    return (values >= 0) & (values <= 1) if name in _PROBABILITIES else torch.isfinite(values)


def gathered(rows: Sequence[Row]) -> Features:
    """The drafted positions of rows, concatenated; hidden states are copied once, from the file."""
    lengths = [len(row.drafted) for row in rows]
    stored = rows[0].features.hidden
    is_pinned = torch.cuda.is_available()
    hidden = torch.empty(sum(lengths), stored.shape[1], dtype=stored.dtype, pin_memory=is_pinned)
    for row, part in zip(rows, hidden.split(lengths), strict=True):
        torch.index_select(row.features.hidden, 0, row.drafted, out=part)
    return _joined([row.features for row in rows], hidden)


def join(rows: Sequence[Features]) -> Features:
    """One `Features` with the tokens of all given rows, in their order."""
    return _joined(rows, torch.cat([row.hidden for row in rows]))


def _joined(rows: Sequence[Features], hidden: Float[Tensor, "tokens hidden"]) -> Features:
    return Features(
        hidden=hidden,
        scalars={name: torch.cat([row.scalars[name] for row in rows]) for name in rows[0].scalars},
        acceptance_prob=torch.cat([row.acceptance_prob for row in rows]),
        token=torch.cat([row.token for row in rows]),
        row_lengths=torch.cat([row.row_lengths for row in rows]),
    )


def empty_features(shards: Sequence[FeatureShard]) -> Features:
    """Features of no rows, with the dtypes and widths of the shards; at least one shard has rows."""
    shard = next(shard for shard in shards if shard.num_rows)
    first: Features = apply_to_collection(shard.read(0, 1)[0].features, Tensor, lambda values: values[:0])
    return first

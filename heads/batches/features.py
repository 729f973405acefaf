"""Training features: the drafted positions of some responses (law 4.6), flat: labels from `data_gen.store.rows`, and
hidden states from `heads.batches.states`, cached or computed for each batch.

    hidden [tokens, hidden]      hidden state at the heads' timing, in heads.state_dtype
    scalars {name: [tokens]}     the scalars that the sweep reads (`lm.signals`), and the labels of prefix
                                 and candidate heads
    acceptance_prob [tokens]     the label; `of_timing` replaces it for prefix and candidate heads
    token [tokens]               the drafted token y
    row_lengths [rows]           tokens of each response, or of each draft of a feature draft
    response_lengths [responses] tokens of each response

acceptance_rate (the mean of acceptance_prob over y) is a worse label for drawn-time heads: on a 6.2M/0.95M pair and
Alpaca their KL on dev rose from 0.374 to 0.382 at 1,024 responses and from 0.356 to 0.368 at 4,096.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import torch
from jaxtyping import Bool, Float, Int
from safetensors import SafetensorError, safe_open
from torch import Tensor

from data_gen.labels.states import StateTiming, Text
from data_gen.store.rows import read_rows
from heads.model.inputs import SIGNALS
from lm.signals import POSITION, logit_of_log

RATE = "acceptance_rate"
"""Label of prefix heads."""
TARGET_PROB = "target_prob"
"""Label of candidate heads."""
LABELS = {"fed": "acceptance_prob", "drawn": "acceptance_prob", "prefix": RATE, "candidate": TARGET_PROB}
"""Timing of a head -> its label."""
STATE_TIMINGS: dict[str, StateTiming] = {"fed": "fed", "drawn": "drawn", "prefix": "drawn", "candidate": "drawn"}
"""Timing of a head -> that of the hidden states that it reads."""
_PROBABILITIES = ("acceptance_prob", RATE, TARGET_PROB)


class Features(NamedTuple):
    """Drafted positions of some rows, at one timing of hidden states."""

    hidden: Float[Tensor, "tokens hidden"]
    scalars: dict[str, Float[Tensor, " tokens"]]
    acceptance_prob: Float[Tensor, " tokens"]
    token: Int[Tensor, " tokens"]
    row_lengths: Int[Tensor, " rows"]
    response_lengths: Int[Tensor, " responses"]


Batch = dict[str, Features]
"""Timing of hidden states -> features of the same responses."""


def of_timing(batch: Batch, timing: str) -> Features:
    """The features of heads of this timing, with their label as acceptance_prob."""
    features = batch[STATE_TIMINGS[timing]]
    label = LABELS[timing]
    return features if label == "acceptance_prob" else features._replace(acceptance_prob=features.scalars[label])


class Row(NamedTuple):
    """The drafted positions of one response: of its mixed sequence, or of all drafts of a feature draft."""

    numbers: dict[str, Tensor]
    """The token and the numbers of each drafted position, [tokens]."""
    drafted: Int[Tensor, " tokens"]
    """The drafted positions."""
    row_lengths: Int[Tensor, " rows"]
    hidden: Float[Tensor, "position hidden"] | None = None
    """The hidden states of every position, still in the mapped file; None if they are computed for each batch."""
    text: Text | None = None
    """What the hidden states are computed from."""

    def without_tokens(self) -> "Row":
        """No position of this row."""
        numbers = {name: values[:0] for name, values in self.numbers.items()}
        return self._replace(numbers=numbers, drafted=self.drafted[:0], row_lengths=self.row_lengths[:0])


class LabelBlock:
    """The labels of some consecutive responses of a shard.

    Worked example: row_offsets (0, 5, 9) and draft_lengths (2, 3, 4) are two responses with drafts (2, 3) and (4).

    Attributes:
        numbers: the token and some columns, [tokens].
        is_drafted: [tokens].
        bounds: where the tokens of each response start and end in these columns.
        draft_lengths: of each response, tokens of its drafts; one draft, unless the draft is a feature draft.
        first: where these columns begin in those of the shard.
    """

    def __init__(self, path: Path, columns: Sequence[str], *, start: int, stop: int) -> None:
        """Read the responses start … stop - 1; ValueError if the file lacks a tensor."""
        names = ("token", *columns)
        with _opened(path, "row_offsets", "is_drafted", *names) as file:
            every = file.get_tensor("row_offsets")
            offsets = every[start : stop + 1]
            self.first = int(offsets[0])
            last = int(offsets[-1])
            self.numbers = {name: _column(file, name, self.first, last) for name in names}
            self.is_drafted: Bool[Tensor, " tokens"] = file.get_slice("is_drafted")[self.first : last]
            has_drafts = "draft_lengths" in file.keys()  # noqa: SIM118, the file is not a mapping
            lengths = file.get_tensor("draft_lengths") if has_drafts else every.diff()
        # the drafts of a response are those that end within it
        cuts = torch.searchsorted(lengths.cumsum(0), offsets, right=True).tolist()
        self.draft_lengths: list[Int[Tensor, " drafts"]] = [lengths[a:b] for a, b in pairwise(cuts)]
        self.bounds: list[tuple[int, int]] = list(pairwise((offsets - self.first).tolist()))

    def texts(self, rows: pa.Table) -> list[Text]:
        """What the hidden states of the responses are computed from; `rows`: their rows."""
        records = zip(rows.to_pylist(), self.bounds, self.draft_lengths, strict=True)
        return [
            Text(
                prompt_ids=record["prompt_ids"],
                response_ids=record["response_ids"],
                draft_ids=self.numbers["token"][begin:end],
                is_drafted=self.is_drafted[begin:end],
                draft_lengths=draft_lengths,
            )
            for record, (begin, end), draft_lengths in records
        ]


class FeatureShard:
    """The labels and hidden states of one shard, in mapped files that passed `check_sums` and `check_numbers`."""

    def __init__(
        self,
        labels: Path,
        rows: Path,
        *,
        states: Mapping[StateTiming, Path | None],
        columns: Sequence[str] = (),
        draft_starts: tuple[int, int] | None = None,
    ) -> None:
        """Args:
        labels: their file.
        rows: the file of rows, with the texts that hidden states are computed from.
        states: timing of hidden states -> their file; None: they are computed for each batch.
        columns: the numbers to read beside the token and acceptance_prob.
        draft_starts: (response index of a feature draft's first draft, distance to the next), else (0, 1); None: no
            `POSITION`.
        """
        self.labels = labels
        self.rows = rows
        self.states = states
        self.columns = columns
        self.draft_starts = draft_starts

    @cached_property
    def lengths(self) -> list[int]:
        """Number of tokens in each response."""
        with _opened(self.labels, "row_offsets") as file:
            return file.get_tensor("row_offsets").diff().tolist()  # type: ignore[no-any-return]

    def texts(self, start: int, stop: int) -> list[Text]:
        """What the hidden states of the responses start … stop - 1 are computed from."""
        return LabelBlock(self.labels, (), start=start, stop=stop).texts(self._rows(start, stop))

    def _rows(self, start: int, stop: int) -> pa.Table:
        return _texts(self.rows, self.rows.stat().st_mtime_ns).slice(start, stop - start)

    def read(self, start: int, stop: int, *, has_states: bool = True) -> dict[StateTiming, list[Row]]:
        """Timing of hidden states -> the rows of the responses start … stop - 1, with states or what they are computed
        from, or without (`has_states`); ValueError if a file lacks a tensor.
        """
        block = LabelBlock(self.labels, ("acceptance_prob", *self.columns), start=start, stop=stop)
        texts: Sequence[Text | None] = [None] * len(block.bounds)
        if has_states and None in self.states.values():
            texts = block.texts(self._rows(start, stop))
        result = {}
        for timing, path in self.states.items():
            rows = [self._row(block, response, timing)._replace(text=text) for response, text in enumerate(texts)]
            if has_states and path is not None:
                with _opened(path, "hidden") as file:
                    hidden = file.get_slice("hidden")[block.first : block.first + len(block.is_drafted)]
                bounds = zip(rows, block.bounds, strict=True)
                rows = [row._replace(hidden=hidden[begin:end]) for row, (begin, end) in bounds]
            result[timing] = rows
        return result

    def _row(self, block: LabelBlock, response: int, timing: StateTiming) -> Row:
        """The labels of one response at the positions that heads of this timing are trained on."""
        begin, end = block.bounds[response]
        drafted = torch.arange(end - begin)
        if timing == "fed":
            drafted = block.is_drafted[begin:end].nonzero().squeeze(-1)
        numbers = {name: values[begin:end][drafted] for name, values in block.numbers.items()}
        row_lengths = block.draft_lengths[response]
        if self.draft_starts is not None:
            index = _response_index(row_lengths, *self.draft_starts)
            numbers[POSITION] = index[drafted].float().log1p()
        if len(drafted) != end - begin:
            row_lengths = torch.tensor([len(drafted)])
        return Row(numbers, drafted, row_lengths)


@lru_cache(16)
def _texts(path: Path, _mtime_ns: int) -> pa.Table:
    return read_rows(path, ("prompt_ids", "response_ids"))


def check_numbers(path: Path, columns: Sequence[str], *, width: int) -> None:
    """Raise ValueError for a number that is not finite, a probability outside [0, 1], or states of another width; rows
    have no such numbers.
    """
    if path.suffix == ".parquet":
        return
    names = ("acceptance_prob", *columns) if path.parent.name == "labels" else ("hidden",)
    with _opened(path, *names) as file:
        if names == ("hidden",) and (stored := file.get_slice("hidden").get_shape()[-1]) != width:
            raise ValueError(
                f"{path} has hidden states of width {stored}, but the draft of manifest.json has {width}; delete "
                f"{path.parent}, which training makes again"
            )
        for name in names:
            values = _column(file, name)
            # aminmax returns NaN if there is one; it needs one pass, while isfinite writes a flag per number
            extremes = torch.stack(values.aminmax()) if values.numel() else torch.zeros(2)
            if not _allowed(name, extremes).all():
                position = int((~_allowed(name, values)).reshape(len(values), -1).any(-1).nonzero()[0])
                kind = "outside [0, 1] or not finite" if name in _PROBABILITIES else "NaN or infinite"
                raise ValueError(
                    f"{path}: {name} of token {position} is {kind}; check the models, and delete the shard to "
                    "make it again"
                )


@contextmanager
def _opened(path: Path, *names: str) -> Iterator[safe_open]:
    try:
        file = safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(
            f"{path} is not a complete safetensors file ({error}); delete it and run `acceptance-heads data`"
        ) from error
    with file:
        missing = sorted({_source(file, name) for name in names} - set(file.keys()))
        if RATE in missing:
            raise ValueError(
                f"{path} has no {RATE}, the label of prefix heads; imported data and data.mode sequential lack "
                "it: make the data with data.mode together, or remove prefix from heads.timings"
            )
        remedy = f"delete {path.parent} and run `acceptance-heads data` again"
        if SIGNALS["prefix"] in missing:
            raise ValueError(
                f"{path} has no {SIGNALS['prefix']}, which prefix heads are compared with; data of version "
                f"0.2.0 lacks it: {remedy}, or remove prefix from heads.timings"
            )
        if missing:
            raise ValueError(f"{path} has no tensor {missing[0]!r}; {remedy}")
        yield file


def _source(file: safe_open, name: str) -> str:
    """The tensor that a column is read from: data of version 0.2.0 has no logit q(y), which follows from log q(y)."""
    is_derived = name == "logit_token_prob" and name not in file.keys()  # noqa: SIM118, the file is not a mapping
    return "log_token_prob" if is_derived else name


def _column(file: safe_open, name: str, start: int = 0, stop: int | None = None) -> Tensor:
    """Some rows of a tensor, or of what follows from one."""
    source = _source(file, name)
    values: Tensor = file.get_slice(source)[start:stop]
    return values if source == name else logit_of_log(values)


def has_exact_logits(labels: Path) -> bool:
    """Whether logit q(y) was computed from logits. Data of version 0.2.0 has log q(y) alone, in which float32 rounds
    1 - q(y) to about 1e-6.
    """
    with _opened(labels) as file:
        return _source(file, "logit_token_prob") == "logit_token_prob"


def _response_index(lengths: Int[Tensor, " drafts"], first: int, every: int) -> Int[Tensor, " tokens"]:
    """Index in the response of every token of its drafts, which begin at first, first + every, …; draft after draft."""
    shifts = first + every * torch.arange(len(lengths)) - lengths.cumsum(0) + lengths
    return torch.arange(int(lengths.sum())) + shifts.repeat_interleave(lengths)


def _allowed(name: str, values: Tensor) -> Tensor:
    return (values >= 0) & (values <= 1) if name in _PROBABILITIES else torch.isfinite(values)


def gathered(rows: Sequence[Row]) -> Features:
    """The drafted positions of rows, concatenated; hidden states are copied once, from the mapped file."""
    lengths = [len(row.drafted) for row in rows]
    stored = [row.hidden for row in rows if row.hidden is not None]
    is_pinned = torch.cuda.is_available()
    hidden = torch.empty(sum(lengths), stored[0].shape[1], dtype=stored[0].dtype, pin_memory=is_pinned)
    for row, states, part in zip(rows, stored, hidden.split(lengths), strict=True):
        torch.index_select(states, 0, row.drafted, out=part)
    return with_states(rows, hidden)


def without_states(rows: Sequence[Row]) -> Features:
    """The numbers of rows, concatenated, beside hidden states of width 0."""
    return with_states(rows, torch.empty(sum(len(row.drafted) for row in rows), 0))


def with_states(rows: Sequence[Row], hidden: Float[Tensor, "tokens hidden"]) -> Features:
    """The numbers of rows, concatenated, beside the hidden states of their drafted positions."""
    numbers = {name: torch.cat([row.numbers[name] for row in rows]) for name in rows[0].numbers}
    probs = numbers.pop("acceptance_prob")
    tokens = numbers.pop("token").long()
    row_lengths = torch.cat([row.row_lengths for row in rows])
    return Features(hidden, numbers, probs, tokens, row_lengths, torch.tensor([len(row.drafted) for row in rows]))

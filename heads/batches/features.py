"""Training features: the drafted positions of some responses (law 4.6), flat: labels from `data_gen.store.rows`, and
hidden states from disk, or from the frozen draft (`DraftFeatures`), up to the stored precision.

    hidden [tokens, hidden]      hidden state at the heads' timing, in the stored dtype
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
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import torch
from jaxtyping import Float, Int
from lightning_utilities.core.apply_func import apply_to_collection
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel

from data_gen.store.rows import read_rows
from heads.model.inputs import SIGNALS
from lm.forwards import hidden_states
from lm.signals import POSITION, logit_of_log

RATE = "acceptance_rate"
"""Label of prefix heads."""
TARGET_PROB = "target_prob"
"""Label of candidate heads."""
LABELS = {"fed": "acceptance_prob", "drawn": "acceptance_prob", "prefix": RATE, "candidate": TARGET_PROB}
"""Timing of a head -> its label."""
FEATURE_SETS = {"fed": "fed", "drawn": "drawn", "prefix": "drawn", "candidate": "drawn"}
"""Timing of a head -> its feature set."""
_PROBABILITIES = ("acceptance_prob", RATE, TARGET_PROB)


class Features(NamedTuple):
    """Drafted positions of some rows, of one feature set."""

    hidden: Float[Tensor, "tokens hidden"]
    scalars: dict[str, Float[Tensor, " tokens"]]
    acceptance_prob: Float[Tensor, " tokens"]
    token: Int[Tensor, " tokens"]
    row_lengths: Int[Tensor, " rows"]
    response_lengths: Int[Tensor, " responses"]


Batch = dict[str, Features]
"""Feature set -> features of the same responses."""


def of_timing(batch: Batch, timing: str) -> Features:
    """The features of heads of this timing, with their label as acceptance_prob."""
    features, label = batch[FEATURE_SETS[timing]], LABELS[timing]
    return features if label == "acceptance_prob" else features._replace(acceptance_prob=features.scalars[label])


class Row(NamedTuple):
    """The drafted positions of one response: of its mixed sequence, or of all drafts of a feature draft."""

    numbers: dict[str, Tensor]
    """The token and the numbers of each drafted position, [tokens]."""
    drafted: Int[Tensor, " tokens"]
    """The drafted positions."""
    row_lengths: Int[Tensor, " rows"]
    hidden: Float[Tensor, "position hidden"] | None = None
    """The hidden states of every position, still in the mapped file; None if they come from the draft."""
    prompt_ids: Sequence[int] = ()
    response_ids: Sequence[int] = ()
    """Only if the hidden states come from the draft."""

    def without_tokens(self) -> "Row":
        """No position of this row."""
        numbers = {name: values[:0] for name, values in self.numbers.items()}
        return self._replace(numbers=numbers, drafted=self.drafted[:0], row_lengths=self.row_lengths[:0])


@dataclass(frozen=True)
class FeatureShard:
    """The labels and hidden states of one shard, in mapped files that passed `check_sums` and `check_numbers`."""

    labels: Path
    states: Mapping[str, Path | None]
    """Feature set -> the file of its hidden states; None: the draft computes them from `texts`."""
    columns: Sequence[str]
    """The numbers to read beside the token and acceptance_prob."""
    draft_starts: tuple[int, int] | None = None
    """(response index of a feature draft's first draft, distance to the next), else (0, 1); None: no `POSITION`."""
    texts: Path | None = None
    """The file of prompts and responses, for the draft to read."""

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens that are read of each response: with its prompt, if the draft reads them."""
        if self.texts is None:
            return self.row_lengths
        return pc.add(*map(pc.list_value_length, _texts(self.texts).columns)).to_pylist()  # type: ignore[no-any-return]

    @cached_property
    def row_lengths(self) -> list[int]:
        """Number of tokens in each response."""
        with _opened(self.labels, "row_offsets") as file:
            return file.get_tensor("row_offsets").diff().tolist()  # type: ignore[no-any-return]

    def read(self, start: int, stop: int) -> dict[str, list[Row]]:
        """Feature set -> the rows of the responses start … stop - 1; ValueError if a file lacks a tensor."""
        names = ("acceptance_prob", "token", *self.columns)
        with _opened(self.labels, "row_offsets", "is_drafted", *names) as file:
            every = file.get_tensor("row_offsets")
            offsets = every[start : stop + 1]
            first, last = int(offsets[0]), int(offsets[-1])
            numbers = {name: _column(file, name, first, last) for name in names}
            is_drafted = file.get_slice("is_drafted")[first:last]
            has_drafts = "draft_lengths" in file.keys()  # noqa: SIM118, the file is not a mapping
            ends = file.get_tensor("draft_lengths").cumsum(0) if has_drafts else every[1:]
        bounds = list(pairwise((offsets - first).tolist()))
        # a response has the drafts of a feature draft that end within it; other drafts are whole responses
        lengths = [ends[(ends > a) & (ends <= b)].diff(prepend=a.view(1)) for a, b in pairwise(offsets)]
        texts = _texts(self.texts).slice(start, stop - start).to_pylist() if self.texts else [{}] * len(bounds)

        def row_of(timing: str, hidden: Tensor | None, response: int) -> Row:
            begin, end = bounds[response]
            drafted = torch.arange(end - begin)
            if timing == "fed":
                drafted = is_drafted[begin:end].nonzero().squeeze(-1)
            of_drafted = {name: values[begin:end][drafted] for name, values in numbers.items()}
            if self.draft_starts is not None:
                index = _response_index(lengths[response], *self.draft_starts)
                of_drafted[POSITION] = index[drafted].float().log1p()
            row_lengths = lengths[response] if len(drafted) == end - begin else torch.tensor([len(drafted)])
            states = None if hidden is None else hidden[begin:end]
            return Row(of_drafted, drafted, row_lengths, states, **texts[response])

        result = {}
        for timing, path in self.states.items():
            hidden = None
            if path is not None:
                with _opened(path, "hidden") as file:
                    hidden = file.get_slice("hidden")[first:last]
            result[timing] = [row_of(timing, hidden, response) for response in range(len(bounds))]
        return result


@lru_cache(16)
def _texts(path: Path) -> pa.Table:
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
            problem = f"{path} has hidden states of width {stored}, but the draft of manifest.json has {width}"
            raise ValueError(f"{problem}; they come from another draft: delete the features and make them again")
        for name in names:
            values = _column(file, name)
            # aminmax returns NaN if there is one; it needs one pass, while isfinite writes a flag per number
            extremes = torch.stack(values.aminmax()) if values.numel() else torch.zeros(2)
            if not _allowed(name, extremes).all():
                position = int((~_allowed(name, values)).reshape(len(values), -1).any(-1).nonzero()[0])
                kind = "outside [0, 1] or not finite" if name in _PROBABILITIES else "NaN or infinite"
                remedy = "check the models, delete the shard and run `acceptance-heads data` again"
                raise ValueError(f"{path}: {name} of token {position} is {kind}; {remedy}")


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
            problem = f"{path} has no {RATE}, the label of prefix heads; imported data and data.mode sequential lack it"
            raise ValueError(f"{problem}: make the data with data.mode together, or remove prefix from heads.timings")
        remedy = f"delete {path.parent} and run `acceptance-heads data` again"
        if SIGNALS["prefix"] in missing:
            problem = f"{path} has no {SIGNALS['prefix']}, which prefix heads are compared with; data of version 0.2.0"
            raise ValueError(f"{problem} lacks it: {remedy}, or remove prefix from heads.timings")
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
    """The drafted positions of rows, concatenated; hidden states are copied once, from the file."""
    lengths, stored = [len(row.drafted) for row in rows], [row.hidden for row in rows if row.hidden is not None]
    is_pinned = torch.cuda.is_available()
    hidden = torch.empty(sum(lengths), stored[0].shape[1], dtype=stored[0].dtype, pin_memory=is_pinned)
    for row, states, part in zip(rows, stored, hidden.split(lengths), strict=True):
        torch.index_select(states, 0, row.drafted, out=part)
    return with_states(rows, hidden)


def with_states(rows: Sequence[Row], hidden: Float[Tensor, "tokens hidden"]) -> Features:
    """The numbers of rows, concatenated, beside the hidden states of their drafted positions."""
    numbers = {name: torch.cat([row.numbers[name] for row in rows]) for name in rows[0].numbers}
    probs, tokens = numbers.pop("acceptance_prob"), numbers.pop("token").long()
    row_lengths = torch.cat([row.row_lengths for row in rows])
    return Features(hidden, numbers, probs, tokens, row_lengths, torch.tensor([len(row.drafted) for row in rows]))


class DraftFeatures:
    """Computes the features of responses with the frozen draft, once for all heads; labels come from disk."""

    def __init__(self, draft: PreTrainedModel) -> None:
        self.draft = draft.eval().requires_grad_(False)

    @torch.no_grad()
    def __call__(self, rows: Mapping[str, Sequence[Row]], device: torch.device) -> Batch:
        """The features of some rows by timing, on `device`; moves the draft there."""
        self.draft.to(device)
        batch = {timing: self._features(of_timing, is_fed=timing == "fed") for timing, of_timing in rows.items()}
        return apply_to_collection(batch, Tensor, Tensor.to, device)  # type: ignore[no-any-return]

    def _features(self, rows: Sequence[Row], *, is_fed: bool) -> Features:
        # a fed-time state is that at the token itself; a drawn-time state is that of the position before
        read = [_mixed(row) if is_fed else row.response_ids[:-1] for row in rows]
        sequences = [[*row.prompt_ids, *ids] for row, ids in zip(rows, read, strict=True)]
        states = hidden_states(self.draft, sequences, [len(row.prompt_ids) - (not is_fed) for row in rows])
        parts = zip(states.split([len(row.response_ids) for row in rows]), rows, strict=True)
        return with_states(rows, torch.cat([part[row.drafted.to(part.device)] for part, row in parts]))


def _mixed(row: Row) -> list[int]:
    """The mixed sequence Z: the draft's tokens at the drafted positions."""
    ids = torch.tensor(row.response_ids, device=row.drafted.device)
    ids[row.drafted] = row.numbers["token"].long()
    return ids.tolist()  # type: ignore[no-any-return]

"""A trace in memory (law 4.10): outcomes and signals of every token that a draft could draw, whatever the policy.

All tokens are in one flat order: the *path* (the responses, row after row), then the *branches* (one per rejected
path position, in path order). With start s of a round and j tokens drafted before,

    flat(s, j) = s + j                               while s + j < rejected[s], the first rejected position from s on
               = first_drawn[rejected[s]] + s + j - rejected[s]                   from there on

Signals are float32, as the loop reads them.

What a feature draft draws depends on where its round began (`data_gen.labels.rollout`). Its trace has a branch at every
position, the whole draft of the round that starts there: `is_rejected` is True throughout, and `num_passing` has how
many of its tokens are accepted. A row's first round drafts nothing, as in decoding, so its first branch is empty; the
path holds each draft's first step, with the response's token.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from decode.policies.learning import logit_of
from decode.policies.scores import TOKEN_LOGIT, ScoreHead
from heads.model.head import AcceptanceHead
from lm import Sampling
from lm.signals import POSITION, logit_of_log

Array = np.ndarray
CONFIDENCE = "confidence_logit"
"""The signal that a DSpark draft's own head gives."""
LENGTH = "accepted_length"
"""The signal that a length head gives, once it was fitted (`evaluation.traces.lengths`)."""
_LATER_TURN = re.compile(r"#\d+$")
_TOKENS_AT_ONCE = 16384
Piece = tuple["Callable[[], InputTensors]", Int[Array, " _"], Int[Array, " _"]]
"""A part of a trace that is read at once, such as a shard: what reads it, and of each token its row in `hidden` there
and its flat index in the trace.
"""


class InputTensors(NamedTuple):
    """The tensors that heads read of a trace."""

    hidden: Float[Tensor, "drafts hidden"]
    """The draft's state that produced each token's distribution."""
    embedding_ids: Int[Tensor, " known"]
    """Token ids, ascending."""
    embedding: Float[Tensor, "known hidden"]
    """Rows of the draft's input embeddings."""


@dataclass(frozen=True)
class TraceRow:
    """One prompt and one response of the target to it; a prompt has a row for each of its turns and draws of coins."""

    id: str
    category: str
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    limit: int
    """The length limit of the generation, at least len(response_ids)."""
    dataset: str = field(default="", compare=False)
    """Prompts of several datasets may share an id."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Everything that replay needs of some prompts."""

    rows: tuple[TraceRow, ...]
    sampling: Sampling
    max_draft_length: int
    drafts: dict[str, Shaped[Array, " drafts"]]
    """Columns of every token: token, is_eos; as signals max_prob, top_prob and every scalar (untruncated, temperature
    1), acceptance_prob (under the run's Sampling), and CONFIDENCE of a draft that has it; and under `score.FINGERPRINT`
    logits of heads, filled when they are first needed.
    """
    positions: dict[str, Shaped[Array, " positions"]]
    """Columns of every response token: is_rejected, branch_lengths, acceptance_rate, and of a feature draft num_passing
    (`Trace.num_passing`).
    """
    pieces: tuple[Piece, ...] = ()
    """What heads read, the bulk of a trace: one piece at a time is in memory, and none is kept; empty: not recorded."""
    draft_sampling: Sampling | None = None
    """The sampling that the draft draws by, if it is not the target's."""
    block_size: int | None = None
    """Tokens of one forward of a DSpark draft, all that a round of it costs; None: each draft step is a forward."""

    @property
    def token(self) -> Int[Array, " drafts"]:
        """Ids of the drawn tokens."""
        return self.drafts["token"]

    @property
    def is_rejected(self) -> Bool[Array, " positions"]:
        """Whether a branch leaves the path at each position."""
        return self.positions["is_rejected"]

    @property
    def branch_lengths(self) -> Int[Array, " positions"]:
        """Tokens of the branch at each position; 0 where there is none, or no room for a draft before the limit."""
        return self.positions["branch_lengths"]

    @property
    def num_passing(self) -> Int[Array, " positions"] | None:
        """Accepted tokens of the draft that starts at each position; only of a feature draft, else None."""
        return self.positions.get("num_passing")

    @cached_property
    def offsets(self) -> Int[Array, " row_offsets"]:
        """Row r covers path positions offsets[r] to offsets[r + 1]."""
        return np.cumsum([0, *(len(row.response_ids) for row in self.rows)])

    @cached_property
    def prompt_of_row(self) -> Int[Array, " rows"]:
        """Number of each row's prompt, by first appearance: a prompt's draws, and its later turns (81#2 after 81), are
        not independent, so resampling keeps them together.
        """
        ids = [(row.dataset, row.id) for row in self.rows]
        firsts = [(dataset, _LATER_TURN.sub("", name)) for dataset, name in ids]
        known = set(ids)
        prompts = [first if first in known else own for first, own in zip(firsts, ids, strict=True)]
        numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}
        return np.array([numbers[prompt] for prompt in prompts])

    @property
    def num_prompts(self) -> int:
        """Prompts of all rows."""
        return int(self.prompt_of_row.max()) + 1

    @property
    def num_positions(self) -> int:
        """Response tokens of all rows."""
        return len(self.is_rejected)

    @cached_property
    def first_drawn(self) -> Int[Array, " positions"]:
        """Flat index of the first token of a round from each position: the branch's, or else the response's token."""
        firsts = self.num_positions + np.cumsum(self.branch_lengths) - self.branch_lengths
        return np.where(self.branch_lengths > 0, firsts, np.arange(self.num_positions))

    @cached_property
    def fork(self) -> Int[Array, " positions"]:
        """Where a round that starts at each position leaves the path for a branch; num_positions: nowhere."""
        none = self.num_positions
        ends = np.repeat(self.offsets[1:], np.diff(self.offsets))
        marks = np.where(self.is_rejected, np.arange(none), none)
        following = np.minimum.accumulate(marks[::-1])[::-1]
        return np.where(following < ends, following, none)

    @cached_property
    def rejected(self) -> Int[Array, " positions"]:
        """Where a round that starts at each position has its first rejection on the path; num_positions: nowhere."""
        return self.fork if self.num_passing is None else np.arange(self.num_positions) + self.num_passing

    @property
    def longest(self) -> Int[Array, " positions"]:
        """The most tokens that a round from each position may draft; of a feature draft, those of its branch."""
        return np.full(self.num_positions, self.max_draft_length) if self.num_passing is None else self.branch_lengths

    @property
    def is_drafted(self) -> Bool[Array, " positions"]:
        """Whether a round from each position drafts: it needs room before the limit, and a feature draft its target."""
        return ~self.is_rejected | (self.branch_lengths > 0)

    @property
    def is_first_accepted(self) -> Bool[Array, " positions"]:
        """Whether verification accepts the token of `first_drawn`."""
        return self.rejected > np.arange(self.num_positions)

    @cached_property
    def before(self) -> Int[Array, " drafts"]:
        """Flat index of the token drawn before each, on its path or branch; for a row's first token, its own."""
        before = np.arange(len(self.token)) - 1
        before[self.offsets[:-1]] = self.offsets[:-1]
        at = self.branch_lengths.nonzero()[0]
        before[self.first_drawn[at]] = before[at]
        return before

    @property
    def depths(self) -> Int[Array, " branched"]:
        """Tokens of its branch before each token of the branches, in their flat order."""
        return counted(self.branch_lengths)

    def signal(self, name: str) -> Float[Array, " drafts"]:
        """A signal as policies read it; ValueError if the trace was recorded without it."""
        if name == "token_prob":
            return np.exp(self.drafts["log_token_prob"])
        if name == TOKEN_LOGIT and name not in self.drafts:  # a trace of version 0.2.0
            return logit_of_log(torch.from_numpy(self.drafts["log_token_prob"])).numpy()
        if name not in self.drafts:
            raise ValueError(
                "the trace's draft has no confidence head; use a DSpark draft that has one, or another policy"
                if name == CONFIDENCE
                else f"the trace was recorded without the signal {name}; delete its folder and record it again "
                "(`acceptance-heads trace`)"
            )
        return self.drafts[name]

    def logit(self, head: AcceptanceHead | ScoreHead) -> Float[Array, " drafts"]:
        """Logit of the head for each token (drawn-time, prefix), or for the token before it (fed-time): what is known
        when it is drawn. ValueError for a head of another width, or of scalars or states that were not recorded.
        """
        if not isinstance(head, ScoreHead):
            self.score([head])
            return self.drafts[_score_key(head)]
        if head.signal:
            return self.signal(head.signal)
        if head.score == "max_prob":
            return np.asarray(logit_of(self.signal("max_prob")))
        if head.score != "perfect":
            return self.signal(CONFIDENCE if head.score == "confidence" else LENGTH)
        prob = self.drafts["acceptance_prob"].astype(np.float64)
        if np.isnan(prob).any():
            raise ValueError("the trace has no acceptance_prob along branches; record it with decode.perfect_head=true")
        with np.errstate(divide="ignore"):
            logit = np.log(prob) - np.log1p(-prob)
        return logit[self.before] if head.timing == "fed" else logit

    def inputs(self) -> InputTensors:
        """What heads read of all tokens, in their flat order."""
        parts = [read() for read, _, _ in self.pieces]
        ids, index = torch.cat([part.embedding_ids for part in parts]).unique(return_inverse=True)
        rows = torch.cat([part.embedding for part in parts])
        embedding = rows.new_empty(len(ids), rows.shape[-1])
        embedding[index] = rows
        hidden = parts[0].hidden.new_empty(len(self.token), parts[0].hidden.shape[-1])
        for part, (_, hidden_rows, drafts) in zip(parts, self.pieces, strict=True):
            hidden[drafts] = part.hidden[hidden_rows]
        return InputTensors(hidden, ids, embedding)

    @torch.inference_mode()
    def score(self, heads: Iterable[AcceptanceHead]) -> None:
        """Add the logits of heads to `drafts`, those that are not there yet: piece by piece, each for all heads, since
        hidden states are read from disk and dropped. Errors as `logit` has them.
        """
        missing = {_score_key(head): head for head in heads if _score_key(head) not in self.drafts}
        if not missing:
            return
        if not self.pieces:
            raise ValueError(
                "the trace has neither scores of this head nor hidden states to compute them from; record it again "
                "with decode.trace_hidden=true, or with the head in decode.heads"
            )
        scores = {key: np.empty(len(self.token), dtype=np.float32) for key in missing}
        for read, hidden_rows, drafts in self.pieces:
            tensors = read()
            for key, head in missing.items():
                for start in range(0, len(drafts), _TOKENS_AT_ONCE):
                    part = slice(start, start + _TOKENS_AT_ONCE)
                    rows = torch.from_numpy(hidden_rows[part])
                    scores[key][drafts[part]] = self._logits(head, tensors, rows, torch.from_numpy(drafts[part]))
            del tensors  # before the next ones are read
        self.drafts.update(scores)

    def _logits(
        self, head: AcceptanceHead, tensors: InputTensors, rows: Int[Tensor, " token"], drafts: Int[Tensor, " token"]
    ) -> Float[Array, " token"]:
        """Logits of a head for some tokens: their `rows` in the hidden states, and their flat indices."""
        hidden, known_ids, embedding = tensors
        if head.hidden_size != hidden.shape[-1]:
            raise ValueError(
                f"the head reads hidden states of width {head.hidden_size}, the trace's are {hidden.shape[-1]} wide; "
                "use a head that was trained for this draft"
            )
        numbers = self.drafts | {POSITION: self._text_position}
        if missing := set(head.inputs.scalars) - numbers.keys():
            raise ValueError(
                f"the head reads {', '.join(sorted(missing))}, which the trace was recorded without; record it again"
            )
        scored = torch.from_numpy(self.before)[drafts] if head.timing == "fed" else drafts
        columns = {name: torch.from_numpy(numbers[name])[scored] for name in head.inputs.scalars}
        of_tokens = None
        if head.inputs.embedding:
            tokens = torch.from_numpy(self.token)[scored].to(known_ids.dtype)
            of_tokens = embedding[torch.searchsorted(known_ids, tokens)]
        return head(hidden[rows], head.inputs.stacked(columns), of_tokens).float().numpy()

    @cached_property
    def _text_position(self) -> Float[Array, " drafts"]:
        """log(1 + tokens of the response before each token)."""
        num_before = counted(np.diff(self.offsets))
        num_before = np.append(num_before, np.repeat(num_before, self.branch_lengths) + self.depths)
        return np.log1p(num_before, dtype=np.float32)

    def select(self, rows: Sequence[int], *, num_tokens: int | None = None) -> "Trace":
        """The trace of some rows; with `num_tokens`, as if their length limit had been at most that many tokens."""
        kept = [self.rows[row] for row in rows]
        if (most := num_tokens) is not None:
            kept = [replace(row, response_ids=row.response_ids[:most], limit=min(row.limit, most)) for row in kept]
        sizes = np.array([len(row.response_ids) for row in kept], dtype=np.int64)
        path = np.repeat(self.offsets[list(rows)], sizes) + counted(sizes)
        lengths = self.branch_lengths[path]
        at = np.append(path, np.repeat(self.first_drawn[path], lengths) + counted(lengths))
        return replace(
            self,
            rows=tuple(kept),
            drafts={name: values[at] for name, values in self.drafts.items()},
            positions={name: values[path] for name, values in self.positions.items()},
            pieces=self._pieces_at(at),
        )

    def _pieces_at(self, at: Int[Array, " selected"]) -> tuple[Piece, ...]:
        """The pieces of some tokens, by their flat indices."""
        pieces: list[Piece] = []
        for read, rows, drafts in self.pieces:
            row_of = np.full(len(self.token), -1)  # elsewhere than in this piece
            row_of[drafts] = rows
            selected = np.flatnonzero(row_of[at] >= 0)
            if len(selected):
                pieces.append((read, row_of[at[selected]], selected))
        return tuple(pieces)


def join_traces(traces: Sequence[Trace]) -> Trace:
    """The rows of traces of one pair and settings, with the columns that all have; ValueError for no traces."""
    if not traces:
        raise ValueError("no rows: a trace has at least one")
    first = traces[0]
    drafts = {}
    for name in first.drafts:
        if all(name in trace.drafts for trace in traces):
            paths = [trace.drafts[name][: trace.num_positions] for trace in traces]
            branches = [trace.drafts[name][trace.num_positions :] for trace in traces]
            drafts[name] = np.concatenate(paths + branches)
    positions = {}
    for name in first.positions:
        positions[name] = np.concatenate([trace.positions[name] for trace in traces])
    return replace(
        first,
        rows=tuple(row for trace in traces for row in trace.rows),
        drafts=drafts,
        positions=positions,
        pieces=_joined_pieces(traces) if all(trace.pieces for trace in traces) else (),
    )


def _score_key(head: AcceptanceHead) -> str:
    return f"score.{head.fingerprint()}"


def _joined_pieces(traces: Sequence[Trace]) -> tuple[Piece, ...]:
    """The pieces of traces whose paths come first and then all branches."""
    pieces: list[Piece] = []
    first_path = 0
    first_branch = sum(trace.num_positions for trace in traces)
    for trace in traces:
        num_branch = len(trace.token) - trace.num_positions
        index = np.append(first_path + np.arange(trace.num_positions), first_branch + np.arange(num_branch))
        pieces += [(read, rows, index[drafts]) for read, rows, drafts in trace.pieces]
        first_path += trace.num_positions
        first_branch += num_branch
    return tuple(pieces)


def whole_piece(read: Callable[[], InputTensors], num_tokens: int) -> Piece:
    """A trace of so many tokens that is read at once."""
    every = np.arange(num_tokens)
    return read, every, every


def counted(lengths: Int[Array, " group"]) -> Int[Array, " member"]:
    """0, 1, … of the members of each group, group after group: [2, 3] gives 0, 1, 0, 1, 2."""
    return np.arange(lengths.sum()) - np.repeat(lengths.cumsum() - lengths, lengths)

"""A trace in memory (law 4.10): outcomes and signals of every token that a draft could draw, whatever the policy.

All tokens stand in one flat order: the *path* (the responses, row after row), then the *branches* (one per rejected
path position, in path order). With start s of a round and j tokens drafted before,

    flat(s, j) = s + j                               while s + j < rejected[s], the first rejected path position from s
        on
               = branch[rejected[s]] + s + j - rejected[s]                        from there on

`num_drafts` is that of path and branches together. Signals are float32, as the loop reads them.

What a feature draft says depends on where its round began (`lm.branches.chains`). Its trace has a branch at every
position, the whole draft of the round that starts there: `is_rejected` is True throughout, and `num_passing` has how
many of its tokens are accepted. A row's first round drafts nothing, as in decoding, so its first branch is empty; the
path holds each draft's first step, with the response's token.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int

from decode.policies.learning import logit_of
from evaluation.traces.bounds import ScoreHead
from evaluation.traces.inputs import TokenInputs, join_inputs, scores_of
from heads.model.head import AcceptanceHead
from lm import Sampling

Array = np.ndarray
CONFIDENCE = "confidence_logit"
"""The signal that a DSpark draft's own head gives."""
_LATER_TURN = re.compile(r"#\d+$")
_SHARED = ("sampling", "max_draft_length", "draft_sampling", "block_size")
"""Fields that joined traces must agree on."""
_PER_DRAFT = ("token", "is_eos")
_PER_POSITION = ("is_rejected", "acceptance_rate", "num_passing")


@dataclass(frozen=True)
class TraceRow:
    """One prompt and one response of the target to it; prompts have as many rows as they have turns and draws of the
    coins.
    """

    id: str
    category: str
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    limit: int
    """The length limit of the generation, at least len(response_ids)."""
    dataset: str = field(default="", compare=False)
    """Told apart by it, prompts of several datasets may have one id."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Everything that replay needs of some prompts."""

    rows: tuple[TraceRow, ...]
    sampling: Sampling
    max_draft_length: int
    token: Int[Array, " drafts"]
    is_eos: Bool[Array, " drafts"]
    signals: dict[str, Float[Array, " drafts"]]
    """max_prob, top_prob and every scalar (untruncated, temperature 1), acceptance_prob (under the run's Sampling), and
    CONFIDENCE of a draft that has it.
    """
    is_rejected: Bool[Array, " positions"]
    acceptance_rate: Float[Array, " positions"]
    branch_lengths: Int[Array, " rejected"]
    inputs: TokenInputs | None = None
    scores: dict[str, Float[Array, " drafts"]] = field(default_factory=dict)
    """Logits by fingerprint of the head, filled as heads are asked for."""
    num_passing: Int[Array, " positions"] | None = None
    """Tokens of a feature draft that verification accepts of the whole draft of a round that starts at each position.
    """
    draft_sampling: Sampling | None = None
    """The sampling that the draft draws by, where it is not the target's."""
    block_size: int | None = None
    """Tokens that a DSpark draft gives in one forward, which is all that a round of it costs; None: each draft step is
    a forward.
    """

    @property
    def has_point_masses(self) -> bool:
        """Whether a drafted token follows from the tokens before it, so that no chance decides how long a draft is."""
        return (self.draft_sampling or self.sampling).is_greedy

    @cached_property
    def offsets(self) -> Int[Array, " row_offsets"]:
        """Row r covers path positions offsets[r] to offsets[r + 1]."""
        return np.cumsum([0, *(len(row.response_ids) for row in self.rows)])

    @cached_property
    def prompt_of_row(self) -> Int[Array, " rows"]:
        """Number of the prompt that each row belongs to, by first appearance. Its draws, and its later turns (81#2
        after 81), are not independent of each other, so whoever resamples takes or leaves them together.
        """
        known = {(row.dataset, row.id) for row in self.rows}
        firsts = [(row.dataset, _LATER_TURN.sub("", row.id)) for row in self.rows]
        prompts = [
            first if first in known else (row.dataset, row.id) for first, row in zip(firsts, self.rows, strict=True)
        ]
        numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}
        return np.array([numbers[prompt] for prompt in prompts])

    @property
    def num_prompts(self) -> int:
        """Prompts of all rows."""
        return int(self.prompt_of_row.max()) + 1

    @property
    def first_draws(self) -> list[int]:
        """One row of each prompt and turn: the first of its draws."""
        return list({(row.dataset, row.id): index for index, row in reversed([*enumerate(self.rows)])}.values())[::-1]

    @property
    def num_positions(self) -> int:
        """Response tokens of all rows."""
        return len(self.is_rejected)

    @cached_property
    def branch(self) -> Int[Array, " positions"]:
        """Flat index of the first token of the branch at each rejected position; the position itself where there is no
        branch.
        """
        start = np.arange(self.num_positions)
        firsts = self.num_positions + np.cumsum(self.branch_lengths) - self.branch_lengths
        start[self.is_rejected] = np.where(self.branch_lengths > 0, firsts, start[self.is_rejected])
        return start

    @cached_property
    def rejected(self) -> Int[Array, " positions"]:
        """The first path position at which a round that starts at each position has a rejection; num_positions where
        the row has none.
        """
        return self.fork if self.num_passing is None else np.arange(self.num_positions) + self.num_passing

    @cached_property
    def longest(self) -> Int[Array, " positions"]:
        """The most tokens that a round from each position may draft; `max_draft_length`, or what its branch has of a
        feature draft's.
        """
        return np.full(self.num_positions, self.max_draft_length) if self.num_passing is None else self.branch_lengths

    @cached_property
    def fork(self) -> Int[Array, " positions"]:
        """The position at which a round that starts at each position leaves the path for a branch; num_positions where
        it never does.
        """
        none = self.num_positions
        marks = np.where(self.is_rejected, np.arange(none), none)
        result = np.empty(none, dtype=np.int64)
        for start, end in zip(self.offsets[:-1], self.offsets[1:], strict=True):
            result[start:end] = np.minimum.accumulate(marks[start:end][::-1])[::-1]
        return result

    @cached_property
    def first_drawn(self) -> Int[Array, " positions"]:
        """Flat index of the first token that a round drafts which starts at each position; where none is drafted
        (`is_drafted`), of the response's own.
        """
        return np.where(self.is_rejected, self.branch, np.arange(self.num_positions))

    @property
    def is_drafted(self) -> Bool[Array, " positions"]:
        """Whether a round that starts at each position drafts: not where a rejection leaves no room before the limit,
        nor where a feature draft has not read the target yet.
        """
        return ~self.is_rejected | (self.branch != np.arange(self.num_positions))

    @property
    def is_first_accepted(self) -> Bool[Array, " positions"]:
        """Whether verification accepts that token."""
        return ~self.is_rejected if self.num_passing is None else self.num_passing > 0

    @cached_property
    def before(self) -> Int[Array, " drafts"]:
        """The flat index of the token drawn before each: its neighbour on the path or branch. A row's first token is
        its own.
        """
        before = np.arange(len(self.token)) - 1
        before[self.offsets[:-1]] = self.offsets[:-1]
        has_branch = self.branch_lengths > 0
        at = self.is_rejected.nonzero()[0][has_branch]
        before[self.branch[at]] = before[at]
        return before

    def signal(self, name: str) -> Float[Array, " drafts"]:
        """A signal as policies read it.

        Raises:
            ValueError: one that there was not when the trace was recorded, or that its draft has not.
        """
        if name == "token_prob":
            return np.exp(self.signals["log_token_prob"])
        if name == CONFIDENCE and name not in self.signals:
            raise ValueError(
                "the trace's draft has no confidence head; use a DSpark draft that has one, or another policy"
            )
        if name not in self.signals:
            raise ValueError(
                f"the trace was recorded before there was the signal {name}; delete its folder and record it again "
                "(`acceptance-heads trace`)"
            )
        return self.signals[name]

    def logit(self, head: AcceptanceHead | ScoreHead) -> Float[Array, " drafts"]:
        """Logit of the head for each token (drawn-time, prefix), or for the token before it (fed-time): what is known
        when it is drawn.

        Raises:
            ValueError: a head of another width; hidden states that were not recorded.
        """
        if isinstance(head, ScoreHead):
            if head.score == "perfect":
                return self._perfect_logit(head.timing)
            if head.score == "confidence":
                return self.signal(CONFIDENCE)
            return np.asarray(logit_of(self.signal("max_prob")))
        key = head.fingerprint()
        if key not in self.scores:
            self.scores[key] = scores_of(head, self.inputs, token=self.token, before=self.before, signals=self.signals)
        return self.scores[key]

    def select(self, rows: Sequence[int], *, num_tokens: int | None = None) -> "Trace":
        """The trace of some rows; with `num_tokens`, had their length limit been at most so many tokens."""
        return join_traces([self._row(row, num_tokens) for row in rows])

    def _row(self, row: int, num_tokens: int | None) -> "Trace":
        path = np.arange(self.offsets[row], self.offsets[row + 1])[:num_tokens]
        whole = self.rows[row]
        limit = whole.limit if num_tokens is None else min(whole.limit, num_tokens)
        rejected_before = int(self.is_rejected[: path[0]].sum())
        here = slice(rejected_before, rejected_before + int(self.is_rejected[path].sum()))
        starts = self.num_positions + np.cumsum(self.branch_lengths) - self.branch_lengths
        lengths = self.branch_lengths[here]
        first = int(starts[here][0]) if len(lengths) else 0
        positions = np.concatenate([path, np.arange(first, first + lengths.sum())])
        inputs = self.inputs and self.inputs.at(torch.from_numpy(positions))
        columns: dict[str, Any] = {name: getattr(self, name)[positions] for name in _PER_DRAFT}
        columns |= {name: values[path] for name in _PER_POSITION if (values := getattr(self, name)) is not None}
        return replace(
            self,
            rows=(replace(whole, response_ids=whole.response_ids[: len(path)], limit=limit),),
            signals={name: values[positions] for name, values in self.signals.items()},
            branch_lengths=lengths,
            inputs=inputs,
            scores={name: values[positions] for name, values in self.scores.items()},
            **columns,
        )

    def _perfect_logit(self, timing: str) -> Float[Array, " drafts"]:
        prob = self.signals["acceptance_prob"].astype(np.float64)
        if np.isnan(prob).any():
            raise ValueError("the trace has no acceptance_prob along branches; record it with decode.perfect_head=true")
        with np.errstate(divide="ignore"):
            logit = np.log(prob) - np.log1p(-prob)
        return logit[self.before] if timing == "fed" else logit


def join_traces(traces: Sequence[Trace]) -> Trace:
    """The traces' rows one after the other.

    Raises:
        ValueError: no traces, or of another `Sampling` or draft length.
    """
    if not traces:
        raise ValueError("no rows: a trace has at least one")
    first = traces[0]
    for trace in traces:
        if any(getattr(trace, name) != getattr(first, name) for name in _SHARED):
            raise ValueError(f"traces of {first.sampling} and of {trace.sampling} cannot be joined")

    def drafts(arrays: Sequence[Array]) -> Array:
        paths = [array[: trace.num_positions] for array, trace in zip(arrays, traces, strict=True)]
        return np.concatenate(
            [*paths, *(array[trace.num_positions :] for array, trace in zip(arrays, traces, strict=True))]
        )

    def all_of(name: str) -> list[Array]:
        return [getattr(trace, name) for trace in traces]

    columns: dict[str, Any] = {name: drafts(all_of(name)) for name in _PER_DRAFT}
    columns |= {name: np.concatenate(all_of(name)) for name in _PER_POSITION if getattr(first, name) is not None}
    shared = {
        field: [name for name in getattr(first, field) if all(name in getattr(trace, field) for trace in traces)]
        for field in ("signals", "scores")
    }
    return replace(
        first,
        rows=tuple(row for trace in traces for row in trace.rows),
        signals={name: drafts([trace.signals[name] for trace in traces]) for name in shared["signals"]},
        branch_lengths=np.concatenate(all_of("branch_lengths")),
        inputs=join_inputs([trace.inputs for trace in traces], [trace.num_positions for trace in traces]),
        scores={name: drafts([trace.scores[name] for trace in traces]) for name in shared["scores"]},
        **columns,
    )

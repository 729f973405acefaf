"""What a continuous batch did, round by round: all that its costs depend on (law 4.13).

A batch has a number of rows. Requests wait in a queue; when one ends, its row takes the next one, which starts with the
next round. Each round of the batch is one round of every sequence in it. Where sequences do not depend on each other,
their rounds are those of a replay one by one (`load_of`); otherwise the batch is stepped through (`step_through`).
"""

from heapq import heapreplace
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from decode.policies.base import Policy
from decode.policies.batch import BatchAuto, BatchController, BatchCosts
from evaluation.traces.replay import Lockstep, Rounds, TraceLanes, merged
from evaluation.traces.trace import Array, Trace, counted

_TURNOVER = 4
"""Each row of the batch serves at least this many requests: the first ones start in step, and later ones do not."""
NUM_QUEUES = 100
"""Resampled queues, of whose gains the standard deviation is the error of a gain."""


class BatchThroughput(NamedTuple):
    """What a load comes to at some costs."""

    tokens_per_s: float
    """Of the whole batch."""
    request_s: float
    """Mean seconds from a request's first round to its end."""


class Load(NamedTuple):
    """All rounds that a batch went through."""

    steps: Int[Array, "round step"]
    """Sequences in each draft step."""
    num_tokens: Int[Array, " round"]
    """Fed to the verification."""
    emitted: Int[Array, " round"]
    begins: Int[Array, " request"]
    """First round of each request that ended."""
    ends: Int[Array, " request"]
    """The round after its last."""

    def throughput(self, costs: BatchCosts) -> BatchThroughput:
        step_s = costs.draft(np.arange(int(self.steps.max(initial=0)) + 1))
        step_s[0] = 0.0
        # a round whose only sequence reads its prompt verifies nothing
        target_s = np.where(self.num_tokens > 0, costs.target(self.num_tokens), 0.0)
        seconds = step_s[self.steps].sum(1) + target_s
        clock = np.append(0.0, seconds.cumsum())
        request_s = float((clock[self.ends] - clock[self.begins]).mean())
        return BatchThroughput(int(self.emitted.sum()) / float(clock[-1]), request_s)


def queue_of(num_rows: int, size: int) -> Int[Array, " request"]:
    """Rows of a trace in a random order, repeated until there are enough requests for every row of the batch."""
    generator = np.random.default_rng(0)
    return np.concatenate([generator.permutation(num_rows) for _ in range(-(-_TURNOVER * size // num_rows))])


def resampled_queues(prompt_of_row: Int[Array, " row"], size: int) -> list[Int[Array, " request"]]:
    """Queues of the rows of resampled prompts, drawn with replacement, always the same ones; as long as `queue_of` has
    them.
    """
    generator = np.random.default_rng(0)
    num_prompts = int(prompt_of_row.max()) + 1
    rows_of = [(prompt_of_row == prompt).nonzero()[0] for prompt in range(num_prompts)]
    length = len(queue_of(len(prompt_of_row), size))
    queues = []
    for _ in range(NUM_QUEUES):
        prompts = generator.integers(num_prompts, size=num_prompts)
        rows = generator.permutation(np.concatenate([rows_of[prompt] for prompt in prompts]))
        queues.append(np.resize(rows, length))
    return queues


def load_at(
    rounds: Rounds, setting: int, num_rows: int, size: int, queue: Int[Array, " request"] | None = None
) -> Load:
    """The load of a batch under one setting, from the rounds of all settings (lanes are setting * num_rows + row);
    `queue`: rows, instead of `queue_of`.
    """
    first, end = rounds.lane.searchsorted([setting * num_rows, (setting + 1) * num_rows])
    of_setting = Rounds(*(column[first:end] for column in rounds))
    rows = queue_of(num_rows, size) if queue is None else queue
    return load_of(of_setting._replace(lane=of_setting.lane - setting * num_rows), rows, size)


def load_of(rounds: Rounds, rows: Int[Array, " request"], size: int) -> Load:
    """The load until a row of the batch is left empty, so that the batch is always full.

    Args:
        rounds: of every row of a trace (lanes), under one setting of a policy whose sequences are independent.
        rows: the queue.
        size: rows of the batch.
    """
    firsts = np.searchsorted(rounds.lane, np.arange(rounds.lane.max() + 2))
    lengths = np.diff(firsts)[rows]
    free = [0] * size
    begins = np.empty(len(rows), dtype=np.int64)
    for number, length in enumerate(lengths.tolist()):
        begins[number] = free[0]
        heapreplace(free, free[0] + length)
    last = min(free)
    within = counted(lengths)
    at = np.repeat(begins, lengths) + within
    source = np.repeat(firsts[rows], lengths) + within
    at, source = at[at < last], source[at < last]
    forwards = rounds.forwards[source]
    longest = int(forwards.max(initial=0))
    # how many drafts have so many forwards, then how many have at least so many
    ends = np.bincount(at * (longest + 1) + forwards, minlength=last * (longest + 1)).reshape(last, longest + 1)
    steps = ends[:, ::-1].cumsum(1)[:, ::-1][:, 1:]
    num_tokens = np.bincount(at, rounds.drafted[source] + 1, minlength=last).astype(np.int64)
    emitted = np.bincount(at, rounds.emitted[source], minlength=last).astype(np.int64)
    done = begins + lengths <= last
    return Load(steps, num_tokens, emitted, begins[done], (begins + lengths)[done])


class BatchLockstep(Lockstep):
    """Lanes that are the rows of a batch, whose rounds end together."""

    def __init__(self, trace: Trace, policy: Policy, rows: Int[Array, " request"], size: int) -> None:
        self._queue = TraceLanes.of(trace, np.arange(len(rows)), rows)
        self._controller = BatchController(policy) if isinstance(policy, BatchAuto) else None
        super().__init__(trace, policy, self._queue.at(self._queue.index < size))
        self._next = size

    @property
    def busy(self) -> Array:
        """Whether each row has a sequence."""
        return self.lanes.start < self.lanes.end

    def round(self) -> Rounds:
        """One round of all rows with a sequence."""
        busy = self.busy
        drafting = busy & (self.lanes.allowed > 0)
        unused = np.zeros_like(busy)
        steps = [int(drafting.sum())] if self.has_blocks and drafting.any() else []
        while (drafting := self._continuing(drafting)).any():
            steps += [] if self.has_blocks else [int(drafting.sum())]
            ended, is_unused = self._drafted(drafting)
            unused |= is_unused
            drafting = drafting & ~ended
        rounds = self._conclude(np.ones_like(busy), unused)
        if self._controller is not None:
            self._controller.end(steps, int((rounds.drafted + 1).sum()), int(rounds.emitted.sum()))
        return rounds

    def refill(self) -> bool:
        """Give empty rows the next requests; False if a row stays empty."""
        empty = (~self.busy).nonzero()[0]
        filled = empty[: len(self._queue.index) - self._next]
        if len(filled):
            new = slice(self._next, self._next + len(filled))
            for name in ("index", "start", "end", "limit"):
                getattr(self.lanes, name)[filled] = getattr(self._queue, name)[new]
            self._next += len(filled)
            begins = np.zeros(len(self.lanes.start), dtype=bool)
            begins[filled] = True
            self._begin(begins, merged(begins, self.policy.start(), self.state))
        return len(filled) == len(empty)

    def _continuing(self, drafting: Array) -> Array:
        """Rows in which the batch's rule lets drafting continue, among those whose policies continue."""
        if self._controller is None or not drafting.any():
            return drafting
        at = drafting.nonzero()[0]
        rule: Any = self.policy
        signals = self._drawn(self._indices()).before if rule.looks_ahead else None
        expected_tokens = np.broadcast_to(rule.expected_tokens(self.state, signals), drafting.shape)[at]
        result = np.zeros_like(drafting)
        result[at] = self._controller.continuing(expected_tokens, int((self.lanes.position + 1)[self.busy].sum()))
        return result


def step_through(trace: Trace, policy: Policy, rows: Int[Array, " request"], size: int) -> Load:
    """The load of a policy whose sequences depend on each other, and whose parameters are no arrays."""
    size = min(size, len(rows))
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        batch = BatchLockstep(trace, policy, rows, size)
        parts = [batch.round()]
        while batch.refill():
            parts.append(batch.round())
    # what has not ended yet continues beyond the last round
    index = batch.lanes.index[batch.busy]
    parts.append(Rounds(index, *[np.zeros_like(index)] * 4))
    return load_of(Rounds.joined(parts).by_lane(), np.arange(len(rows)), size)

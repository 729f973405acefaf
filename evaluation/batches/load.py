"""What a continuous batch did, round by round: all that its costs depend on (law 4.13).

A batch has a number of rows. Requests wait in a queue; when one ends, its row takes the next one, which starts with the
next round. Each round of the batch is one round of every sequence in it.
"""

from heapq import heapreplace
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from decode.policies.batch import BatchCosts
from evaluation.traces.replay import Rounds
from evaluation.traces.trace import Array

_TURNOVER = 4
"""Each row of the batch serves at least this many requests: the first ones start in step, and later ones do not."""


class BatchThroughput(NamedTuple):
    """Tokens and seconds of a load at some costs."""

    tokens: int
    seconds: float
    request_s: float
    """Mean seconds from a request's first round to its end."""

    @property
    def tokens_per_s(self) -> float:
        """Throughput of the whole batch."""
        return self.tokens / self.seconds


class Load(NamedTuple):
    """All rounds that a batch went through."""

    steps: Int[Array, "round step"]
    """Sequences in each draft step."""
    num_tokens: Int[Array, " round"]
    """Fed to the verification."""
    emitted: Int[Array, " round"]
    begins: Int[Array, " request"]
    """The first round of each request that ended within these rounds."""
    ends: Int[Array, " request"]
    """The round after its last."""

    def throughput(self, costs: BatchCosts) -> BatchThroughput:
        """Tokens and seconds at these costs."""
        step_s = costs.draft(np.arange(int(self.steps.max(initial=0)) + 1))
        step_s[0] = 0.0
        seconds = step_s[self.steps].sum(1) + costs.target(self.num_tokens)
        clock = np.append(0.0, seconds.cumsum())
        return BatchThroughput(
            int(self.emitted.sum()), float(clock[-1]), float((clock[self.ends] - clock[self.begins]).mean())
        )


def queue_of(num_rows: int, size: int) -> Int[Array, " request"]:
    """Rows of a trace in a random order, repeated until there are enough requests for every row of the batch."""
    generator = np.random.default_rng(0)
    return np.concatenate([generator.permutation(num_rows) for _ in range(-(-_TURNOVER * size // num_rows))])


def load_at(rounds: Rounds, setting: int, num_rows: int, size: int) -> Load:
    """The load of a batch under one setting, from the rounds of all settings (lanes are setting * num_rows + row)."""
    first, end = rounds.lane.searchsorted([setting * num_rows, (setting + 1) * num_rows])
    of_setting = Rounds(*(column[first:end] for column in rounds))
    return load_of(of_setting._replace(lane=of_setting.lane - setting * num_rows), queue_of(num_rows, size), size)


def load_of(rounds: Rounds, rows: Int[Array, " request"], size: int, *, is_drained: bool = False) -> Load:
    """The load of a policy whose sequences do not depend on each other, from the rounds of every row.

    Args:
        rounds: of one setting: lanes are rows.
        rows: the queue.
        size: rows of the batch.
        is_drained: all requests to their end; False: until a row is left empty, so that the batch is always full.
    """
    firsts = np.searchsorted(rounds.lane, np.arange(rounds.lane.max() + 2))
    lengths = np.diff(firsts)[rows]
    free = [0] * size
    begins = np.empty(len(rows), dtype=np.int64)
    for number, length in enumerate(lengths.tolist()):
        begins[number] = free[0]
        heapreplace(free, free[0] + length)
    last = max(free) if is_drained else min(free)
    within = np.arange(lengths.sum()) - np.repeat(lengths.cumsum() - lengths, lengths)
    at, source = np.repeat(begins, lengths) + within, np.repeat(firsts[rows], lengths) + within
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

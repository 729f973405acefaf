"""PEARL replayed from a trace, and what its steps cost where draft and target work at the same time.

By law 4.10 a trace says of every position whether the token that the draft would draw there, after the response so far,
passes. PEARL's steps depend on nothing else, but for drafts that end early at an EOS off the response's path: those are
taken to go on to gamma tokens.

    T = sum over steps of max(t_draft * drafted, t_target(waiting)) + exchange

`waiting` are the tokens that the target is fed beside the text's last: its step is that of a round that verifies as
many (law 4.9). `exchange` is what it takes to bring up to gamma + 1 distributions from one device to the other.
"""

from dataclasses import dataclass
from functools import reduce
from operator import add

import numpy as np
from jaxtyping import Bool, Int

from decode.loop.counts import Counts
from evaluation.competitors import Finalist
from evaluation.costs.model import CostModel
from evaluation.intervals import Spent
from evaluation.traces.trace import Array, Trace


@dataclass(frozen=True)
class Steps:
    """PEARL's steps on one response, each a number of an array."""

    drafted: Int[Array, " step"]
    waiting: Int[Array, " step"]
    """Drafted a step before, and tested in this one."""
    emitted: Int[Array, " step"]
    accepted: Int[Array, " step"]

    @property
    def counts(self) -> Counts:
        """The sum of all steps, as the loop counts."""
        drafted = int(self.drafted.sum())
        return Counts(
            num_emitted=int(self.emitted.sum()),
            num_drafted=drafted,
            num_target=len(self.drafted),
            num_accepted=int(self.accepted.sum()),
            num_draft_forwards=drafted,
        )

    def seconds(self, cost: CostModel, *, exchange_s: float = 0.0) -> float:
        """Seconds of all steps at these costs."""
        return float(
            np.maximum(cost.t_draft_s * self.drafted, cost.target_s(self.waiting)).sum()
            + exchange_s * len(self.drafted)
        )


def pearl_steps_of(is_rejected: Bool[Array, " position"], *, gamma: int, limit: int | None = None) -> Steps:
    """PEARL's steps on a response.

    Args:
        is_rejected: of each position of the response: whether the draft's token there is rejected.
        gamma: tokens that the draft adds in a step.
        limit: the most tokens of the generation; None: as many as the response has. A response that is shorter ends
            with an EOS.
    """
    length = len(is_rejected)
    limit = length if limit is None else limit
    rejected = [*np.flatnonzero(is_rejected).tolist(), length]  # ascending, with a place that no test reaches
    start, waiting, nearest, rows = 0, 0, 0, []
    while start < length:
        while rejected[nearest] < start:
            nearest += 1
        failing = rejected[nearest]
        drafted = min(gamma, length - start - waiting)  # on the response, whose end is an EOS or the limit
        if failing < start + waiting + drafted:  # off it somewhere
            drafted = min(gamma, limit - start - waiting)
        num_tests = waiting + min(drafted, 1)
        accepted = min(failing - start, num_tests)
        is_passed = accepted == num_tests
        emitted = accepted + (not is_passed)
        rows.append((drafted, waiting, emitted, accepted))
        waiting, start = max(drafted - 1, 0) if is_passed else 0, start + emitted
    return Steps(*np.array(rows, dtype=np.int64).reshape(-1, 4).T)


def pearl_of(trace: Trace, cost: CostModel, *, gamma: int, exchange_s: float = 0.0) -> Finalist:
    """PEARL with one gamma, replayed."""
    ends = zip(trace.offsets[:-1], trace.offsets[1:], trace.rows, strict=True)
    responses = [pearl_steps_of(trace.is_rejected[start:end], gamma=gamma, limit=row.limit) for start, end, row in ends]
    counts = [steps.counts for steps in responses]
    tokens = np.bincount(trace.prompt_of_row, [count.num_emitted for count in counts])
    seconds = np.bincount(trace.prompt_of_row, [steps.seconds(cost, exchange_s=exchange_s) for steps in responses])
    spent = Spent(tokens.astype(np.int64), seconds)
    return Finalist("parallel_pearl", "pearl", {"gamma": gamma}, spent, reduce(add, counts))


def fastest_gamma(dev: Trace, cost: CostModel, *, exchange_s: float = 0.0) -> int:
    """The gamma in 1 … max_draft_length that is fastest on these prompts, the smallest of equals."""
    gammas = range(1, dev.max_draft_length + 1)
    return max(gammas, key=lambda gamma: pearl_of(dev, cost, gamma=gamma, exchange_s=exchange_s).spent.tokens_per_s)

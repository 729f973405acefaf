"""Draws that play one row of a trace to the real loop (law 4.10), which then writes the row's response with the very
counts of its replay.

Every draw is really made and its outcome then replaced by the recorded one, so that a loop that is played to does the
work of one that draws; a clock around it differs between policies by their work alone. With s the start of the round,
token j of its draft is that of `Trace`'s flat(s, j), the drafted tokens before the first rejected position are
accepted, and the token after them is the response's own. What the trace does not know stays as drawn: tokens that a
policy stops before, tokens beyond an EOS.

At temperature 0 the loop takes what is most probable and asks nobody (`decode.loop.drafter.Session`): such a trace
plays itself.
"""

from collections.abc import Iterable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from evaluation.traces.trace import Trace
from lm import RandomSampler, Sampler


class PlayedSampler(Sampler):
    """One row of a trace, as the chance of one generation from its prompt under its length limit."""

    def __init__(self, trace: Trace, row: int = 0) -> None:
        row_trace = trace.select([row])
        self._random = RandomSampler(torch.Generator().manual_seed(row))
        self._path = row_trace.token[: row_trace.num_positions].tolist()
        self._rejected, self._forks = row_trace.rejected.tolist(), row_trace.fork.tolist()
        at = row_trace.is_rejected.nonzero()[0]
        branches = zip(at.tolist(), row_trace.branch[at], row_trace.branch_lengths, strict=True)
        self._branches: dict[int, list[int]] = {
            place: row_trace.token[start : start + length].tolist() for place, start, length in branches
        }
        self._next: int | None = None
        """The place of the token after the accepted ones, once verification has asked how many those are."""
        self._begin(0)

    def token(self, law: Float[Tensor, " vocab"]) -> int:
        drawn, recorded = self._random.token(law), self._recorded()
        return drawn if recorded is None else recorded

    def draw(self, law: Float[Tensor, " vocab"]) -> Int[Tensor, " 1"]:
        drawn, recorded = self._random.draw(law), self._recorded()
        return drawn if recorded is None else drawn.fill_(recorded)

    def uniform(self) -> tuple[float, int]:
        """A uniform, and the recorded token, for a compiled step."""
        (uniform, drawn), recorded = self._random.uniform(), self._recorded()
        return uniform, drawn if recorded is None else recorded

    def num_accepted(self, acceptance_probs: Iterable[float]) -> int:
        # each probability is looked at until the first recorded rejection, as by draws that decide
        count = self._random.num_accepted(float(place < self._num_passing) for place, _ in enumerate(acceptance_probs))
        self._next = self._start + count
        return count

    def _begin(self, start: int) -> None:
        stop, fork = (places[start] if start < len(self._path) else start for places in (self._rejected, self._forks))
        self._start, self._num_passing = start, stop - start
        self._drafted = iter([*self._path[start:fork], *self._branches.get(fork, ())])
        self._next = None

    def _recorded(self) -> int | None:
        if self._next is None:
            return next(self._drafted, None)
        place = self._next
        self._begin(place + 1)
        return self._path[place] if place < len(self._path) else None

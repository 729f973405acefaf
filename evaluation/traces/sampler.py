"""Draws that play one row of a trace to the real loop (law 4.10), which then writes the row's response with the very
counts of its replay.

Every draw is really made and its outcome then replaced by the recorded one, so the loop does the work of one that
draws. With s the start of the round, token j of its draft is that of `Trace`'s flat(s, j), the drafted tokens before
the first rejected position are accepted, and the token after them is the response's. What the trace does not have stays
as drawn: tokens that a policy stops before, tokens beyond an EOS.

At temperature 0 the loop takes the most probable token without a draw (`decode.loop.drafter.Session`), so such a trace
plays itself.
"""

from collections.abc import Iterable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from evaluation.traces.trace import Trace
from lm import RandomSampler, Sampler


class PlayedSampler(Sampler):
    """One row of a trace, as the sampler of one generation from its prompt under its length limit."""

    def __init__(self, trace: Trace, row: int = 0) -> None:
        part = trace.select([row])
        self._random = RandomSampler(torch.Generator().manual_seed(row))
        self._path = part.token[: part.num_positions].tolist()
        self._rejected, self._forks = part.rejected.tolist(), part.fork.tolist()
        branches = np.split(part.token[part.num_positions :], part.branch_lengths.cumsum())
        self._branches: list[list[int]] = [tokens.tolist() for tokens in branches]
        self._next: int | None = None
        """Position of the token after the accepted ones, once verification has drawn their number."""
        self._begin(0)

    def token(self, dist: Float[Tensor, " vocab"]) -> int:
        drawn = self._random.token(dist)
        recorded = self._recorded()
        return drawn if recorded is None else recorded

    def draw(self, dist: Float[Tensor, " vocab"]) -> Int[Tensor, " 1"]:
        drawn = self._random.draw(dist)
        recorded = self._recorded()
        return drawn if recorded is None else drawn.fill_(recorded)

    def num_accepted(self, acceptance_probs: Iterable[float]) -> int:
        # each probability is read until the first recorded rejection, as by draws that decide
        certain = (float(index < self._num_passing) for index, _ in enumerate(acceptance_probs))
        count = self._random.num_accepted(certain)
        self._next = self._start + count
        return count

    def _begin(self, start: int) -> None:
        stop, fork = (column[start] if start < len(self._path) else start for column in (self._rejected, self._forks))
        self._start = start
        self._num_passing = stop - start
        self._next = None
        self._drafted = iter([*self._path[start:fork], *self._branches[min(fork, len(self._path))]])

    def _recorded(self) -> int | None:
        if self._next is None:
            return next(self._drafted, None)
        position = self._next
        self._begin(position + 1)
        return self._path[position] if position < len(self._path) else None

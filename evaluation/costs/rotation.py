"""A drafter whose policies take turns, round by round, in one generation.

Policies that take turns within one generation share its prompt, and a machine that slows down for a moment slows
neighbouring rounds alike. Before its draft is timed, a policy's model reads all but the newest token, so that
every draft feeds one token first, whichever policies came before.
"""

from collections.abc import Iterator, Mapping
from time import perf_counter
from typing import NamedTuple

import numpy as np

from decode.loop.drafter import Drafter, ModelDrafter, Proposal
from decode.loop.session import Session
from lm import CachedModel


class Draft(NamedTuple):
    """One timed draft."""

    kind: str
    """Name of the drafter."""
    step_s: float
    """Seconds of a draft step; of a DSpark draft, of its whole block."""


class Rotation(Drafter):
    """Drafters of one draft model, or of several of the same weights, each for one round in its turn."""

    def __init__(self, drafters: Mapping[str, ModelDrafter], order: Iterator[str], *, length: int) -> None:
        """Args:
        drafters: name -> drafter.
        order: names of whose turn it is, without end.
        length: tokens of a timed draft; where a text ends sooner, the last drafter goes on, and is not timed.
        """
        self._drafters, self._order, self._length = drafters, order, length
        self._drafter = next(iter(drafters.values()))
        self._waiting: str | None = None
        self.drafts: list[Draft] = []
        """Timed drafts, in their order."""

    def start(self, session: Session) -> None:
        # drafters of one model would refuse each other, so each takes its model in a session that never opens
        apart = Session(session.sampling, session.eos_ids, session.draws)
        for drafter in self._drafters.values():
            drafter.start(apart)
        for model in {id(drafter.model): drafter.model for drafter in self._drafters.values()}.values():
            session.take(model, ModelDrafter.role)

    def propose(self, committed: list[int], max_tokens: int) -> Proposal:
        if max_tokens < self._length:
            return self._drafter.propose(committed, max_tokens)
        # a feature draft proposes nothing before the target has read the prompt: it is that kind's turn again
        kind = next(self._order) if self._waiting is None else self._waiting
        self._drafter = self._drafters[kind]
        if isinstance(self._drafter.model, CachedModel):
            _read(self._drafter.model, committed)
        started_s = perf_counter()
        proposal = self._drafter.propose(committed, max_tokens)
        seconds = perf_counter() - started_s
        is_whole = len(proposal.tokens) == self._length
        self._waiting = None if is_whole else kind
        if is_whole:
            self.drafts.append(Draft(kind, seconds / proposal.num_draft_forwards))
        return proposal

    def conclude(self, committed: list[int], num_accepted: int) -> None:
        self._drafter.conclude(committed, num_accepted)

    def roll_back(self, length: int) -> None:
        self._drafter.roll_back(length)


def shuffled(cycle: list[str]) -> Iterator[str]:
    """The names of a cycle, in a new random order each time, so that none always follows the same one."""
    generator = np.random.default_rng(0)
    while True:
        yield from generator.permutation(cycle).tolist()


def _read(model: CachedModel, committed: list[int]) -> None:
    """Feed all tokens but the newest."""
    if pending := committed[len(model) : -1]:
        model.feed(pending)

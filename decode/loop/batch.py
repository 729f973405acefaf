"""Law 4.13 in the real loop: sequences that draft in lockstep and are verified together, each with a draft length of
its own.

One round of the batch is one round of each of its sequences. A draft step is one forward of those that still draft; the
others wait. Then one padded forward verifies them all, and a sequence that has ended leaves its seat to the next
prompt. What a sequence draws and emits is what it would draw and emit alone, up to the rounding of a forward with other
rows in it, so the batch is as lossless as the loop; with a rule for the whole batch (`decode.policies.batch`) the draft
lengths alone depend on the others.
"""

from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from decode.loop.drafter import ModelDrafter
from decode.loop.rounds import Generation, Round, settle_round
from decode.loop.session import Session
from decode.policies.batch import BatchRule
from lm import CachedModel, Sampler, Sampling, verify
from lm.models.seats import Ask


@runtime_checkable
class Together(Protocol):
    """One model for all sequences: `lm.models.seats.Seats`."""

    @property
    def seats(self) -> Sequence[CachedModel]: ...

    def forward(self, asks: Sequence[Ask]) -> list[Tensor]: ...


class BatchRound(NamedTuple):
    """Cost of one round of the batch."""

    steps: tuple[int, ...]
    """Sequences in each draft step."""
    num_tokens: int
    """Fed to the verification: each sequence's draft, and one token more of each."""
    num_emitted: int
    draft_s: float
    target_s: float
    num_joined: int
    """Sequences that begin with it: their prompts are read in it."""


class _Place:
    """A seat in both models, and the sequence that has it."""

    committed: list[int]
    end: int
    """Length of the text that ends the sequence."""
    session: Session

    def __init__(self, drafter: ModelDrafter, target: CachedModel) -> None:
        self.drafter, self.target = drafter, target
        self.number: int | None = None
        """Number of the prompt that has the seat; None: it is free."""

    @property
    def num_planned(self) -> int:
        """Tokens that the round's verification is to be fed so far."""
        return len(self.drafter.proposal.tokens) + 1


class Batch:
    """Prompts, decoded as a continuous batch: `rounds` plays them, `generations` collects what comes of them."""

    def __init__(
        self,
        target: Together,
        draft: Together,
        drafters: Sequence[ModelDrafter],
        *,
        sampling: Sampling,
        eos_ids: frozenset[int],
    ) -> None:
        """Args:
        target: seats for as many sequences as there are drafters.
        draft: as many seats of the draft.
        drafters: one on each seat of the draft, all with one policy.
        sampling: the one transform of draft and target.
        eos_ids: tokens that end a generation.
        """
        self._target, self._draft = target, draft
        self._places = [_Place(drafter, seat) for drafter, seat in zip(drafters, target.seats, strict=True)]
        self._sampling, self._eos_ids = sampling, eos_ids
        policy = drafters[0].policy
        self._controller = policy.controller() if isinstance(policy, BatchRule) else None
        self._rounds: list[list[Round]] = []

    @property
    def generations(self) -> list[Generation]:
        """Generation of every prompt, in their order."""
        return [Generation.of(rounds) for rounds in self._rounds]

    def rounds(
        self, prompts: Sequence[list[int]], limits: Sequence[int], draws: Sequence[Sampler], *, max_draft_length: int
    ) -> Iterator[BatchRound]:
        """Play all prompts, as many at once as there are seats; the rest waits in its order.

        Args:
            prompts: token ids of each.
            limits: the most new tokens of each; one that wants none takes no seat.
            draws: source of uniforms of each.
            max_draft_length: upper bound of every round.
        """
        self._rounds = [[] for _ in prompts]
        asked = enumerate(zip(prompts, limits, draws, strict=True))
        waiting = ((number, *prompt) for number, prompt in asked if prompt[1] > 0)
        while True:
            free = [place for place in self._places if place.number is None]
            joining = list(zip(free, waiting, strict=False))
            for place, prompt in joining:
                self._seat(place, *prompt)
            busy = [place for place in self._places if place.number is not None]
            if not busy:
                return
            yield self._round(busy, max_draft_length, len(joining))

    def _seat(self, place: _Place, number: int, prompt_ids: list[int], limit: int, draws: Sampler) -> None:
        place.number, place.committed = number, list(prompt_ids)
        place.end = len(prompt_ids) + limit
        place.session = Session(self._sampling, self._eos_ids, draws, prompt_ids)
        place.session.take(place.target, "target", verifies=True)
        place.target.reset()
        place.drafter.start(place.session)

    @torch.inference_mode()
    def _round(self, busy: list[_Place], max_draft_length: int, num_joined: int) -> BatchRound:
        started_s = perf_counter()
        steps = self._drafted(busy, max_draft_length)
        drafted_s = perf_counter()
        fed = [place.committed + place.drafter.proposal.tokens for place in busy]
        asks = [Ask(place.target, ids, place.num_planned) for place, ids in zip(busy, fed, strict=True)]
        p = self._laws(asks, self._target.forward(asks))
        num_tokens = sum(place.num_planned for place in busy)
        verified = [self._settled(place, law) for place, law in zip(busy, p, strict=True)]
        ended_s = perf_counter()
        batch_round = BatchRound(
            steps,
            num_tokens,
            sum(len(round_.emitted) for round_ in verified),
            drafted_s - started_s,
            ended_s - drafted_s,
            num_joined,
        )
        if self._controller is not None:
            self._controller.end(batch_round.steps, batch_round.num_tokens, batch_round.num_emitted)
        return batch_round

    def _drafted(self, busy: list[_Place], max_draft_length: int) -> tuple[int, ...]:
        """All drafts of a round; how many sequences took part in each step."""
        rooms = [min(max_draft_length, place.end - len(place.committed) - 1) for place in busy]
        going = [
            place for place, room in zip(busy, rooms, strict=True) if place.drafter.begin(place.committed, room) > 0
        ]
        steps: list[int] = []
        while going := self._chosen(going, busy):
            steps.append(len(going))
            ids = [place.committed + place.drafter.proposal.tokens for place in going]
            models = [place.drafter.model for place in going]  # each a `Seat`
            asks = [Ask(model, text, 1) for model, text in zip(models, ids, strict=True)]  # type: ignore[arg-type]
            logits = self._draft.forward(asks)
            outcomes = zip(going, logits, self._laws(asks, logits), strict=True)
            going = [place for place, row, q in outcomes if place.drafter.take(*place.drafter.drawn(row[0], q[0]))]
        return tuple(steps)

    def _chosen(self, going: list[_Place], busy: list[_Place]) -> list[_Place]:
        """Seats that the batch's rule lets draft on, among those whose sequences want to."""
        if self._controller is None or not going:
            return going
        runs = [place.drafter.run for place in going]
        values = [run.policy.expected_tokens(run.state) for run in runs]  # type: ignore[attr-defined]
        expected_tokens = np.array([float(value) for value in values])
        chosen = self._controller.chosen(expected_tokens, sum(place.num_planned for place in busy))
        for place, goes_on in zip(going, chosen, strict=True):
            if not goes_on:
                place.drafter.proposal.stop_reason = "policy"
        return [place for place, goes_on in zip(going, chosen, strict=True) if goes_on]

    def _laws(self, asks: Sequence[Ask], logits: list[Tensor]) -> Sequence[Float[Tensor, "rows vocab"]]:
        """Laws that tokens are drawn from, computed for all rows at once where the sampling allows it."""
        if not self._sampling.sees_no_tokens:
            return [self._sampling.laws_after(rows, ask.token_ids) for rows, ask in zip(logits, asks, strict=True)]
        return self._sampling.laws_after(torch.cat(logits), ()).split([len(rows) for rows in logits])

    def _settled(self, place: _Place, p: Float[Tensor, "rows vocab"]) -> Round:
        """Verify one sequence's draft, and free its place if it ends."""
        proposal = place.drafter.proposal
        verdict = verify(proposal.tokens, proposal.laws, p, place.session.draws)
        proposal.set_accepted(verdict.num_accepted, p, place.session.draws)
        # a round of one sequence has no seconds of its own: they are the batch's (`BatchRound`)
        models: dict[str, Any] = {"target": place.target, "drafter": place.drafter}
        round_ = settle_round(place.committed, proposal, verdict.next_token, **models, eos_ids=self._eos_ids)
        assert place.number is not None
        self._rounds[place.number].append(round_)
        if round_.emitted[-1] in self._eos_ids or len(place.committed) >= place.end:
            place.number = None
        return round_

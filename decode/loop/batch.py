"""Law 4.13 in the real loop: sequences draft in lockstep and are verified together, each with its own draft length.

One round of the batch is one round of each sequence. A draft step is one forward of those that still draft, while the
others wait. Then one padded forward verifies all drafts, and the next prompt replaces a sequence that has ended. Each
sequence gets the tokens that it would get alone, up to the rounding of a forward with other rows in it, so the batch is
as lossless as the loop. With a rule for the whole batch (`decode.policies.batch`) only draft lengths depend on others.
"""

from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from decode.loop.drafter import ModelDrafter
from decode.loop.rounds import Generation, Round, settle_round
from decode.loop.session import Session, room_of
from decode.loop.step import DraftSteps
from decode.policies.base import Policy
from decode.policies.batch import BatchAuto, BatchController, batched
from lm import CachedModel, Sampler
from lm.batch import batch_of
from lm.draws import draw_rows, refuse_no_token
from lm.signals import Normalised
from lm.verification import verify_rows

Row = Any
"""A row of a `BatchModel`."""


class BatchRound(NamedTuple):
    """Cost of one round of the batch."""

    steps: tuple[int, ...]
    """Sequences in each draft step."""
    num_tokens: int
    """Fed to the verification: each sequence's draft, and one more token each."""
    num_emitted: int
    draft_s: float
    target_s: float
    num_joined: int
    """Sequences that begin in this round, which reads their prompts."""


class _Sequence:
    """A row in both models, and the sequence that has it."""

    committed: list[int]
    session: Session
    number: int | None = None
    """Index of the prompt; None: the row is free."""

    def __init__(self, draft: Row, target: Row, policy: Policy) -> None:
        self.draft = draft
        self.target = target
        self.drafter = ModelDrafter(draft, policy)


class Batch:
    """A continuous batch: iterating over it decodes the prompts, and `generations` has the results."""

    def __init__(
        self,
        target: CachedModel,
        drafter: ModelDrafter,
        requests: Sequence[tuple[list[int], int, Sampler]],
        *,
        num_rows: int,
        session: Session,
        max_draft_length: int,
    ) -> None:
        """Args, beside those of `SpeculativeDecoder`:
        requests: prompt, number of new tokens (0: it is skipped) and draws of each.
        num_rows: number of sequences that are decoded together.
        session: sampling and EOS ids.
        """
        rooms = [room_of(len(prompt_ids), len(prompt_ids) + limit) for prompt_ids, limit, _ in requests]
        num_tokens = max(rooms, default=0) + max_draft_length
        self._target = batch_of(target, num_rows, num_tokens)
        self._draft = batch_of(drafter.model, num_rows, num_tokens)
        self._policy = policy = batched(drafter.policy, num_rows)
        rows = zip(self._draft.rows, self._target.rows, strict=True)
        self._sequences = [_Sequence(draft, target, policy) for draft, target in rows]
        self._session = session
        self._max_draft_length = max_draft_length
        self._steps = DraftSteps(self._draft.rows[0].embedding)
        self._controller = BatchController(policy) if isinstance(policy, BatchAuto) else None
        self._waiting = ((number, *request) for number, request in enumerate(requests) if request[1] > 0)
        self._rounds: list[list[Round]] = [[] for _ in requests]
        self._stepped: list[_Sequence] = []

    @property
    def generations(self) -> list[Generation]:
        """Generation of every prompt, in order."""
        return [Generation.of(rounds) for rounds in self._rounds]

    def __iter__(self) -> Iterator[BatchRound]:
        """Decode all prompts, as many at once as there are rows; the rest wait in order. A second iteration
        continues where the first one ended.
        """
        while True:
            free = [sequence for sequence in self._sequences if sequence.number is None]
            joining = list(zip(free, self._waiting, strict=False))
            for sequence, prompt in joining:
                self._begin(sequence, *prompt)
            busy = [sequence for sequence in self._sequences if sequence.number is not None]
            if not busy:
                return
            yield self._round(busy, len(joining))

    def _begin(self, sequence: _Sequence, number: int, prompt_ids: list[int], limit: int, draws: Sampler) -> None:
        sequence.number = number
        sequence.committed = list(prompt_ids)
        sequence.session = Session(self._session.sampling, self._session.eos_ids, draws, prompt_ids, limit)
        sequence.session.take(sequence.target, "target", verifies=True)
        sequence.drafter.start(sequence.session)

    @torch.inference_mode()
    def _round(self, busy: list[_Sequence], num_joined: int) -> BatchRound:
        started_s = perf_counter()
        steps = self._drafted(busy)
        drafted_s = perf_counter()
        drafted = [seq.drafter.proposal.tokens for seq in busy]
        fed = [seq.committed[len(seq.target) :] + tokens for seq, tokens in zip(busy, drafted, strict=True)]
        nums = [len(tokens) + 1 for tokens in drafted]
        logits = self._target.feed([seq.target for seq in busy], fed, nums)
        p = self._dists(busy, logits, nums).split(nums)
        q = [seq.drafter.proposal.dists for seq in busy]
        verdicts = verify_rows(drafted, q, p, [seq.session.draws for seq in busy])
        num_emitted = sum(len(self._settle(seq, *verdict).emitted) for seq, verdict in zip(busy, verdicts, strict=True))
        ended_s = perf_counter()
        if self._controller is not None:
            self._controller.end(steps, sum(nums), num_emitted)
        return BatchRound(steps, sum(nums), num_emitted, drafted_s - started_s, ended_s - drafted_s, num_joined)

    def _drafted(self, busy: list[_Sequence]) -> tuple[int, ...]:
        """Draft for all sequences; returns the number of sequences in each step."""
        rooms = [min(self._max_draft_length, seq.session.num_tokens - len(seq.committed) - 1) for seq in busy]
        going = [seq for seq, room in zip(busy, rooms, strict=True) if seq.drafter.begin(seq.committed, room) > 0]
        steps: list[int] = []
        while going := self._continuing(going, busy):
            steps.append(len(going))
            going = self._step(going, len(steps) - 1)
        return tuple(steps)

    def _step(self, going: list[_Sequence], position: int) -> list[_Sequence]:
        """Draft one token of each of these sequences; returns those whose policies want another."""
        rows = [sequence.draft for sequence in going]
        fed = [seq.drafter.proposal.tokens[-1:] or seq.committed[len(seq.draft) :] for seq in going]
        nums = [1] * len(rows)
        logits = self._draft.feed(rows, fed, nums)
        q = self._dists(going, logits, nums)
        token = draw_rows(q, [seq.session.draws for seq in going])
        if position and len(going) < len(self._stepped):
            self._steps.keep([self._stepped.index(sequence) for sequence in going])
        self._stepped = going
        tokens, signals = self._steps.read(
            position,
            Normalised(logits, q if self._session.sampling.is_plain else None),
            torch.cat([row.hidden for row in rows]) if self._policy.heads else None,
            token,
            policies=[self._policy] * len(going),
            nums_before=[len(seq.committed) - seq.session.num_prompt for seq in going],
        )
        outcomes = zip(going, map(refuse_no_token, tokens, q), signals, q, strict=True)
        return [seq for seq, token_id, drawn, dist in outcomes if seq.drafter.take(token_id, drawn, dist)]

    def _continuing(self, going: list[_Sequence], busy: list[_Sequence]) -> list[_Sequence]:
        """Sequences that the batch's rule lets continue, among those whose policies want to."""
        if self._controller is None or not going:
            return going
        num_tokens = sum(len(seq.drafter.proposal.tokens) + 1 for seq in busy)
        self._controller.stop_losing([seq.drafter.run for seq in going], num_tokens)
        return [sequence for sequence in going if sequence.drafter.run.is_going]

    def _dists(
        self, sequences: list[_Sequence], logits: Float[Tensor, "rows vocab"], nums: list[int]
    ) -> Float[Tensor, "rows vocab"]:
        """Distributions that tokens are drawn from, of `nums` rows of each sequence; at once if the sampling allows."""
        if self._session.sampling.sees_no_tokens:
            return self._session.sampling.dists(logits)
        parts = [
            self._session.sampling.dists(rows, sequence.committed, sequence.drafter.proposal.tokens)
            for rows, sequence in zip(logits.split(nums), sequences, strict=True)
        ]
        return torch.cat(parts)

    def _settle(self, sequence: _Sequence, num_accepted: int, next_token: int, probs: list[float]) -> Round:
        proposal = sequence.drafter.proposal
        proposal.set_accepted(num_accepted, probs)
        # not timed: the seconds are the batch's (`BatchRound`)
        round_ = settle_round(
            sequence.committed, proposal, next_token, sequence.target, sequence.drafter, eos_ids=self._session.eos_ids
        )
        assert sequence.number is not None
        self._rounds[sequence.number].append(round_)
        if round_.emitted[-1] in self._session.eos_ids or len(sequence.committed) >= sequence.session.num_tokens:
            sequence.number = None
        return round_

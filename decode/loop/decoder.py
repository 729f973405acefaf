"""The lossless speculative loop (laws 4.2, 4.4, 4.5): draft, verify, emit, until EOS or the length limit.

A round drafts at most min(max_draft_length, tokens left - 1) tokens, so that the token that every verification adds
still fits; the output has the law of the target alone under the same `Sampling`, whatever drafter and policy.
"""

from collections.abc import Iterable, Iterator, Sequence
from time import perf_counter
from typing import SupportsIndex

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from decode.loop.asked import Ids, Limits, ids_of, integer_of, limits_of
from decode.loop.batch import Batch, BatchRound, Together
from decode.loop.drafter import Drafter, ModelDrafter, Proposal
from decode.loop.rounds import Generation, Round, settle_round
from decode.loop.session import Session, cached, check_free
from decode.policies.batch import batched
from lm import CachedModel, FeatureModel, RandomSampler, Sampler, Sampling, Verdict, verify
from lm.models.seats import Seats


class SpeculativeDecoder:
    """The lossless loop of a target and a drafter."""

    def __init__(
        self,
        target: PreTrainedModel | CachedModel,
        drafter: Drafter,
        *,
        sampling: Sampling | None = None,
        max_draft_length: int = 20,
        eos_ids: frozenset[int] | None = None,
        vocab_size: int | None = None,
    ) -> None:
        """Args:
        target: a `PreTrainedModel` is wrapped in a `CachedModel`.
        drafter: proposes; its policy decides the draft length.
        sampling: the one transform of draft and target (law 4.1).
        max_draft_length: upper bound of every round.
        eos_ids: tokens that end a generation; None: those of the target (`CachedModel.eos_ids`); an empty set: none
            does.
        vocab_size: `Pair.vocab_size` where logits are wider than the tokenizer.
        """
        if max_draft_length < 0:
            raise ValueError(f"max_draft_length is {max_draft_length}; it must be at least 0 (0 never drafts)")
        self.target: CachedModel = cached(target, CachedModel, vocab_size=vocab_size)
        self.drafter = drafter
        self.sampling = sampling or Sampling()
        self.max_draft_length = max_draft_length
        self.eos_ids = self.target.eos_ids if eos_ids is None else eos_ids
        self._is_streaming = False

    def generate(
        self, prompt_ids: Ids, max_new_tokens: SupportsIndex, *, generator: torch.Generator | Sampler | None = None
    ) -> Generation:
        """All rounds of one generation; the ids and the limit may be of any integer type."""
        return Generation.of(self.stream(prompt_ids, max_new_tokens, generator=generator))

    def generate_batch(
        self,
        prompts: Iterable[Ids],
        max_new_tokens: Limits,
        *,
        batch_size: SupportsIndex = 16,
        generator: torch.Generator | Sequence[Sampler] | None = None,
    ) -> list[Generation]:
        """One generation per prompt, `batch_size` at a time (law 4.13, `decode.loop.batch`); each of them as `generate`
        would write it.

        Args:
            prompts: token ids of each, in any integer type: lists, arrays, tensors.
            max_new_tokens: length limit of all prompts, or one for each; in any integer type too.
            batch_size: sequences at once; a prompt takes the place of one that has ended.
            generator: source that seeds the draws of each prompt in turn, whatever the batch size; or draws for each
                prompt.

        Raises:
            ValueError: as `generate`; a drafter of several models, a model whose cache cannot roll back sequence by
                sequence.
        """
        batch, rounds = self.batch(prompts, max_new_tokens, batch_size=batch_size, generator=generator)
        for _ in rounds:
            pass
        return batch.generations

    def batch(
        self,
        prompts: Iterable[Ids],
        max_new_tokens: Limits,
        *,
        batch_size: SupportsIndex = 16,
        generator: torch.Generator | Sequence[Sampler] | None = None,
    ) -> tuple[Batch, Iterator[BatchRound]]:
        """`generate_batch` round by round: (what collects the generations, what plays the rounds)."""
        if type(self.drafter) is not ModelDrafter or isinstance(self.drafter.model, FeatureModel):
            name = type(getattr(self.drafter, "model", self.drafter)).__name__
            raise ValueError(
                f"a {name} drafts for one prompt at a time; use generate, or a ModelDrafter of a model of its own"
            )
        num_seats = integer_of(batch_size, "batch_size")
        if num_seats < 1:
            raise ValueError(f"batch_size is {num_seats}; at least 1 sequence is decoded at a time")
        all_ids = [ids_of(prompt) for prompt in prompts]
        limits = limits_of(max_new_tokens, len(all_ids))
        for ids, limit in zip(all_ids, limits, strict=True):
            self._check(len(ids), limit)
        draws = (
            [RandomSampler(generator) for _ in all_ids]
            if generator is None or isinstance(generator, torch.Generator)
            else generator
        )
        for model, role in ((self.target, "target"), (self.drafter.model, "draft")):
            check_free(model, role)  # it may be tried out, which takes its cache
            model.check_mode()
            for ids in all_ids:
                Session(self.sampling, self.eos_ids, draws[0], ids).check_prompt(model, role)
            if len({model.limit_of(len(ids)) for ids in all_ids}) > 1:
                raise ValueError(
                    f"prompts are on both sides of the length where the {role} changes its rotary frequencies "
                    f"(`lm.frequencies`), up to {max(map(len, all_ids))} tokens; decode the long ones apart"
                )
        target, draft = self._seats(self.target, num_seats), self._seats(self.drafter.model, num_seats)
        policy = batched(self.drafter.policy, num_seats)
        drafters = [ModelDrafter(seat, policy) for seat in draft.seats]
        batch = Batch(target, draft, drafters, sampling=self.sampling, eos_ids=self.eos_ids)
        return batch, batch.rounds(all_ids, limits, draws, max_draft_length=self.max_draft_length)

    def _seats(self, model: CachedModel, num: int) -> Together:
        return Seats(model, num)

    def stream(
        self, prompt_ids: Ids, max_new_tokens: SupportsIndex, *, generator: torch.Generator | Sampler | None = None
    ) -> Iterator[Round]:
        """Rounds, each as soon as it is verified; one generation at a time, which holds the decoder until it ends or is
        closed.

        Raises:
            ValueError: at the first round: no integers, an empty prompt, a text that exceeds the target's context,
                another stream still open; a model that another generation has, that is in train mode, or whose ids do
                not fit (`decode.loop.session`).
        """
        ids, limit = ids_of(prompt_ids), integer_of(max_new_tokens, "max_new_tokens")
        self._check(len(ids), limit)
        draws = RandomSampler(generator) if generator is None or isinstance(generator, torch.Generator) else generator
        self._is_streaming = True
        try:
            with Session(self.sampling, self.eos_ids, draws, ids) as session:
                yield from self._rounds(ids, limit, session)
        finally:
            self._is_streaming = False

    def _rounds(self, prompt_ids: Sequence[int], max_new_tokens: int, session: Session) -> Iterator[Round]:
        session.take(self.target, "target", verifies=True)
        self.target.reset()
        self.drafter.start(session)
        committed = list(prompt_ids)
        end = len(committed) + max_new_tokens
        while len(committed) < end:
            round_ = self._round(committed, end - len(committed), session.draws)
            yield round_
            if round_.emitted[-1] in self.eos_ids:
                return

    def _check(self, num_prompt_tokens: int, max_new_tokens: int) -> None:
        """Raise ValueError unless the caches are free, and the target has room for prompt and answer; the last token is
        never fed.
        """
        if self._is_streaming:
            raise ValueError(
                "this decoder is in the middle of another stream, and its caches hold one sequence; "
                "exhaust or close() that stream first, or make a second decoder with models and drafter of its own"
            )
        if num_prompt_tokens < 1:
            raise ValueError("the prompt has no tokens; a generation starts from at least 1 (a BOS token will do)")
        if max_new_tokens < 0:
            raise ValueError(f"max_new_tokens is {max_new_tokens}; it must be at least 0")
        limit = self.target.limit_of(num_prompt_tokens)
        if (room := limit + 1 - num_prompt_tokens) < max_new_tokens:
            remedy = f", or set max_new_tokens to at most {room:.0f}" if room > 0 else ""
            raise ValueError(
                f"{num_prompt_tokens} prompt tokens and {max_new_tokens} new ones exceed the target's context of "
                f"{limit:.0f}; shorten the prompt{remedy}"
            )

    @torch.inference_mode()
    def _round(self, committed: list[int], num_left: int, draws: Sampler) -> Round:
        """Play one round; extends `committed` by what it emits."""
        started_s = perf_counter()
        proposal = self.drafter.propose(committed, min(self.max_draft_length, num_left - 1))
        drafted_s = perf_counter()
        fed = committed + proposal.tokens
        logits = self.target.forward(fed, len(proposal.tokens) + 1)
        p = self.sampling.laws_after(logits, fed)
        verdict = self._verify(proposal, p, draws)
        proposal.set_acceptance_probs(verdict.num_accepted, p, draws)
        return settle_round(
            committed,
            proposal,
            verdict,
            target=self.target,
            drafter=self.drafter,
            eos_ids=self.eos_ids,
            clock_s=(started_s, drafted_s),
        )

    def _verify(self, proposal: Proposal, p: Float[Tensor, "rows vocab"], draws: Sampler) -> Verdict:
        """Law 4.2; `p` are the target's laws at each drafted token and at the one after."""
        if len(proposal.laws) != len(proposal.tokens):
            raise ValueError(
                f"a {type(self.drafter).__name__} chooses its tokens, they have no laws; a tree of drafts is for a "
                "TreeDecoder"
            )
        return verify(proposal.tokens, proposal.laws, p, draws)

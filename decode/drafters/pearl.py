"""PEARL (arXiv 2408.11850): the draft drafts its next tokens while the target verifies, each on its own device.

In one step both run at once: the draft adds gamma tokens to the text, and the target runs on the text before them.

    pre-verify    no token waits. The target tests the first new token. If it is rejected, it is replaced (residual) and
                  the rest of the draft is dropped; if accepted, it is emitted, and the others *wait*.
    post-verify   the waiting tokens are tested, and then the first new one. If all pass, they are emitted, and the
                  other new ones wait. At the first failure, the tokens before it and its replacement are emitted, all
                  later tokens are dropped, and the next step pre-verifies.

Tests are law 4.2's. A step in which all pass has no bonus token, since the draft is ahead of the target. Departures
from the authors' code (smart-lty/ParallelSpeculativeDecoding at 5a6f369): every test has its own draw (theirs reseeds
the generator, so that the test of a step's first token and the first test of the next step share one draw, which
changes the distribution of the two tokens); prompts may be short; nothing untested is emitted. If no new token can be
drafted (EOS, length limit, the draft's context) a step is plain verification, with its bonus token if there is room.
"""

from concurrent.futures import ThreadPoolExecutor, wait
from time import perf_counter

import torch
from transformers import PreTrainedModel

from decode.loop.decoder import SpeculativeDecoder
from decode.loop.drafter import ModelDrafter, Proposal
from decode.loop.rounds import Round, counts_of
from decode.policies.plain import FixedLength
from lm import CachedModel, Sampler, Sampling, next_dist
from lm.verification import revealed_probs


class PearlDecoder(SpeculativeDecoder):
    """A target and a draft that work in parallel. A round is one step; its `drafted` tokens are those that it tests."""

    drafter: ModelDrafter
    """Its `proposal` holds the tokens that wait, between two steps."""

    def __init__(
        self,
        target: PreTrainedModel | CachedModel,
        draft: PreTrainedModel | CachedModel,
        *,
        gamma: int,
        is_parallel: bool = False,
        sampling: Sampling | None = None,
        eos_ids: frozenset[int] | None = None,
        vocab_size: int | None = None,
    ) -> None:
        """Args, beside those of `SpeculativeDecoder`:
            gamma: tokens that the draft adds in a step; about t_target / t_draft keeps both models busy.
            is_parallel: run both at once, on two devices; otherwise one after the other, with the same tokens.

        Raises:
            ValueError: gamma below 1; is_parallel with one device.
        """
        if gamma < 1:
            raise ValueError(f"gamma is {gamma}; PEARL drafts at least 1 token a step")
        drafter = ModelDrafter(draft, FixedLength(gamma), vocab_size=vocab_size)
        super().__init__(
            target, drafter, sampling=sampling, max_draft_length=gamma, eos_ids=eos_ids, vocab_size=vocab_size
        )
        if is_parallel and self.target.device == drafter.model.device:
            raise ValueError(
                f"target and draft are both on {self.target.device}, but running PEARL in parallel needs two devices; "
                "set pair.draft.device_map to another one, or use the predicted times"
            )
        self._pool = ThreadPoolExecutor(1) if is_parallel else None

    @torch.inference_mode()
    def _round(self, committed: list[int], num_left: int, draws: Sampler) -> Round:
        started_s = perf_counter()
        waiting = self.drafter.proposal
        text = committed + waiting.tokens
        num_waiting = len(waiting.tokens)
        pending = text[len(self.target) :]
        verified = None if self._pool is None else self._pool.submit(self.target.feed, pending, num_waiting + 1)
        try:
            new = self._drafted(text, num_waiting, num_left)
            drafted_s = perf_counter()
        finally:
            # if drafting raises, the next generation must find caches that no forward writes to
            if verified is not None:
                wait([verified])
        logits = self.target.feed(pending, num_waiting + 1) if verified is None else verified.result()
        p = self.sampling.dists(logits, text)
        tested = Proposal(waiting.tokens + new.tokens[:1], waiting.dists + new.dists[:1])
        count = draws.num_accepted(revealed_probs(tested.tokens, tested.dists, p, draws))
        emitted = tested.tokens[:count]
        is_passed = count == len(tested.tokens)
        is_over = bool(emitted) and (emitted[-1] in self.eos_ids or len(emitted) == num_left)
        # the target's own token: instead of the rejected one, or if nothing was drafted
        if not is_over and not (is_passed and new.tokens):
            emitted.append(draws.token(next_dist(count, tested.dists, p, draws)))
        self.drafter.proposal = Proposal(new.tokens[1:], new.dists[1:]) if is_passed else Proposal()
        committed += emitted
        # law 4.5: both caches hold a prefix of committed[:-1], and the draft's also waiting tokens
        self.target.roll_back(len(committed) - 1)
        if not self.drafter.proposal.tokens:
            self.drafter.roll_back(len(committed) - 1)
        return Round(
            drafted=tuple(tested.tokens),
            num_accepted=count,
            emitted=tuple(emitted),
            stop_reason="limit",
            counts=counts_of(new, count, len(emitted)),
            draft_s=drafted_s - started_s,
            target_s=perf_counter() - drafted_s,
        )

    def _drafted(self, text: list[int], num_waiting: int, num_left: int) -> Proposal:
        """The new tokens of a step: none at the limit, or after a waiting EOS, which is not tested yet."""
        num_allowed = min(self.max_draft_length, num_left - num_waiting)
        has_ended = num_waiting > 0 and text[-1] in self.eos_ids
        return Proposal() if has_ended or num_allowed < 1 else self.drafter.propose(text, num_allowed)

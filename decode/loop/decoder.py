"""The lossless speculative loop (laws 4.2, 4.4, 4.5): draft, verify, emit, until EOS or the length limit.

A round drafts at most min(max_draft_length, tokens left - 1) tokens, so that the token that every verification adds still fits; the output
has the law of the target alone under the same `Sampling`, whatever drafter and policy.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from time import perf_counter
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from decode.loop.counts import Counts
from decode.loop.drafter import Drafter, Proposal, Session
from lm import CachedModel, Draws, RandomDraws, Sampling, Verdict, revealed_probs, verify


@dataclass(frozen=True)
class Round:
    """One draft and one verification."""

    drafted: tuple[int, ...]
    num_accepted: int
    emitted: tuple[int, ...]
    """The accepted tokens and, unless the generation ended inside the draft, the residual or bonus token."""
    stop_reason: str
    """Why drafting stopped: limit, policy, eos."""
    counts: Counts
    draft_s: float
    target_s: float

    @property
    def next_kind(self) -> str | None:
        """residual, bonus, or None where the draft's EOS ended the generation."""
        if len(self.emitted) == self.num_accepted:
            return None
        return "bonus" if self.num_accepted == len(self.drafted) else "residual"

    def cut(self, num_emitted: int) -> "Round":
        """The same round, had only its first `num_emitted` tokens been emitted; the rest counts as discarded."""
        num_accepted = min(self.num_accepted, num_emitted)
        counts = replace(self.counts, num_emitted=num_emitted, num_accepted=num_accepted)
        return replace(self, emitted=self.emitted[:num_emitted], num_accepted=num_accepted, counts=counts)

    def as_dict(self) -> dict[str, Any]:
        """This record as JSON has it; times in seconds."""
        return {
            "drafted": list(self.drafted),
            "num_accepted": self.num_accepted,
            "emitted": list(self.emitted),
            "next_kind": self.next_kind,
            "stop_reason": self.stop_reason,
            "draft_s": self.draft_s,
            "target_s": self.target_s,
        }


@dataclass(frozen=True)
class Generation:
    """What was generated (without the prompt), how, and at what cost."""

    token_ids: tuple[int, ...]
    rounds: tuple[Round, ...]
    counts: Counts

    @classmethod
    def of(cls, rounds: Iterable[Round]) -> "Generation":
        """The generation that these rounds make up."""
        rounds = tuple(rounds)
        token_ids = tuple(token for one in rounds for token in one.emitted)
        # summed field by field: a `Counts` for every partial sum would cost a twentieth of a small model's round
        totals = {f.name: sum(getattr(one.counts, f.name) for one in rounds) for f in fields(Counts)}
        return cls(token_ids, rounds, Counts(**totals))

    def as_dict(self) -> dict[str, Any]:
        """Tokens, one record per round, and totals, as JSON has them."""
        return {"token_ids": list(self.token_ids), "rounds": [one.as_dict() for one in self.rounds], "counts": asdict(self.counts)}


class SpeculativeDecoder:
    """A target and a drafter."""

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
        eos_ids: tokens that end a generation; None: those of the target (`CachedModel.eos_ids`); an empty set: none does.
        vocab_size: `Pair.vocab_size` where logits are wider than the tokenizer.
        """
        if max_draft_length < 0:
            raise ValueError(f"max_draft_length is {max_draft_length}; it must be at least 0 (0 never drafts)")
        self.target = CachedModel(target, vocab_size=vocab_size) if isinstance(target, PreTrainedModel) else target
        self.drafter = drafter
        self.sampling = sampling or Sampling()
        self.max_draft_length = max_draft_length
        self.eos_ids = self.target.eos_ids if eos_ids is None else eos_ids
        self._is_streaming = False

    def generate(self, prompt_ids: Sequence[int], max_new_tokens: int, *, generator: torch.Generator | Draws | None = None) -> Generation:
        """All rounds of one generation."""
        return Generation.of(self.stream(prompt_ids, max_new_tokens, generator=generator))

    def stream(
        self, prompt_ids: Sequence[int], max_new_tokens: int, *, generator: torch.Generator | Draws | None = None
    ) -> Iterator[Round]:
        """Rounds, each as soon as it is verified; one generation at a time, which holds the decoder until it ends or is closed.

        Raises:
            ValueError: at the first round: a prompt that is empty, a text that exceeds the target's context, another stream still open.
        """
        self._check(len(prompt_ids), max_new_tokens)
        self._is_streaming = True
        try:
            yield from self._rounds(prompt_ids, max_new_tokens, generator)
        finally:
            self._is_streaming = False

    def _rounds(self, prompt_ids: Sequence[int], max_new_tokens: int, generator: torch.Generator | Draws | None) -> Iterator[Round]:
        draws = RandomDraws(generator) if generator is None or isinstance(generator, torch.Generator) else generator
        session = Session(self.sampling, self.eos_ids, draws)
        self.target.reset()
        self.drafter.start(session)
        committed = list(prompt_ids)
        end = len(committed) + max_new_tokens
        while len(committed) < end:
            one = self._round(committed, end - len(committed), session.draws)
            yield one
            if one.emitted[-1] in self.eos_ids:
                return

    def _check(self, num_prompt_tokens: int, max_new_tokens: int) -> None:
        """Raise ValueError unless the caches are free, and the target has room for prompt and answer; the last token is never fed."""
        if self._is_streaming:
            raise ValueError(
                "this decoder is in the middle of another stream, and its caches hold one sequence; "
                "exhaust or close() that stream first, or make a second decoder with models and drafter of its own"
            )
        if num_prompt_tokens < 1:
            raise ValueError("the prompt has no tokens; a generation starts from at least 1 (a BOS token will do)")
        if max_new_tokens < 0:
            raise ValueError(f"max_new_tokens is {max_new_tokens}; it must be at least 0")
        if num_prompt_tokens + max_new_tokens - 1 > self.target.max_length:
            raise ValueError(
                f"{num_prompt_tokens} prompt tokens and {max_new_tokens} new ones exceed the target's context of {self.target.max_length}; "
                f"shorten the prompt, or set max_new_tokens to at most {self.target.max_length + 1 - num_prompt_tokens}"
            )

    @torch.inference_mode()
    def _round(self, committed: list[int], num_left: int, draws: Draws) -> Round:
        """Play one round; extends `committed` by what it emits."""
        started_s = perf_counter()
        proposal = self.drafter.propose(committed, min(self.max_draft_length, num_left - 1))
        drafted_s = perf_counter()
        num_drafted = len(proposal.tokens)
        fed = committed + proposal.tokens
        logits = self.target.forward(fed, num_drafted + 1)
        p = self.sampling.laws_after(logits, fed)
        verdict = self._verify(proposal, p, draws)
        if proposal.takes_lessons:
            proposal.acceptance_probs = revealed_probs(verdict.num_accepted, proposal.tokens, proposal.laws, p, draws)
        emitted = proposal.tokens[: verdict.num_accepted]
        if not (emitted and emitted[-1] in self.eos_ids):
            emitted = [*emitted, verdict.next_token]
        committed += emitted
        # the cache holds all that was fed and is to hold committed[:-1]: what lies beyond is N_discarded, observed rather than derived
        num_beyond = len(self.target) - (len(committed) - 1)
        self.target.roll_back(len(committed) - 1)
        self.drafter.conclude(committed, verdict.num_accepted)
        counts = _counts_of(proposal, verdict.num_accepted, len(emitted))
        assert counts.num_discarded == num_beyond, f"law 4.4: {counts.num_discarded} discarded, the cache gives back {num_beyond}"
        ended_s = perf_counter()
        return Round(
            tuple(proposal.tokens),
            verdict.num_accepted,
            tuple(emitted),
            proposal.stop_reason,
            counts,
            drafted_s - started_s,
            ended_s - drafted_s,
        )

    def _verify(self, proposal: Proposal, p: Float[Tensor, "rows vocab"], draws: Draws) -> Verdict:
        """Law 4.2; `p` are the target's laws at each drafted token and at the one after."""
        return verify(proposal.tokens, proposal.laws, p, draws)


def _counts_of(proposal: Proposal, num_accepted: int, num_emitted: int) -> Counts:
    return Counts(
        num_emitted=num_emitted,
        num_drafted=len(proposal.tokens),
        num_target=1,
        num_accepted=num_accepted,
        num_draft_forwards=proposal.num_draft_forwards,
        num_micro=proposal.num_micro,
        num_micro_forwards=proposal.num_micro_forwards,
    )

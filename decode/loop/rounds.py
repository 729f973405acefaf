"""What a generation is made of: rounds, and how a round ends once the target has spoken (laws 4.2, 4.4, 4.5)."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from time import perf_counter
from typing import Any

from decode.loop.counts import Counts
from decode.loop.drafter import Drafter, Proposal
from lm import CachedModel, Verdict


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

    @property
    def refused(self) -> tuple[int, ...]:
        """The drafted tokens behind the accepted ones."""
        return self.drafted[self.num_accepted :]

    def truncated(self, num_emitted: int) -> "Round":
        """The same round with only its first `num_emitted` tokens emitted; the rest counts as discarded."""
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
    """The generated tokens (without the prompt), the rounds that made them, and their cost."""

    token_ids: tuple[int, ...]
    rounds: tuple[Round, ...]
    counts: Counts

    @classmethod
    def of(cls, rounds: Iterable[Round]) -> "Generation":
        """The generation that these rounds make up."""
        rounds = tuple(rounds)
        token_ids = tuple(token for round_ in rounds for token in round_.emitted)
        # summed field by field: a `Counts` for every partial sum would cost a twentieth of a small model's round
        totals = {f.name: sum(getattr(round_.counts, f.name) for round_ in rounds) for f in fields(Counts)}
        return cls(token_ids, rounds, Counts(**totals))

    def as_dict(self) -> dict[str, Any]:
        """Tokens, one record per round, and totals, as JSON has them."""
        return {
            "token_ids": list(self.token_ids),
            "rounds": [round_.as_dict() for round_ in self.rounds],
            "counts": asdict(self.counts),
        }


def settle_round(
    committed: list[int],
    proposal: Proposal,
    verdict: Verdict,
    *,
    target: CachedModel,
    drafter: Drafter,
    eos_ids: frozenset[int],
    clock_s: tuple[float, float] | None = None,
) -> Round:
    """Emit what a verification lets pass, by which `committed` is extended, and roll the caches back.

    Args:
        committed: the text so far.
        proposal: the draft.
        verdict: how far verification let it pass, and the token after that.
        target: verified the draft.
        drafter: made the draft.
        eos_ids: tokens that end a generation.
        clock_s: when the round began, and when it was drafted; None: it has no seconds of its own.
    """
    emitted = proposal.tokens[: verdict.num_accepted]
    if not (emitted and emitted[-1] in eos_ids):
        emitted = [*emitted, verdict.next_token]
    committed += emitted
    # the cache holds all that was fed and is to hold committed[:-1]: what lies beyond is N_discarded, observed rather
    # than derived
    num_beyond = len(target) - (len(committed) - 1)
    target.roll_back(len(committed) - 1)
    drafter.conclude(committed, verdict.num_accepted)
    counts = _counts_of(proposal, verdict.num_accepted, len(emitted))
    assert counts.num_discarded == num_beyond, (
        f"law 4.4: {counts.num_discarded} discarded, the cache gives back {num_beyond}"
    )
    began_s, drafted_s = clock_s or (0.0, 0.0)
    ended_s = perf_counter() if clock_s else 0.0
    return Round(
        tuple(proposal.tokens),
        verdict.num_accepted,
        tuple(emitted),
        proposal.stop_reason,
        counts,
        drafted_s - began_s,
        ended_s - drafted_s,
    )


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

"""Law 4.11: the threshold that needs no tuning.

Maximising tokens per second is a renewal-reward problem. With lambda the best throughput, a second spent is lambda tokens lost, so
drafting one more token after k costs lambda * (t_draft + t_target(k+1) - t_target(k)) tokens and gains S_k * a_{k+1}:

    S_k      calibrated probability that all k drafted tokens survive (a fed-time head has not scored the newest yet: mean acceptance
    stands in) a_{k+1}  predicted acceptance of the next token, not drawn yet: m + r (a_k - mean a), linear in the newest score

Continue while the gain is at least the cost. This one-step rule does not see that a hard token may be followed by easy ones; what that
loses is measured by `python -m decode tune`.

lambda is `throughput` as found on a trace (`decode.tuning.fixed_point`), or, with `is_online`, N / T of the generation so far after a
prior of `prior_tokens` at that throughput; it is at least 1 / t_target(0), what the target alone reaches. Draft length 0: a round does not
draft while a draft of late did not pay, i.e. while (mean accepted tokens of a drafting round) < lambda * (mean extra seconds of one);
every `probe_every` rounds it drafts all the same, to find out.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.special import expit

from decode.policies.base import AfterDraw, Number, Outcome, Policy, State

if TYPE_CHECKING:
    from heads.head import AcceptanceHead


@dataclass(frozen=True)
class Auto(Policy):
    """`max_rejection_prob: auto`.

    Attributes:
        head: scores tokens; calibrated probabilities are used. A second head of the other timing may go into `also`.
        t_draft_s: seconds of one draft forward.
        t_target_s: seconds of a verification without a draft, t_target(0).
        t_verify_s: seconds that each drafted token adds to it, the slope of t_target(k).
        throughput: lambda in tokens per second; None: the target alone's, a prior to learn from.
        is_online: learn lambda in each generation.
        next_mean: m, the mean acceptance of a token that follows an accepted one.
        next_slope: r, how much it gains per unit of the score before it.
        score_mean: the mean of that score.
        prior_tokens: weight of the prior of lambda.
        prior_accepted: accepted tokens per drafting round, to begin with; None: `next_mean`, as for drafts of one token.
        prior_extra_s: extra seconds of one, to begin with; None: those of one token.
        prior_rounds: weight of these two.
        probe_every: rounds without a draft before one is tried again.
        memory: most weight that the past has in the means over drafting rounds.
    """

    head: AcceptanceHead
    t_draft_s: Number
    t_target_s: Number
    t_verify_s: Number = 0.0
    throughput: Number | None = None
    is_online: bool = True
    next_mean: Number = 0.6
    next_slope: Number = 0.0
    score_mean: Number = 0.8
    also: AcceptanceHead | None = None
    prior_tokens: float = 64.0
    prior_accepted: Number | None = None
    prior_extra_s: Number | None = None
    prior_rounds: float = 8.0
    probe_every: int = 16
    memory: float = 0.98

    def __post_init__(self) -> None:
        for name in ("t_draft_s", "t_target_s"):
            if np.any(np.asarray(getattr(self, name)) <= 0):
                raise ValueError(f"{name} is {getattr(self, name)}; a time is a positive number of seconds")
        if self.also is not None and self.also.timing == self.head.timing:
            raise ValueError(f"both heads are {self.head.timing}-time; `also` takes a head of the other timing")

    @classmethod
    def recommended(cls, head: AcceptanceHead, **others: Any) -> Auto:
        """The rule with what `python -m decode tune` wrote into the head's config.json.

        Raises:
            ValueError: nothing was written there.
        """
        known = head.provenance.recommended
        if not {"t_draft_s", "t_target_s"} <= set(known):
            raise ValueError(
                "max_rejection_prob: auto needs the times that the head is to run with, and its config.json has no `recommended`; run "
                "`python -m decode tune` first, or make decode.policies.auto.Auto(head, t_draft_s, t_target_s)"
            )
        names = {f.name for f in fields(cls)} - {"head", "also"}
        return cls(head, **{name: value for name, value in known.items() if name in names}, **others)

    @property
    def fed_head(self) -> AcceptanceHead | None:  # type: ignore[override]
        return next((head for head in (self.head, self.also) if head is not None and head.timing == "fed"), None)

    @property
    def drawn_head(self) -> AcceptanceHead | None:  # type: ignore[override]
        return next((head for head in (self.head, self.also) if head is not None and head.timing == "drawn"), None)

    @property
    def signals(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset(f"{head.timing}_logit" for head in (self.head, self.also) if head is not None)

    def start(self) -> State:
        prior = 1.0 / self.t_target_s if self.throughput is None else self.throughput
        floor = np.maximum(prior, 1.0 / self.t_target_s)
        accepted = self.next_mean if self.prior_accepted is None else self.prior_accepted
        extra_s = self.t_draft_s + self.t_verify_s if self.prior_extra_s is None else self.prior_extra_s
        # (survival, tokens, seconds, rounds since a draft, accepted per drafting round, extra seconds per drafting round, drafting rounds)
        return 1.0, self.prior_tokens, self.prior_tokens / floor, 0.0, accepted, extra_s, self.prior_rounds

    def begin(self, state: State) -> State:
        return (1.0, *state[1:])

    def limit(self, state: State) -> Number:
        _, _, _, idle, accepted, extra_s, _ = state
        pays = accepted >= self._rate(state) * extra_s
        return np.where(pays | (idle >= self.probe_every - 1), np.inf, 0.0)

    def after(self, state: State, drawn: AfterDraw) -> tuple[State, Number]:
        kept, newest = state[0], self.next_mean
        if self.fed_head is not None:
            scored = expit(self.fed_head.calibrated_logit(drawn.fed_logit))
            kept = kept * scored
            newest = np.where(drawn.position > 0, self._next(scored), newest)
        survival = kept * newest
        if self.drawn_head is not None:
            newest = expit(self.drawn_head.calibrated_logit(drawn.drawn_logit))
            survival = kept * newest
            kept = survival if self.fed_head is None else kept
        gain = survival * self._next(newest)
        return (kept, *state[1:]), gain < self._rate(state) * (self.t_draft_s + self.t_verify_s)

    def end(self, state: State, outcome: Outcome) -> State:
        survival, tokens, seconds, idle, accepted, extra_s, rounds = state
        extra = outcome.num_drafted * (self.t_draft_s + self.t_verify_s)
        has_drafted = outcome.num_drafted > 0
        tokens = tokens + outcome.num_accepted + 1.0
        seconds = seconds + self.t_target_s + extra
        weight = has_drafted * np.maximum(1.0 - self.memory, 1.0 / (rounds + 1.0))
        accepted = accepted + weight * (outcome.num_accepted - accepted)
        extra_s = extra_s + weight * (extra - extra_s)
        return survival, tokens, seconds, np.where(has_drafted, 0.0, idle + 1.0), accepted, extra_s, rounds + has_drafted

    def _rate(self, state: State) -> Number:
        """lambda."""
        if not self.is_online:
            return 1.0 / self.t_target_s if self.throughput is None else np.maximum(self.throughput, 1.0 / self.t_target_s)
        return np.maximum(state[1] / state[2], 1.0 / self.t_target_s)

    def _next(self, newest: Number) -> Number:
        """Predicted acceptance of the token after one whose acceptance is predicted as `newest`."""
        return np.clip(self.next_mean + self.next_slope * (newest - self.score_mean), 0.0, 1.0)

"""Law 4.11: the threshold that needs no tuning.

Maximising tokens per second is a renewal-reward problem, and a further token has the price lambda * (t_draft +
slope of t_target(k)). The draft continues while S * g(a) >= price, where

    S   calibrated probability that all drafted tokens survive; with a fed-time head, all but the newest
    a   the newest score in S
    g   the *index*: the highest cost per unit of S at which one more token pays, if drafting may continue after it:
        max over stopping times n >= 1 of E[tokens that verification will add within n steps] / E[n], given a and S = 1

A prefix head gives a before the draw, when the forward is already paid. The rule then decides twice. Before the
draw it stops if the token is not worth its own verification, S * a < lambda * slope of t_target(k). After the
draw it stops as above. Where scores form a Markov chain this rule is optimal. S and the price enter only by their
ratio, so one g serves every hardware: `evaluation.tuning.rule` solves for it on a trace. Here g is a line. Before
a fed-time head has scored a token, first_index replaces it.

lambda is `throughput`; with `is_online` it is N / T of the generation so far, plus 256 tokens at that throughput.
It is at least 1 / t_target(0), the target's own. A round drafts nothing while `AutoState.profit` is negative,
since the target alone is then faster; every `probe_every` rounds it drafts in any case.
"""

from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import inf
from typing import ClassVar, NamedTuple

import numpy as np

from decode.policies.base import AfterDraw, BeforeDraw, Head, Number, Outcome, State
from decode.policies.learning import learned_from
from decode.policies.scores import ScoreHead, ScoringPolicy

LONGEST = 20
"""Largest fixed length that a prior of lambda compares."""
# weight of the prior of lambda
_PRIOR_TOKENS = 256.0
# largest weight of the past in the mean over drafting rounds, so that it follows the text
_MEMORY = 0.98


class AutoState(NamedTuple):
    """A generation so far. The first three are reset in each round."""

    survival: Number
    """S."""
    index_share: Number
    """first_index / g(1) where nothing is scored yet, else 1."""
    price: Number
    """Tokens that one more drafted token costs."""
    tokens: Number
    """N, including the prior."""
    seconds: Number
    """T, including the prior."""
    idle: Number
    """Rounds since one drafted."""
    profit: Number
    """Mean over drafting rounds of (accepted tokens - extra seconds / t_target(0))."""
    rounds: Number
    """Weight of that mean: drafting rounds, including the prior."""
    learned: State = ()
    """`decode.policies.learning`."""


@dataclass(frozen=True)
class Auto(ScoringPolicy):
    """`max_rejection_prob: auto`.

    Attributes, beside those of `ScoringPolicy`:
        t_draft_s: of one draft step, including this rule's own work; 0 for a block, which is part of t_start_s.
        t_target_s: of a verification without a draft, t_target(0).
        t_verify_s: that each drafted token adds to it, the slope of t_target(k) from k = 1 on.
        t_start_s: that verifying any draft adds, so that t_target(k) is the sum of the three.
        throughput: lambda in tokens per second, as `evaluation.tuning.rule` finds it on a trace; None: that of
            the best fixed length, if every token were accepted with probability `next_mean`.
        is_online: learn lambda in each generation.
        next_mean: mean acceptance of a token that follows an accepted one.
        index_offset: g(0).
        index_slope: g(1) - g(0).
        first_index: g after the first token of a round, for a fed-time head.
        prior_profit: first estimate of `AutoState.profit`; None: from `next_mean`.
        prior_rounds: weight of that estimate, in rounds.
        probe_every: rounds without a draft before one is tried again.
    """

    head: Head
    t_draft_s: Number
    t_target_s: Number
    t_verify_s: Number = 0.0
    t_start_s: Number = 0.0
    throughput: Number | None = None
    is_online: bool = True
    next_mean: Number = 0.6
    index_offset: Number = 0.6
    index_slope: Number = 0.0
    first_index: Number = 0.6
    prior_profit: Number | None = None
    prior_rounds: float = 32.0
    probe_every: int = 16
    is_learning: bool | None = False
    ranges = (("t_draft_s", 0, inf),)

    def __post_init__(self) -> None:
        super().__post_init__()
        if np.any(np.asarray(self.t_target_s) <= 0):
            raise ValueError(f"t_target_s is {self.t_target_s}; it must be a positive number of seconds")

    @classmethod
    def recommended(cls, head: Head, *, is_learning: bool | None = None) -> "Auto":
        """The rule with what `acceptance-heads tune` wrote into the head's config.json; it learns if it can.

        Raises:
            ValueError: nothing was tuned for the head.
        """
        known = head.provenance.recommended
        if not {"t_draft_s", "t_target_s"} <= set(known):
            raise ValueError(
                "max_rejection_prob: auto needs times, and the head's config.json has none; run `acceptance-heads tune`"
            )
        rule = cls(head, **{f.name: known[f.name] for f in fields(cls) if f.name in known})
        return replace(rule, is_learning=not rule.scores_late if is_learning is None else is_learning)

    def start(self) -> AutoState:
        rate, profit = self._prior()
        totals = _PRIOR_TOKENS, _PRIOR_TOKENS / rate, 0.0, profit, self.prior_rounds
        return AutoState(1.0, 1.0, 0.0, *totals, self.initial_calibration)

    def begin(self, state: AutoState) -> AutoState:  # type: ignore[override]
        share = self.first_index / (self.index_offset + self.index_slope) if self.scores_late else 1.0
        return AutoState(1.0, share, self._rate(state) * (self.t_draft_s + self.t_verify_s), *state[3:])

    def limit(self, state: AutoState) -> Number:  # type: ignore[override]
        return np.where((state.profit >= 0.0) | (state.idle >= self.probe_every - 1), np.inf, 0.0)

    def stop_before(self, state: AutoState, signals: BeforeDraw) -> Number:  # type: ignore[override]
        price = self._rate(state) * self.t_verify_s
        return (state.survival * self.score(state.learned, signals) < price) & (signals.position > 0)

    def after(self, state: AutoState, drawn: AfterDraw) -> tuple[State, Number]:  # type: ignore[override]
        newest = self.score(state.learned, drawn)
        survival = state.survival * newest
        stop = survival * state.index_share * (self.index_offset + self.index_slope * newest) < state.price
        return AutoState(survival, 1.0, *state[2:]), stop

    def end(self, state: AutoState, outcome: Outcome) -> AutoState:  # type: ignore[override]
        has_drafted = outcome.num_drafted > 0
        extra_s = outcome.num_drafted * (self.t_draft_s + self.t_verify_s) + has_drafted * self.t_start_s
        weight = has_drafted * np.maximum(1.0 - _MEMORY, 1.0 / (state.rounds + 1.0))
        return AutoState(
            *state[:3],
            tokens=state.tokens + outcome.num_accepted + 1.0,
            seconds=state.seconds + self.t_target_s + extra_s,
            idle=np.where(has_drafted, 0.0, state.idle + 1.0),
            profit=state.profit + weight * (outcome.num_accepted - extra_s / self.t_target_s - state.profit),
            rounds=state.rounds + has_drafted,
            learned=learned_from(state.learned, outcome.feedback),
        )

    def _rate(self, state: AutoState) -> Number:
        """Tokens per second that a draft must reach (lambda of law 4.11), at least the target's own."""
        rate = state.tokens / state.seconds if self.is_online else self.throughput
        return np.maximum(self._prior()[0] if rate is None else rate, 1.0 / self.t_target_s)

    def _prior(self) -> tuple[Number, Number]:
        """(lambda, profit per drafting round) at the start."""
        cost = (self.t_draft_s + self.t_verify_s) / self.t_target_s
        rate, profit = prior_of(self.next_mean, cost, self.t_start_s / self.t_target_s)
        rate = rate / self.t_target_s if self.throughput is None else self.throughput
        return np.maximum(rate, 1.0 / self.t_target_s), profit if self.prior_profit is None else self.prior_profit


@dataclass(frozen=True)
class AutoTokenProb(Auto):
    """The rule without a head: it takes P = sigmoid(slope * logit q(y) + offset) for the probability that y is
    accepted. `evaluation.tuning.rule` fits both numbers on dev; all other parameters are those of `Auto`.
    """

    slope: float = 1.0
    offset: float = 0.0
    ranges = (*Auto.ranges, ("slope", 0.001, inf))  # type: ignore[assignment]
    head: ClassVar[Head] = property(lambda self: self._scored)  # type: ignore[misc]
    """What is scored instead of a head; no parameter."""

    @cached_property
    def _scored(self) -> ScoreHead:
        shift = self.offset / self.slope
        return ScoreHead("logit_token_prob", "drawn", calibration_shift=shift, temperature=1.0 / self.slope)


def prior_of(acceptance: Number, cost: Number, start: Number = 0.0) -> tuple[Number, Number]:
    """Largest throughput (times t_target(0)) and profit of any fixed length k >= 1:

    throughput(k) = (1 + m + ... + m^k) / (1 + s + k c)          profit(k) = m + ... + m^k - s - k c

    m is `acceptance`; c, `cost`, and s, `start`, are the seconds of one more drafted token and those of a
    drafting round that do not depend on k, both over t_target(0).
    """
    accepted = acceptance
    power = acceptance
    rate = (1.0 + acceptance) / (1.0 + start + cost)
    profit = acceptance - start - cost
    for k in range(2, LONGEST + 1):
        power = power * acceptance
        accepted = accepted + power
        extra = start + k * cost
        rate = np.maximum(rate, (1.0 + accepted) / (1.0 + extra))
        profit = np.maximum(profit, accepted - extra)
    return rate, profit

"""Policies without a head that learn on the job: tests play them where lessons and memory matter."""

from dataclasses import dataclass
from typing import Any

from decode.policies.base import AfterDraw, BeforeDraw, Number, Outcome, Policy, State
from decode.policies.checks import check_unit
from decode.policies.learning import FIRST, NOTHING, learned_from, lesson_of, logit_of, score_of


@dataclass(frozen=True)
class LearnedProb(Policy):
    """Stop when 1 - (product of learned acceptance probabilities so far) > max_rejection_prob.

    The probability is a logistic of the logits of q(y) and of max_v q(v), refitted on the job from q(y) itself on
    (`decode.policies.learning`).
    """

    max_rejection_prob: Number = 0.7
    signals = frozenset({"token_prob", "max_prob"})
    nothing_learned = NOTHING

    def __post_init__(self) -> None:
        super().__post_init__()
        check_unit("max_rejection_prob", self.max_rejection_prob)

    def start(self) -> State:
        return 1.0, FIRST

    def begin(self, state: State) -> State:
        return 1.0, state[1]

    def after(self, state: State, drawn: AfterDraw) -> tuple[State, Number]:
        survival = self._survival(state, drawn)
        return (survival, state[1]), 1.0 - survival > self.max_rejection_prob

    def lesson(self, state: Any, drawn: AfterDraw, acceptance_prob: Number) -> State:
        return lesson_of(state[1].weights, self._inputs(drawn), acceptance_prob)

    def end(self, state: Any, outcome: Outcome) -> State:
        return 1.0, learned_from(state[1], outcome.lesson)

    def _survival(self, state: Any, seen: Any) -> Number:
        """Survival probability of the draft with the newest token in it."""
        return state[0] * score_of(state[1].weights, self._inputs(seen))

    def _inputs(self, seen: Any) -> tuple[Number, Number]:
        return logit_of(seen.token_prob), logit_of(seen.max_prob)


@dataclass(frozen=True)
class LearnedMaxProb(LearnedProb):
    """Stop before drawing when 1 - (product of learned acceptance probabilities, the next token's among them) >
    max_rejection_prob.

    As `LearnedProb`, with a logistic of the logit of max_v q(v) alone, which is known before the draw (B in law 4.3):
    what vLLM's second model runner fits to decide how many of the tokens that it has drafted are verified. At least one
    token is drafted.
    """

    signals = frozenset({"max_prob"})

    def stop_before(self, state: Any, seen: BeforeDraw) -> Number:
        return (1.0 - self._survival(state, seen) > self.max_rejection_prob) & (seen.position > 0)

    def after(self, state: State, drawn: AfterDraw) -> tuple[State, Number]:
        return (self._survival(state, drawn), state[1]), False

    def _inputs(self, seen: Any) -> tuple[Number, Number]:
        return logit_of(seen.max_prob), 0.0

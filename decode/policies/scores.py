"""What a trained head predicts of a draft: the probability that its tokens survive verification (laws 4.8, 4.8b, 4.8c).

fed-time head       the forward that yields q_i scores y_{i-1}: at y_i the product covers j < i, and the first token has
                    no score yet
drawn-time head     scores y_i when it is drawn: the product covers j <= i
prefix head         scores y_i before it is drawn, whichever it will be: the product covers j <= i, and is known before
                    the draw
candidate head      as a drawn-time head, for the candidates of a tree
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from decode.policies.base import JOINT, AfterDraw, BeforeDraw, Head, Number, Policy, State, timing_of
from decode.policies.learning import FIRST, NOTHING, clip, logit_of, score_of, sigmoid, token_feedback

TOKEN_LOGIT = "logit_token_prob"


@dataclass(frozen=True)
class ScoreHead:
    """Stands in for a head: its logit is a number that the loop or a trace knows without one."""

    score: Literal["perfect", "confidence", "max_prob", "length", "logit_token_prob"]
    """logit q(y), in the loop and in replay; in replay alone the true acceptance_prob, the output of a DSpark
    draft's own head, logit(max_v q(v)), from which vLLM's adaptive verification estimates it, or the length that
    AdaFlash's head predicts.
    """
    timing: str = "prefix"
    calibration_shift: float = 0.0
    temperature: float = 1.0

    @property
    def signal(self) -> str:
        """The field of `AfterDraw` that is its logit; empty for what only replay knows."""
        return self.score if self.score == TOKEN_LOGIT else ""

    @property
    def shape_name(self) -> str:
        """Kind of its stop. Where only the stop of q(y) was timed, that time counts."""
        return f"{TOKEN_LOGIT}{JOINT}token_prob" if self.signal else ""

    def calibrated_logit(self, logit: Number) -> Number:
        """Logit of the acceptance rate."""
        return (logit + self.calibration_shift) / self.temperature


class ScoringPolicy(Policy):
    """A policy that reads one head. Subclasses are dataclasses with these fields.

    Attributes:
        head: of any timing.
        is_calibrated: calibrated probabilities; False: raw ones. An array in replay, as any parameter.
        is_learning: refit the head's calibration during generation (`decode.policies.learning`).
    """

    head: Head
    is_calibrated: Number = True
    is_learning: bool | None = False

    def __post_init__(self) -> None:
        """Raises ValueError for a head that cannot learn."""
        super().__post_init__()
        if self.is_learning and self._is_signal:
            raise ValueError("is_learning is for trained heads, not for q(y) alone; leave it out")
        if self.is_learning and self.scores_late:
            raise ValueError("is_learning is for heads of other timings, not a fed-time one; leave it out")

    @property
    def heads(self) -> tuple[Head, ...]:  # type: ignore[override]
        return () if self._is_signal else (self.head,)

    @cached_property
    def stops_before(self) -> bool:  # type: ignore[override]
        return self.head.timing == "prefix" and super().stops_before

    @property
    def signals(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset({self._logit, self._own_signal} if self.is_learning else {self._logit})

    @property
    def stop_kind(self) -> str:
        """The shape of the head; a substitute for a head in replay has none and costs nothing."""
        return self.head.shape_name

    @property
    def scores_late(self) -> bool:
        """Whether the token just drawn has no score yet; only scores that it has can be refitted."""
        return self.head.timing == "fed"

    @property
    def initial_calibration(self) -> State:
        """The learned state at the start of a generation; () where nothing is learned."""
        return FIRST if self.is_learning else ()

    @property
    def zero_feedback(self) -> State:
        return NOTHING if self.is_learning else ()

    def score(self, learned: Any, signals: BeforeDraw | AfterDraw) -> Number:
        """The newest acceptance probability that the head predicts. A drawn-time head predicts it of the drawn token, a
        prefix head of that token or, before the draw, of the next one, and a fed-time head of the token before.

        `signals` are those after the draw, or before it; `learned` is the state of `decode.policies.learning`, by
        which the token is scored if the policy learns.
        """
        if self.is_learning:
            return score_of(learned.weights, self._inputs(signals))
        logit = getattr(signals, self._logit)
        shift, temperature = self._calibration
        calibrated = (logit + shift) / temperature
        if isinstance(self.is_calibrated, np.ndarray):  # settings side by side, in replay
            return sigmoid(np.where(self.is_calibrated, calibrated, logit))
        return sigmoid(calibrated if self.is_calibrated else logit)

    def feedback(self, state: State, drawn: AfterDraw, acceptance_prob: Number) -> State:
        return token_feedback(state[-1].weights, self._inputs(drawn), acceptance_prob) if self.is_learning else ()

    def _inputs(self, signals: BeforeDraw | AfterDraw) -> tuple[Number, Number]:
        """Inputs of the regression for the token: the head's calibrated logit, and that of `_own_signal`."""
        shift, temperature = self._calibration
        return clip((getattr(signals, self._logit) + shift) / temperature), logit_of(getattr(signals, self._own_signal))

    @cached_property
    def _is_signal(self) -> bool:
        """Whether the score is a signal of the draft, so that there is no head."""
        return isinstance(self.head, ScoreHead) and bool(self.head.signal)

    @cached_property
    def _logit(self) -> str:
        return self.head.signal if self._is_signal else f"{timing_of(self.head)}_logit"

    @cached_property
    def _own_signal(self) -> str:
        """The draft's probability that the regression reads beside the head: q(y), or with a prefix head max q."""
        return "max_prob" if self.head.timing == "prefix" else "token_prob"

    @cached_property
    def _calibration(self) -> tuple[float, float]:
        """(shift, temperature): calibrated logit = (logit + shift) / temperature; heads compute them at each access."""
        return self.head.calibration_shift, self.head.temperature

"""Rules by which engines end a draft, as their sources have them: what `flags` chooses settings of.

They compete where they are named (`--policy llama_cpp:n_max=8,p_min=0.6`, decode.policies) and nowhere else. A stop
costs them nothing: it is part of the engine's own draft step (law 4.9), hence the empty `stop_kind`.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from decode.policies.base import AfterDraw, BeforeDraw, Number, Outcome, Policy, State
from decode.policies.checks import check_count, check_unit
from decode.policies.learning import sigmoid


def check_places(offsets: tuple[float, ...], slopes: tuple[float, ...]) -> None:
    """Raise unless there is one of each for every place of a draft."""
    if not offsets or len(offsets) != len(slopes):
        raise ValueError(f"offsets and slopes are {offsets} and {slopes}; give one of each for every place")


def at_place(position: Number, logit: Number, offsets: tuple[float, ...], slopes: tuple[float, ...]) -> Number:
    """sigmoid(offset + slope logit) with those of the place, the last of them from there on."""
    place = np.minimum(position, len(offsets) - 1)
    return sigmoid(np.asarray(offsets)[place] + np.asarray(slopes)[place] * logit)


@dataclass(frozen=True)
class LlamaCpp(Policy):
    """llama.cpp's drafting from a draft model (0.5.0-dev of 2026-10-01, `common/speculative.cpp`, draft-simple).

    At most `n_max` tokens, and at least 1; the draft ends before a token whose probability is below `p_min`, the
    forward that gave it paid. The token is the likeliest one, and its probability is that among the ten likeliest,
    since the draft's sampler is top-k 10 alone: at temperature 1, not cumulative along the draft. Its minimum length,
    n-min, is replayed alone (`evaluation.flags.engines.ShortDrafts`).

    Departure: llama.cpp drafts beyond an end-of-text token, whose followers verification never reaches; here that token
    ends the draft.
    """

    n_max: Number = 3
    p_min: Number = 0.0
    signals = frozenset({"top_prob"})
    stop_kind: ClassVar[str] = ""  # type: ignore[misc]

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("n_max", self.n_max, 1)
        check_unit("p_min", self.p_min)

    def limit(self, state: State) -> Number:
        return self.n_max

    def stop_before(self, state: State, seen: BeforeDraw) -> Number:
        return seen.top_prob < self.p_min


@dataclass(frozen=True)
class Assisted(Policy):
    """transformers' assisted generation (5.23.0, `generation/candidate_generator.py` and `stopping_criteria.py`).

    At most `num_assistant_tokens` tokens; the draft ends after a token with q(y) < `assistant_confidence_threshold`,
    which is kept; 0 switches that off. With `is_heuristic` (num_assistant_tokens_schedule: heuristic_transient, which
    begins anew with each generation) the number grows by 2 after a draft that was accepted whole, and else falls by 1,
    to at least 1; a round that could draft nothing counts as accepted whole.

    q(y) is that of the scores that transformers draws from: with a temperature, top-k or top-p they are warped, and the
    draft's even twice, so that this is its rule only at temperature 0 and at temperature 1 without truncation. With
    scikit-learn installed transformers moves a threshold above 0 by what was accepted; here it stays.
    """

    num_assistant_tokens: Number = 20
    assistant_confidence_threshold: Number = 0.4
    is_heuristic: Number = False
    signals = frozenset({"token_prob"})
    stop_kind: ClassVar[str] = ""  # type: ignore[misc]

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("num_assistant_tokens", self.num_assistant_tokens, 1)
        check_unit("assistant_confidence_threshold", self.assistant_confidence_threshold)

    def start(self) -> State:
        return (self.num_assistant_tokens,)

    def limit(self, state: State) -> Number:
        return state[0]

    def after(self, state: State, drawn: AfterDraw) -> tuple[State, Number]:
        return state, drawn.token_prob < self.assistant_confidence_threshold

    def end(self, state: State, outcome: Outcome) -> State:
        (k,) = state
        is_whole = outcome.num_accepted == outcome.num_drafted
        changed = np.where(is_whole, k + 2, np.maximum(k - 1, 1))
        return (np.where(self.is_heuristic, changed, k),)


@dataclass(frozen=True)
class DSparkConfidence(Policy):
    """What engines do with the confidence head of a DSpark draft (DeepSpec at afdfa7c, `eval/dspark/draft_ops.py`): a
    draft ends before the first place whose confidence is below `min_confidence`, perhaps before any token. The
    confidence of a place is known before its token is drawn (B in law 4.3). TensorRT-LLM's default is 0, which keeps
    the whole block.

    With `is_product` the product of the confidences along the block is held against it, which is what a block's
    survival is predicted by. `offsets` and `slopes` calibrate place j as sigmoid(offsets[j] + slopes[j] logit), the
    last of them from there on; which no engine does.
    """

    min_confidence: Number = 0.5
    is_product: Number = False
    offsets: tuple[float, ...] = (0.0,)
    slopes: tuple[float, ...] = (1.0,)
    signals = frozenset({"confidence_logit"})
    stop_kind: ClassVar[str] = ""  # type: ignore[misc]

    def __post_init__(self) -> None:
        super().__post_init__()
        check_unit("min_confidence", self.min_confidence)
        check_places(self.offsets, self.slopes)

    def start(self) -> State:
        return (1.0,)

    def begin(self, state: State) -> State:
        return (1.0 + 0.0 * state[0],)

    def stop_before(self, state: State, seen: BeforeDraw) -> Number:
        return self._confidence(state, seen) < self.min_confidence

    def after(self, state: State, drawn: AfterDraw) -> tuple[State, Number]:
        return (np.where(self.is_product, self._confidence(state, drawn), 1.0),), False

    def _confidence(self, state: State, seen: BeforeDraw | AfterDraw) -> Number:
        """Confidence of the place, times those before it where they count."""
        return state[0] * at_place(seen.position, seen.confidence_logit, self.offsets, self.slopes)


@dataclass(frozen=True)
class OwnConfidence:
    """Takes a prefix head's place in replay and says what a DSpark draft's own head said, uncalibrated."""

    timing: ClassVar[str] = "prefix"
    shape_name: ClassVar[str] = ""
    calibration_shift: ClassVar[float] = 0.0
    temperature: ClassVar[float] = 1.0

    def calibrated_logit(self, logit: Number) -> Number:
        """The logit itself."""
        return logit


@dataclass(frozen=True)
class LargestProb(OwnConfidence):
    """Takes a prefix head's place in replay and says logit(max_v q(v)), by a logistic regression: what vLLM's adaptive
    verification estimates where a draft has no confidence head.
    """

    calibration_shift: float = 0.0  # type: ignore[misc]
    temperature: float = 1.0  # type: ignore[misc]

    def calibrated_logit(self, logit: Number) -> Number:
        """Logit of the acceptance rate, by the regression."""
        return (logit + self.calibration_shift) / self.temperature

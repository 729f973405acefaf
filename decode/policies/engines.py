"""Rules by which engines end a draft, as their sources have them; `flags` chooses their settings.

They compete only where they are named (`--policy llama_cpp:n_max=8,p_min=0.6`). A stop costs them nothing: it is
part of the engine's own draft step (law 4.9), hence the empty `stop_kind`.
"""

from dataclasses import dataclass
from math import inf
from typing import ClassVar

import numpy as np

from decode.policies.base import AfterDraw, BeforeDraw, Number, Outcome, Policy, State
from decode.policies.learning import sigmoid
from decode.policies.plain import ProductPolicy, heuristic_length


@dataclass(frozen=True)
class LlamaCpp(Policy):
    """llama.cpp's drafting from a draft model (0.5.0-dev of 2026-10-01, `common/speculative.cpp`, draft-simple).

    At most `n_max` tokens, and at least 1; the draft ends before a token whose probability is below `p_min`,
    after its forward was paid. The token is the likeliest one, and its probability is that among the ten
    likeliest, since the draft's sampler is top-k 10 alone: at temperature 1, not cumulative along the draft. Its
    minimum length, n-min, exists only in replay (`evaluation.flags.engines.ShortDrafts`).

    Departure: an end-of-text token ends the draft; llama.cpp drafts beyond it, which verification never reaches.
    """

    n_max: Number = 3
    p_min: Number = 0.0
    signals = frozenset({"top_prob"})
    ranges = (("n_max", 1, inf), ("p_min", 0, 1))
    stop_kind: ClassVar[str] = ""  # type: ignore[misc]

    def limit(self, state: State) -> Number:
        return self.n_max

    def stop_before(self, state: State, signals: BeforeDraw) -> Number:
        return signals.top_prob < self.p_min


@dataclass(frozen=True)
class Assisted(Policy):
    """transformers' assisted generation (5.23.0, `generation/candidate_generator.py` and `stopping_criteria.py`).

    At most `num_assistant_tokens` tokens; the draft ends after a token with q(y) < `assistant_confidence_threshold`,
    which is kept; 0 switches that off. With `is_heuristic` (num_assistant_tokens_schedule: heuristic_transient, which
    starts over with each generation) the number grows by 2 after a draft that was accepted whole, and else falls by 1,
    to at least 1; a round that could draft nothing counts as accepted whole.

    q(y) is that of the scores that transformers draws from: with a temperature, top-k or top-p they are warped, and the
    draft's even twice, so that this is its rule only at temperature 0 and at temperature 1 without truncation. With
    scikit-learn installed transformers moves a threshold above 0 by what was accepted; here it stays.
    """

    num_assistant_tokens: Number = 20
    assistant_confidence_threshold: Number = 0.4
    is_heuristic: Number = False
    signals = frozenset({"token_prob"})
    ranges = (("num_assistant_tokens", 1, inf), ("assistant_confidence_threshold", 0, 1))
    stop_kind: ClassVar[str] = ""  # type: ignore[misc]

    def start(self) -> State:
        return (self.num_assistant_tokens,)

    def limit(self, state: State) -> Number:
        return state[0]

    def after(self, state: State, drawn: AfterDraw) -> tuple[State, Number]:
        return state, drawn.token_prob < self.assistant_confidence_threshold

    def end(self, state: State, outcome: Outcome) -> State:
        return (np.where(self.is_heuristic, heuristic_length(state[0], outcome), state[0]),)


@dataclass(frozen=True)
class DSparkConfidence(ProductPolicy):
    """Stop before the first position where a DSpark draft's own confidence is below `min_confidence`, perhaps
    before any token (DeepSpec at afdfa7c, `eval/dspark/draft_ops.py`).

    The confidence is known before the token is drawn (B in law 4.3). TensorRT-LLM's default is 0, which keeps the whole
    block. With `is_product` the product of the confidences along the block is compared, which predicts its survival.
    """

    min_confidence: Number = 0.5
    is_product: Number = False
    signals = frozenset({"confidence_logit"})
    ranges = (("min_confidence", 0, 1),)
    stop_kind: ClassVar[str] = ""  # type: ignore[misc]

    def stop_before(self, state: State, signals: BeforeDraw) -> Number:
        return state[0] * sigmoid(signals.confidence_logit) < self.min_confidence

    def after(self, state: State, drawn: AfterDraw) -> tuple[State, Number]:
        return (np.where(self.is_product, state[0] * sigmoid(drawn.confidence_logit), 1.0),), False

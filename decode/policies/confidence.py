"""Stop on the draft's own probabilities: the drawn token's, their product along the draft, or the largest of the
distribution.
"""

from dataclasses import dataclass

from decode.policies.base import AfterDraw, Number, Policy, State
from decode.policies.checks import check_unit


@dataclass(frozen=True)
class TokenProb(Policy):
    """Stop after a token with q(y) < min_token_prob.

    transformers' `assistant_confidence_threshold` (0.4, the token is kept); SWIFT uses 0.8. Departure: q is untruncated
    at temperature 1, so that the signal means the same under every `Sampling` (greedy included).
    """

    min_token_prob: Number = 0.4
    signals = frozenset({"token_prob"})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_unit("min_token_prob", self.min_token_prob)

    def after(self, state: State, drawn: AfterDraw) -> tuple[State, Number]:
        return state, drawn.token_prob < self.min_token_prob


@dataclass(frozen=True)
class CumulativeTokenProb(Policy):
    """Stop after the token at which the product of q(y) over the draft falls below min_token_prob."""

    min_token_prob: Number = 0.2
    signals = frozenset({"token_prob"})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_unit("min_token_prob", self.min_token_prob)

    def start(self) -> State:
        return (1.0,)

    def begin(self, state: State) -> State:
        return (1.0,)

    def after(self, state: State, drawn: AfterDraw) -> tuple[State, Number]:
        product = state[0] * drawn.token_prob
        return (product,), product < self.min_token_prob


@dataclass(frozen=True)
class MaxProb(Policy):
    """Stop after the token where max_v q(v) < min_max_prob (Kangaroo, arXiv 2404.18911: 0.6)."""

    min_max_prob: Number = 0.6
    signals = frozenset({"max_prob"})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_unit("min_max_prob", self.min_max_prob)

    def after(self, state: State, drawn: AfterDraw) -> tuple[State, Number]:
        return state, drawn.max_prob < self.min_max_prob

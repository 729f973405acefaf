"""Times of one sequence from numbers."""

from collections.abc import Sequence
from typing import Any

from decode.policies.batch import Curve
from evaluation.times import NO_STOPS, StopShares, Times


def flat_times(
    t_draft_s: float, t_target_s: float, origin: str = "given", *, elsewhere: StopShares = NO_STOPS
) -> Times:
    """Verification that takes the same however many tokens it reads."""
    return Times.with_shares(Curve.line(t_draft_s), Curve.line(t_target_s), origin, elsewhere)


def times_by_length(t_draft_s: float, t_target_s: Sequence[float], *rest: Any, **settings: Any) -> Times:
    """t_target(k) for k = 0, 1, …; `rest` and `settings` as `Times` takes them."""
    numbers = tuple(range(1, len(t_target_s) + 1))
    return Times(Curve.line(t_draft_s), Curve(numbers, tuple(t_target_s)), *rest, **settings)

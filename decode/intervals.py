"""How sure a ratio of throughputs is: the one paired bootstrap of the project.

Two ways of decoding write texts to the same prompts. How hard a prompt is moves both alike, so prompts are resampled in pairs: the same
draw of prompts for both, and the ratio is that of the totals.

    gain = (tokens / seconds of one) / (tokens / seconds of the base) - 1
"""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int
from scipy.stats import bootstrap

Array = np.ndarray
_RESAMPLES = 2000


class Spent(NamedTuple):
    """What each prompt came to."""

    tokens: Int[Array, " prompt"]
    """Emitted."""
    seconds: Float[Array, " prompt"]

    @property
    def tokens_per_s(self) -> float:
        """Throughput over all prompts."""
        return float(self.tokens.sum() / self.seconds.sum())


class Gain(NamedTuple):
    """A gain and how sure it is."""

    value: float
    low: float
    """95 % interval."""
    high: float
    standard_error: float
    """NaN for a single prompt, which cannot be resampled."""


def gain_over(base: Spent, own: Spent, *, seed: int = 0) -> Gain:
    """The gain of `own` over `base`, which have the same prompts in the same order."""
    value = float(_gain(*base, *own, axis=-1))
    if len(own.tokens) < 2:
        return Gain(value, value, value, float("nan"))
    if all(np.allclose(*pair) for pair in zip(base, own, strict=True)):  # no resample differs; the baseline itself is exactly 0
        return Gain(value, value, value, 0.0)
    resampled = bootstrap(
        (*base, *own),
        _gain,
        paired=True,
        vectorized=True,
        n_resamples=_RESAMPLES,
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    interval = resampled.confidence_interval
    return Gain(value, float(interval.low), float(interval.high), float(resampled.standard_error))


def _gain(base_tokens: Array, base_s: Array, own_tokens: Array, own_s: Array, *, axis: int) -> Any:
    # The ratio of tokens apart: it is exactly 1 for texts that both share, so that rounding cannot move the ratio of times.
    return base_s.sum(axis) / own_s.sum(axis) * (own_tokens.sum(axis) / base_tokens.sum(axis)) - 1

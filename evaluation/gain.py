"""How sure a ratio of throughputs is: the paired bootstrap over test prompts.

Two ways of decoding write texts to the same prompts. How hard a prompt is moves both alike, so prompts are resampled in
pairs: the same draw of prompts for both, and the ratio is that of the totals. A conversation is one prompt: its turns
are drawn together.

    gain = (tokens / seconds of one) / (tokens / seconds of the base) - 1

Both settings were fixed on dev, and times are taken as they are: titles of tables name their errors.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float, Int
from scipy.special import ndtr, ndtri

Kept = TypeVar("Kept")
NUM_RESAMPLES = 2000


@dataclass(frozen=True)
class Splits(Generic[Kept]):
    """Something of the dev prompts, which choose a setting, and of the test prompts, which judge it."""

    dev: Kept
    test: Kept

    def __iter__(self) -> Iterator[Kept]:
        return iter((self.dev, self.test))


class Throughput(NamedTuple):
    """Tokens and seconds of each prompt, of one setting or of several side by side."""

    tokens: Int[np.ndarray, "*setting prompt"]
    """Emitted tokens."""
    seconds: Float[np.ndarray, "*setting prompt"]

    @property
    def tokens_per_s(self) -> Any:
        """Throughput over all prompts: a number, or one for each setting."""
        return self.tokens.sum(-1) / self.seconds.sum(-1)

    def at(self, index: int | slice | np.ndarray) -> "Throughput":
        """The same of some settings, or of some prompts of one."""
        return Throughput(self.tokens[index], self.seconds[index])


class Gain(NamedTuple):
    """A gain and its 95 % interval."""

    value: float
    low: float
    high: float
    standard_error: float
    """NaN for a single prompt, which cannot be resampled."""

    @property
    def text(self) -> str:
        """The gain and its interval as tables write them: +20.1% (+17.2%, +23.0%)."""
        return f"{self.value:+.1%} ({self.low:+.1%}, {self.high:+.1%})"

    @property
    def words(self) -> str:
        """The gain and its interval as sentences write them: +20 % (17, 23)."""
        value, low, high = (round(100 * part) for part in (self.value, self.low, self.high))
        return f"{value:+d} % ({low}, {high})"


def gain_over(base: Throughput, throughput: Throughput) -> Gain:
    """The gain of `throughput` over `base`, which have the same prompts in the same order, with its BCa interval (Efron
    1987) of 2,000 resamples.
    """
    num = len(throughput.tokens)
    sums = np.stack([base.tokens, base.seconds, throughput.tokens, throughput.seconds], axis=1, dtype=np.float64)
    value = float(_gains(sums.sum(0)))
    if num < 2:
        return Gain(value, value, value, float("nan"))
    # each prompt's share of both ratios: where it is the same on both sides, every resample has the same gain
    shares = sums / sums.sum(0)
    if np.abs(shares @ [-1, 1, 1, -1]).max() < 1e-12:
        return Gain(value, value, value, 0.0)
    resampled = _gains(_resamples(num) @ sums)
    without_one = _gains(sums.sum(0) - sums)
    pull = without_one.mean() - without_one
    skewness = float((pull**3).sum() / (pull**2).sum() ** 1.5) / 6
    # a resample may have the very gain of all prompts, give or take its rounding: it counts half
    bias = ndtri(((resampled < value - 1e-12).mean() + (resampled < value + 1e-12).mean()) / 2)
    ends = bias + ndtri([0.025, 0.975])
    low, high = np.quantile(resampled, ndtr(bias + ends / (1 - skewness * ends))).tolist()
    # of a few prompts the corrected interval may lie beside its estimate
    return Gain(value, min(value, low), max(value, high), float(resampled.std(ddof=1)))


def _gains(sums: Float[np.ndarray, "*sample 4"]) -> Any:
    base_tokens, base_s, tokens, seconds = np.moveaxis(sums, -1, 0)
    # The ratio of tokens apart: it is exactly 1 for texts that both share, so that rounding cannot move the ratio of
    # times.
    return base_s / seconds * (tokens / base_tokens) - 1


@cache
def _resamples(num_prompts: int) -> Float[np.ndarray, "resample prompt"]:
    """How often each resample has each prompt."""
    drawn = np.random.default_rng(0).integers(num_prompts, size=(NUM_RESAMPLES, num_prompts))
    rows = np.arange(NUM_RESAMPLES)[:, None] * num_prompts
    counts = np.bincount((rows + drawn).ravel(), minlength=NUM_RESAMPLES * num_prompts)
    return counts.reshape(NUM_RESAMPLES, num_prompts).astype(np.float64)


def median_ratio(slower: Iterable[float], faster: Iterable[float]) -> float:
    """How many times as fast, the median over prompts, of which a drifting machine slows both arms alike."""
    return median(float(slow / fast) for slow, fast in zip(slower, faster, strict=True))

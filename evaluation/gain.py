"""How sure a ratio of throughputs is: the paired bootstrap over test prompts.

Two ways of decoding write texts to the same prompts. How hard a prompt is moves both alike, so prompts are resampled in
pairs: the same draw of prompts for both, and the ratio is that of the totals. A conversation is one prompt: its turns
are drawn together.

    gain = (tokens / seconds of one) / (tokens / seconds of the base) - 1

Both settings were fixed on dev. `Gain.widened` adds the error of measured times to the interval (law 4.9).

The interval is BCa's, widened for few prompts; of fewer than `MIN_PROMPTS` there is none. tests/evaluation/coverage.py
prints how often intervals hold the true gain.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil, exp, expm1, hypot, sqrt
from statistics import median
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float, Int
from scipy.special import ndtr, ndtri, stdtrit

Kept = TypeVar("Kept")
NUM_RESAMPLES = 2000
_NORMAL = 1.96
"""Standard errors on either side of a value that hold 95 %."""
MIN_PROMPTS = 10
"""With fewer prompts there is no interval, and nothing is claimed."""
MOST_PROMPTS = 10_000
"""Sentences advise no larger number of prompts than this."""


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
    """A gain and its 95 % interval, which fewer than `MIN_PROMPTS` prompts do not have."""

    value: float
    low: float | None
    high: float | None
    standard_error: float | None
    """Of all prompts together; None for a single prompt, which cannot be resampled."""
    times_error: float = 0.0
    """Standard error that measured times add, which no further prompts reduce; the interval includes it."""

    def widened(self, times_error: float) -> "Gain":
        """This gain of exact times, at times that are known to this standard error of the gain."""
        if self.low is None or self.high is None:
            return self._replace(times_error=times_error)
        reach = _NORMAL * times_error
        low = self.value - hypot(self.value - self.low, reach)
        high = self.value + hypot(self.high - self.value, reach)
        return self._replace(low=low, high=high, times_error=times_error)

    @property
    def is_blurred_by_times(self) -> bool:
        """Whether the interval includes 0, and would not if times were exact."""
        if self.low is None or self.high is None or not self.low <= 0 <= self.high:
            return False
        reach = self.value - self.low if self.value > 0 else self.high - self.value
        of_prompts = sqrt(max(0.0, reach**2 - (_NORMAL * self.times_error) ** 2))
        return of_prompts < abs(self.value)

    def excludes(self, value: float) -> bool:
        """Whether there is an interval and the value is outside it."""
        return self.low is not None and self.high is not None and not self.low <= value <= self.high

    @property
    def is_above_noise(self) -> bool:
        """Whether there is an interval and all of it is above 0."""
        return self.low is not None and self.low > 0

    @property
    def is_below_noise(self) -> bool:
        """Whether there is an interval and all of it is below 0."""
        return self.high is not None and self.high < 0

    def speed(self, base: float) -> "Gain":
        """What is faster than `base` by this gain, in the unit of `base`, with its interval."""
        low = None if self.low is None else base * (1 + self.low)
        high = None if self.high is None else base * (1 + self.high)
        error = None if self.standard_error is None else base * self.standard_error
        return Gain(base * (1 + self.value), low, high, error, base * self.times_error)

    @property
    def interval(self) -> dict[str, float | None]:
        """The gain and the ends of its interval, as columns."""
        return {"gain": self.value, "low": self.low, "high": self.high}

    @property
    def text(self) -> str:
        """The gain and its interval as tables write them: +20.1% (+17.2%, +23.0%); the gain alone without one."""
        if self.low is None or self.high is None:
            return f"{self.value:+.1%}"
        return f"{self.value:+.1%} ({self.low:+.1%}, {self.high:+.1%})"

    @property
    def words(self) -> str:
        """The gain and its interval as sentences write them: +20.1 % (17.2, 23.0); the gain alone without one."""
        if self.low is None or self.high is None:
            return f"{100 * self.value:+.1f} %"
        return f"{100 * self.value:+.1f} % ({100 * self.low:.1f}, {100 * self.high:.1f})"


def gain_over(base: Throughput, throughput: Throughput) -> Gain:
    """The gain of `throughput` over `base`, which have the same prompts in the same order, with its BCa interval (Efron
    1987) of 2,000 resamples, widened by `widening` of the effective number of prompts (Kish 1965): prompts that write
    more count more, so fewer of them decide.
    """
    num = len(throughput.tokens)
    sums = np.stack([base.tokens, base.seconds, throughput.tokens, throughput.seconds], axis=1, dtype=np.float64)
    value = float(_gains(sums.sum(0)))
    if num < 2:
        return Gain(value, None, None, None)
    # each prompt's share of both ratios: where it is the same on both sides, every resample has the same gain
    shares = sums / sums.sum(0)
    has_interval = num >= MIN_PROMPTS
    if np.abs(shares @ [-1, 1, 1, -1]).max() < 1e-12:
        return Gain(value, value, value, 0.0) if has_interval else Gain(value, None, None, 0.0)
    resampled = _gains(_resamples(num) @ sums)
    standard_error = float(resampled.std(ddof=1))
    if not has_interval:
        return Gain(value, None, None, standard_error)
    without_one = _gains(sums.sum(0) - sums)
    pull = without_one.mean() - without_one
    skewness = float((pull**3).sum() / (pull**2).sum() ** 1.5) / 6
    # a resample may have the very gain of all prompts, give or take its rounding: it counts half
    bias = ndtri(((resampled < value - 1e-12).mean() + (resampled < value + 1e-12).mean()) / 2)
    ends = bias + ndtri([0.025, 0.975])
    low, high = np.quantile(resampled, ndtr(bias + ends / (1 - skewness * ends))).tolist()
    # of a few prompts the corrected interval may lie beside its estimate
    factor = widening(1 / float((shares.mean(1) ** 2).sum()))
    wide_low = max(-1.0, value - factor * max(0.0, value - low))
    wide_high = value + factor * max(0.0, high - value)
    return Gain(value, wide_low, wide_high, standard_error)


def gain_of_resamples(value: float, resampled: Float[np.ndarray, " resample"], num_prompts: int) -> Gain:
    """A gain whose standard error is that of its resamples over prompts, with the normal interval, widened for few
    prompts as that of `gain_over`.
    """
    error = float(resampled.std(ddof=1))
    if num_prompts < MIN_PROMPTS:
        return Gain(value, None, None, error)
    reach = _NORMAL * widening(float(num_prompts)) * error
    return Gain(value, max(-1.0, value - reach), value + reach, error)


def widening(num_prompts: float) -> float:
    """How many times as wide as BCa's the interval of so few prompts is: t with n - 1 degrees of freedom over the
    normal quantile, times sqrt(n / (n - 1)), since resamples vary less than prompts do (Hesterberg 2015, "What Teachers
    Should Know about the Bootstrap"): 1.22 of 10 prompts, 1.06 of 30, 1.02 of 80; as of 2 below 2.
    """
    num = max(2.0, num_prompts)
    return float(stdtrit(num - 1, 0.975) / ndtri(0.975)) * sqrt(num / (num - 1))


def gain_of_turns(
    base_s: Sequence[float] | Float[np.ndarray, " turn"], seconds: Sequence[float] | Float[np.ndarray, " turn"]
) -> Gain:
    """The gain of one arm over another from turns in which both write equally many tokens: the geometric mean of the
    ratios of their seconds, with the 95 % t-interval of the mean logarithm (n - 1 degrees of freedom). A single turn
    has no interval.
    """
    logs = np.log(np.asarray(base_s) / np.asarray(seconds))
    mean = float(logs.mean())
    if len(logs) < 2:
        return Gain(expm1(mean), None, None, None)
    error = float(logs.std(ddof=1)) / sqrt(len(logs))
    reach = float(stdtrit(len(logs) - 1, 0.975)) * error
    return Gain(expm1(mean), expm1(mean - reach), expm1(mean + reach), exp(mean) * error)


def prompts_needed(gain: Gain, num_prompts: int) -> int | None:
    """How many prompts would have an interval without 0 if the gain stayed as it is: the fewest n for which t(n - 1) s
    / sqrt(n) is below what the error of times leaves of the gain, with the deviation s of single prompts from the
    standard error of these. None if no number is known: a gain within the error of times, or of a single prompt.
    """
    margin = gain.value**2 - (_NORMAL * gain.times_error) ** 2
    if gain.standard_error is None or margin <= 0:
        return None
    deviation = gain.standard_error * num_prompts / sqrt(num_prompts - 1)
    squared = deviation**2 / margin
    num = max(MIN_PROMPTS, ceil(float(ndtri(0.975)) ** 2 * squared))
    while float(stdtrit(num - 1, 0.975)) ** 2 * squared >= num:
        num += 1
    return num


MORE_PROMPTS = "raise decode.num_test, or add prompts if the set has no more"
"""What settles a difference within noise."""


def shortage(gain: Gain, num_prompts: int, *, remedy: str = MORE_PROMPTS) -> str:
    """Why a gain of fewer than `MIN_PROMPTS` prompts has no interval, and what would settle it."""
    subject = f"{num_prompts} test prompts are" if num_prompts > 1 else "1 test prompt is"
    reason = f"{subject} too few for an interval (at least {MIN_PROMPTS} are needed)"
    needed = prompts_needed(gain, num_prompts)
    if needed is None:
        return f"{reason}: {remedy}"
    return f"{reason}; {prompts_text(needed)} would settle this lead of {gain.words}: {remedy}"


def doubt(gain: Gain, num_prompts: int, *, lead: str = "it", remedy: str = MORE_PROMPTS) -> str:
    """What would settle a gain that noise hides, as a sentence without its full stop; empty if nothing hides it. `lead`
    names the gain, and `remedy` is how to get more prompts.
    """
    if gain.low is None:
        return shortage(gain, num_prompts, remedy=remedy)
    is_same = gain.low == gain.high == 0
    if gain.is_above_noise or gain.is_below_noise or is_same:
        return ""
    needed = prompts_needed(gain, num_prompts)
    if needed is None:
        return f"more prompts cannot settle {lead}: it is within the error of the times (`acceptance-heads costs`)"
    return f"{prompts_text(needed)} test prompts would settle {lead}: {remedy}"


def conclusion(name: str, gain: Gain, rival: str, num_prompts: int) -> str:
    """One comparison as a sentence without its full stop: which is faster, or what would settle it."""
    return "; ".join(filter(None, (comparison(name, gain, rival), doubt(gain, num_prompts))))


def comparison(name: str, gain: Gain, rival: str) -> str:
    """Which of two is faster, as a sentence without its full stop, or that noise hides it."""
    if gain.low is None:
        return f"{name} over {rival}: {gain.words}"
    if gain.is_above_noise:
        return f"{name} is faster than {rival} by more than noise, {gain.words}"
    if gain.is_below_noise:
        return f"{name} is slower than {rival} by more than noise, {gain.words}"
    if gain.low == gain.high == 0:
        return f"{name} and {rival} do the same"
    return f"{name} and {rival} differ by no more than noise, {gain.words}"


def leads(gains: Mapping[str, Gain]) -> str:
    """The gains over several rivals, by name: +20.1 % (17.2, 23.0) over a, +3.0 % (1.0, 5.0) over b."""
    return ", ".join(f"{gain.words} over {rival}" for rival, gain in gains.items())


def prompts_text(num_prompts: int) -> str:
    """A number of prompts to two digits: 137 is "about 140"."""
    if num_prompts > MOST_PROMPTS:
        return f"more than {MOST_PROMPTS:,}"
    step = 10 ** max(0, len(str(num_prompts)) - 2)
    return f"about {ceil(num_prompts / step) * step:,}"


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

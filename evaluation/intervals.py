"""How sure a ratio of throughputs is: the paired bootstrap of the project.

Two ways of decoding write texts to the same prompts. How hard a prompt is moves both alike, so prompts are resampled in
pairs: the same draw of prompts for both, and the ratio is that of the totals.

    gain = (tokens / seconds of one) / (tokens / seconds of the base) - 1

`gain_over` is for seconds that a clock measured. `Resamples` is for predictions (law 4.9): a resample draws dev
prompts, on which every competitor chooses its setting anew, test prompts, on which it is judged, and the times, each
within its standard error; all competitors share the draws.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Generic, NamedTuple, TypeVar
from zlib import crc32

import numpy as np
from jaxtyping import Float, Int

Kept = TypeVar("Kept")
_RESAMPLES = 2000
_LEVELS = (2.5, 97.5)
"""Percentiles of a 95 % interval."""


@dataclass(frozen=True)
class Splits(Generic[Kept]):
    """What is kept of the dev prompts, which choose a setting, and the same of the test prompts, which judge it."""

    dev: Kept
    test: Kept

    def __iter__(self) -> Iterator[Kept]:
        return iter((self.dev, self.test))


class Spent(NamedTuple):
    """Tokens and seconds of each prompt."""

    tokens: Int[np.ndarray, " prompt"]
    """Emitted tokens."""
    seconds: Float[np.ndarray, " prompt"]

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

    @property
    def text(self) -> str:
        """The estimate in per cent, with its interval."""
        return f"{self.value:+.1%} ({self.low:+.1%}, {self.high:+.1%})"

    @property
    def words(self) -> str:
        """The same in whole per cent, as sentences have it: +20 % (17, 23)."""
        value, low, high = (round(100 * part) for part in (self.value, self.low, self.high))
        return f"{value:+d} % ({low}, {high})"


def gain_over(base: Spent, spent: Spent, *, seed: int = 0) -> Gain:
    """The gain of `spent` over `base`, which have the same prompts in the same order."""
    value = float(_gain(*base, *spent, axis=-1))
    if len(spent.tokens) < 2:
        return Gain(value, value, value, float("nan"))
    # no resample differs; the baseline itself is exactly 0
    if all(np.allclose(*pair) for pair in zip(base, spent, strict=True)):
        return Gain(value, value, value, 0.0)
    from scipy.stats import bootstrap  # a quarter of a second to import, which every command would start with

    resampled = bootstrap(
        (*base, *spent),
        _gain,
        paired=True,
        vectorized=True,
        n_resamples=_RESAMPLES,
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    interval = resampled.confidence_interval
    return Gain(value, float(interval.low), float(interval.high), float(resampled.standard_error))


def _gain(base_tokens: np.ndarray, base_s: np.ndarray, tokens: np.ndarray, seconds: np.ndarray, *, axis: int) -> Any:
    # The ratio of tokens apart: it is exactly 1 for texts that both share, so that rounding cannot move the ratio of
    # times.
    return base_s.sum(axis) / seconds.sum(axis) * (tokens.sum(axis) / base_tokens.sum(axis)) - 1


def median_ratio(slower: Iterable[float], faster: Iterable[float]) -> float:
    """How many times as fast, the median over prompts: a machine whose speed drifts slows both arms of a prompt
    alike.
    """
    return median(float(slow / fast) for slow, fast in zip(slower, faster, strict=True))


class TimeErrors(NamedTuple):
    """Relative standard errors of the times; given times have none."""

    drafting: float = 0.0
    verifying: float = 0.0
    stopping: Mapping[str, float] = {}
    """Relative errors of stops, by kind, and of plain steps (PLAIN) where these have one of their own."""


PLAIN = "plain"
"""Kind of the target's steps without speculation."""
CERTAIN = TimeErrors()


class Work(NamedTuple):
    """Tokens and seconds of each prompt under the settings of one policy, by law 4.9."""

    tokens: Int[np.ndarray, "setting prompt"]
    drafting_s: Float[np.ndarray, "setting prompt"]
    stopping_s: Float[np.ndarray, "setting prompt"]
    verifying_s: Float[np.ndarray, "setting prompt"]
    stop_kind: str

    def as_plain(self) -> "Work":
        """The same of a target alone whose steps have an error of their own, apart from verifications'."""
        return self._replace(
            stopping_s=self.stopping_s + self.verifying_s, verifying_s=0 * self.verifying_s, stop_kind=PLAIN
        )

    @property
    def seconds(self) -> Float[np.ndarray, "setting prompt"]:
        """Seconds of the generation, all forwards and stops together."""
        return self.drafting_s + self.stopping_s + self.verifying_s


class Resamples:
    """Draws of prompts and times that all competitors share."""

    def __init__(
        self,
        num_dev: int,
        num_test: int,
        errors: TimeErrors,
        *,
        num_home: int = 0,
        num: int = _RESAMPLES,
        seed: int = 0,
    ) -> None:
        """Args:
        num_dev: prompts.
        num_test: prompts.
        errors: of the times.
        num_home: dev prompts of another set, on which competitors that travelled were chosen.
        num: of the resamples.
        seed: of the draws.
        """
        generator = np.random.default_rng(seed)
        self._weights = [_weights(generator, count, num) for count in (num_dev, num_test)]
        self._drafting, self._verifying = (_factors(generator, error, num) for error in errors[:2])
        # by name, so that a kind's draws do not depend on which others there are
        self._stopping = {
            kind: _factors(np.random.default_rng((seed, crc32(kind.encode()))), error, num)
            for kind, error in errors.stopping.items()
        }
        self._home = _weights(np.random.default_rng((seed, num_home)), num_home, num) if num_home else None

    def throughput(
        self, competitors: Sequence[Splits[Work]], *, is_from_home: bool = False
    ) -> Float[np.ndarray, " resample"]:
        """Tokens per second on the test prompts of each resample, of the competitor and setting that its dev prompts
        choose.

        Args:
            competitors: that compete on dev.
            is_from_home: their dev prompts are those of the home set.
        """
        dev = self._home if is_from_home else self._weights[0]
        assert dev is not None, "num_home was not given"
        rows = np.arange(len(self._drafting))
        best, reached = np.full(len(rows), -np.inf), np.zeros(len(rows))
        for competitor in competitors:
            on_dev = self._of_all(competitor.dev, dev)
            chosen = on_dev.argmax(1)
            wins = on_dev[rows, chosen] > best
            best = np.where(wins, on_dev[rows, chosen], best)
            reached = np.where(wins, self._of_all(competitor.test, self._weights[1])[rows, chosen], reached)
        return reached

    def _of_all(
        self, work: Work, weights: Float[np.ndarray, "resample prompt"]
    ) -> Float[np.ndarray, "resample setting"]:
        drafting, stopping, verifying = (
            weights @ seconds.T for seconds in (work.drafting_s, work.stopping_s, work.verifying_s)
        )
        stops = self._stopping.get(work.stop_kind, 1.0)
        seconds = drafting * self._drafting + stopping * stops + verifying * self._verifying
        return np.asarray(weights @ work.tokens.T / seconds)


def gain_of(value: float, base: Float[np.ndarray, " resample"], reached: Float[np.ndarray, " resample"]) -> Gain:
    """The gain `value` with the interval that the throughputs of both in the same resamples give."""
    gains = reached / base - 1
    low, high = np.percentile(gains, _LEVELS)
    return Gain(value, min(value, float(low)), max(value, float(high)), float(gains.std(ddof=1)))


def _weights(generator: np.random.Generator, count: int, num: int) -> Float[np.ndarray, "resample prompt"]:
    """How often each prompt is drawn."""
    return generator.multinomial(count, np.full(count, 1 / count), num).astype(np.float64)


def _factors(generator: np.random.Generator, error: float, num: int) -> Float[np.ndarray, "resample 1"]:
    """Factor of a time in each resample; at least a tenth, since no time is negative."""
    return np.maximum(0.1, 1.0 + error * generator.standard_normal((num, 1)))

"""Law 4.9 (SpecDec++, arXiv 2405.19715, Eq. 2.1-2.3, and what a stop costs): what rounds cost in seconds.

    T = (t_draft + t_stop) * num_draft_forwards + sum over rounds of t_target(k)       k: tokens drafted in the round
    throughput = N / T                        speed-up over the target alone = throughput * t_target(0)

Times are two curves, which batches use as they are (law 4.13): a draft step of n sequences, and a verification of m
tokens. For one sequence t_draft is the first at 1, and t_target(k) is the second at 1 + k.

A hierarchy pays t_micro + t_stop for each forward of the level below its draft, too.

t_stop is what a policy's signals and heads add to a draft step; it depends on the policy's `stop_kind` alone. With
t_stop = 0 and t_target(k) = t_target this is the paper's T = t_draft N_draft + t_target N_target, and its latency per
token is t_draft + t_draft * (discard rate) + (t_target - t_draft) * (verification rate). Verification is not free
everywhere, so t_target may grow with k. A DSpark draft's round has one forward, of a whole block, whatever k is.

Measured times have errors, relative to the pace of the machine: a factor that all times share changes no gain.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import hypot
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from decode.policies.base import JOINT
from decode.policies.batch import BatchCosts, Curve
from evaluation.gain import Throughput
from evaluation.played import Array, Played
from evaluation.regression import least_absolute

MEASURED = "measured"
"""Origin of times that were measured on this machine."""
RECORDED = "recorded"
"""Origin of times that a published trace brought along."""
LARGEST_ERROR = 0.1
"""Times with a larger relative error are measured again: an error of a tenth of a draft step moves a gain by up to five
points, more than policies differ by.
"""
LINE = ("t_draft_s", "t_target_s", "t_verify_s", "t_start_s")
"""The parameters of `decode.policies.auto.Auto` that are times."""
_NUM_SAMPLES = 100
"""Draws of the errors of times."""


class StopShares(NamedTuple):
    """t_stop / t_draft of each kind of stop, where times are not measured but given or a ratio."""

    origin: str
    of: Mapping[str, float]


class TimeErrors(NamedTuple):
    """Standard errors of the times; given times have none."""

    drafting: float = 0.0
    """Relative, of t_draft."""
    verifying: tuple[float, ...] = ()
    """Relative, of t_target(k) for k = 0, 1, …"""
    stopping: Mapping[str, float] = {}
    """Of each kind of stop, in draft steps: a large part of a tiny stop changes nothing."""

    @property
    def largest(self) -> float:
        """The largest of the errors that matter; of t_target(k) the median over k."""
        verifying = float(np.median(self.verifying)) if self.verifying else 0.0
        return max(self.drafting, verifying, *self.stopping.values())


NO_STOPS = StopShares("stops free", {})
CERTAIN = TimeErrors()


@dataclass(frozen=True)
class Times:
    """Times of one pair on one machine."""

    draft: Curve
    """Seconds of one draft step of a fixed length, by the number of sequences."""
    target: Curve
    """Seconds of one verification by the number of tokens that it reads, those drafted and one more per sequence."""
    origin: str = "given"
    """given, measured, fitted, or a ratio."""
    t_stop_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds that each `Policy.stop_kind` adds to a draft step."""
    stop_origin: str = NO_STOPS.origin
    elsewhere: StopShares = NO_STOPS
    """Stops at other ratios."""
    errors: TimeErrors = CERTAIN
    t_micro_s: float = 0.0
    """Seconds of one forward of the level below the draft, in a hierarchy."""

    @classmethod
    def with_shares(cls, draft: Curve, target: Curve, origin: str, shares: StopShares) -> "Times":
        """Times whose stops have these shares of a draft step, here and at other ratios."""
        step_s = float(draft(1))
        t_stop_s = {kind: share * step_s for kind, share in shares.of.items()}
        return cls(draft, target, origin, t_stop_s, shares.origin, shares)

    @cached_property
    def t_draft_s(self) -> float:
        """Seconds of one draft step of one sequence."""
        return float(self.draft(1))

    @cached_property
    def alone_s(self) -> float:
        """t_target(0): seconds of a target forward without a draft."""
        return float(self.target(1))

    @property
    def is_flat(self) -> bool:
        """Whether verifying drafted tokens takes no time beyond a plain target forward."""
        return len(set(self.target.seconds)) == 1

    @property
    def ratio(self) -> float:
        """t_target(0) / t_draft."""
        return self.alone_s / self.t_draft_s

    @property
    def title(self) -> str:
        """In titles of tables and plots: the ratio, origins, and the largest error of the measured times."""
        error = self.errors.largest
        precision = f"; times ± {100 * error:.0f} %" if error else ""
        if error > LARGEST_ERROR:
            precision = "; these times are uncertain: measure them again with `acceptance-heads costs --again`"
        return f"t_target/t_draft = {self.ratio:.2f}, {self.origin}; {self.stop_origin}{precision}"

    @property
    def slug(self) -> str:
        """In names of files: here, or the ratio with every digit, so that no two share one."""
        return f"ratio-{self.ratio!r}" if self.origin.startswith("ratio") else "here"

    @property
    def where(self) -> str:
        """The first words of a sentence."""
        settings = {"measured": "On this machine", "ratio": "On other hardware", RECORDED: "At the times of the record"}
        given = "At the times given"
        setting = next((words for origin, words in settings.items() if self.origin.startswith(origin)), given)
        error = hypot(self.errors.drafting, *self.errors.verifying[:1])
        uncertainty = f" (± {error:.1%})" if error else ""
        free = " however many tokens it verifies" if self.is_flat else ""
        return f"{setting}, where a target forward costs {self.ratio:.1f}{uncertainty} draft forwards{free}"

    @property
    def caveat(self) -> str:
        """What one number for the target's time implies, in a sentence; empty where there is a curve."""
        if not self.is_flat or self.origin.startswith((MEASURED, RECORDED)):
            return ""
        return (
            "The target's time is one number, so verifying drafted tokens counts as free; if it is not, give it by "
            "number of tokens: --decode.t_target_ms 1:2.5,2:3.2,9:4.1."
        )

    def with_ratio(self, ratio: float) -> "Times":
        """Other hardware: this target's time, constant in k, and a draft that is `ratio` times faster."""
        check_ratio(ratio)
        draft = Curve.line(self.alone_s / ratio)
        return self.with_shares(draft, Curve.line(self.alone_s), f"ratio {ratio:g}", self.elsewhere)

    def at_ratios(self, ratios: Iterable[float]) -> "list[Times]":
        """These times and those at other ratios, except where they are the same."""
        return [self, *(other for other in map(self.with_ratio, ratios) if not self._has_times_of(other))]

    def _has_times_of(self, other: "Times") -> bool:
        kinds = self.t_stop_s.keys() | other.t_stop_s.keys()
        times, others = (
            [times.t_draft_s, times.alone_s, *(times.t_stop_s.get(kind, 0.0) for kind in kinds)]
            for times in (self, other)
        )
        return self.is_flat and np.allclose(times, others, rtol=1e-9, atol=0.0)

    def stop_s(self, kind: str) -> float:
        """t_stop of a kind; where it was not measured as a whole, the sum of its parts."""
        return self.t_stop_s.get(kind, sum(self.t_stop_s.get(part, 0.0) for part in kind.split(JOINT)))

    def target_s(self, length: Int[Array, "..."]) -> Float[Array, "..."]:
        """t_target(k) of k drafted tokens."""
        return np.asarray(self.target(1 + length))

    def costs(self, stop_kind: str) -> BatchCosts:
        """The curves of law 4.13 for policies of one kind of stop, which is part of a draft step."""
        return BatchCosts(self.draft.plus(self.stop_s(stop_kind)), self.target)

    def throughput(self, replayed: Played) -> Throughput:
        """Tokens and seconds of every setting on every prompt."""
        return Throughput(replayed.per_prompt(replayed.counts.num_emitted), replayed.per_prompt(self.time_s(replayed)))

    def round_s(self, max_draft_length: int, *, has_blocks: bool = False) -> tuple[float, ...]:
        """Seconds of a round of 0, 1, … max_draft_length drafted tokens without stops; `has_blocks`: in one forward."""
        lengths = np.arange(max_draft_length + 1)
        forwards = np.minimum(lengths, 1) if has_blocks else lengths
        return tuple((self.t_draft_s * forwards + self.target_s(lengths)).tolist())

    def time_s(self, replayed: Played) -> Float[Array, "setting row"]:
        """T of every setting on every row."""
        per_round = self.target_s(np.arange(replayed.lengths.shape[-1]))
        step_s = self.t_draft_s + self.stop_s(replayed.stop_kind)
        micro_s = self.t_micro_s + self.stop_s(replayed.micro_stop_kind)
        drafting_s = step_s * replayed.counts.num_draft_forwards + micro_s * replayed.counts.num_micro_forwards
        return drafting_s + replayed.lengths @ per_round

    def tokens_per_s(self, replayed: Played) -> Float[Array, " setting"]:
        """Throughput of every setting, all prompts together."""
        return replayed.counts.num_emitted.sum(-1) / self.time_s(replayed).sum(-1)

    @cached_property
    def samples(self) -> "list[Times]":
        """These times at random errors, always the same ones; none where times have no errors."""
        errors = self.errors
        if not any((errors.drafting, *errors.verifying, *errors.stopping.values())):
            return []
        generator = np.random.default_rng(0)
        return [self.sampled(generator) for _ in range(_NUM_SAMPLES)]

    def sampled(self, generator: np.random.Generator) -> "Times":
        """These times with errors drawn from their distributions; stops stay at least 0."""
        errors = self.errors
        pace = float(np.exp(errors.drafting * generator.standard_normal()))
        num_points = len(self.target.seconds)
        verifying = np.zeros(num_points)
        verifying[: len(errors.verifying)] = errors.verifying[:num_points]
        target_s = np.array(self.target.seconds) * np.exp(verifying * generator.standard_normal(num_points))
        stops_s = {}
        for kind, seconds in self.t_stop_s.items():
            error_s = self.t_draft_s * errors.stopping.get(kind, 0.0)
            stops_s[kind] = max(0.0, seconds + error_s * float(generator.standard_normal()))
        draft = replace(self.draft, seconds=tuple(pace * seconds for seconds in self.draft.seconds))
        target = replace(self.target, seconds=tuple(target_s.tolist()))
        return replace(self, draft=draft, target=target, t_stop_s=stops_s)

    def line(self, stop_kind: str, longest: int, *, has_blocks: bool = False) -> dict[str, Any]:
        """Times as law 4.11 sees them, t_target(k) = t_target_s + (t_start_s + t_verify_s k where k > 0): the line that
        is closest to t_target(k) for 1 <= k <= longest, in absolute deviations weighted by 1 / k, since short drafts
        are more frequent; neither part of it below 0. t_draft_s includes the stop; with `has_blocks` it is 0, and both
        are part of t_start_s, since they are paid once a round.
        """
        lengths = np.arange(1, longest + 1)
        extra_s = np.maximum(0.0, self.target_s(lengths) - self.alone_s)
        start_s = float(extra_s[0])
        slope_s = 0.0
        if longest > 1 and extra_s.any():
            columns = np.column_stack([1 / lengths, np.ones(longest)])
            start_s, slope_s = least_absolute(columns, extra_s / lengths).tolist()
        step_s = self.t_draft_s + self.stop_s(stop_kind)
        if has_blocks:
            start_s += step_s
            step_s = 0.0
        return dict(zip(LINE, (step_s, self.alone_s, slope_s, start_s), strict=True))


def check_ratio(ratio: float) -> None:
    """Raise ValueError unless a ratio of times can be one."""
    if not 0 < ratio < float("inf"):
        raise ValueError(f"t_target / t_draft is {ratio}; it must be a positive number")


def curve_of(setting: str, given: int | float | str) -> Curve:
    """Seconds by number of tokens or sequences, of a number of milliseconds or of pairs such as 1:30,5:33: linear
    between pairs and beyond the last. ValueError, which names the `setting`, for anything else.
    """
    points = [part.partition(":") for part in str(given).split(",")]
    try:
        if len(points) == 1 and not points[0][1]:
            return Curve.line(float(points[0][0]) / 1e3)
        return Curve(*zip(*((int(number), float(ms) / 1e3) for number, _, ms in points), strict=True))
    except ValueError as error:
        raise ValueError(
            f"{setting} is {given}: {error}; give milliseconds of a forward, such as 4.5, or by number of tokens, such "
            "as 1:30,5:33"
        ) from error

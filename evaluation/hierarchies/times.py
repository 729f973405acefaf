"""What a hierarchy costs: HSDDW's two ratios and the cost model with three times.

    sigma  redundancy           1 - accepted / N_draft      share of the tokens handed to the target that it did not
                                accept
    eta    target utilisation   N_target / N                target forwards per emitted token, the verification rate

Both as the authors' program computes them (github.com/valexsyu/HSDDW, scripts/hir_sd_w_dy_wdw/redundency.py at
c8fed41): 1 - sum (accepted) / sum(gamma), and the number of verifications over the output length. The published 44.36 %
and 14.46 % fit: 1 / 0.1446 = 6.9 tokens per round, 5.9 of them accepted out of 5.9 / 0.5564 = 10.6 drafted, the window
being 10. Departure: gamma is here what the target was handed; for the configurations that do not loop the program
counts what micro and draft drew, rejected micro tokens included.

    T = (t_micro + t_stop) F_micro + (t_draft + t_stop) F_draft + t_target N_target    F: forwards (law 4.9)

fitted by non-negative least absolute deviations over generations of all arms (a stall of the machine moves no time),
drafting and verifying each by its own clock, the rounds that read the prompt left out. t_stop is the time of each kind
of stop, paid by the forwards of the models that a competitor stops (`Setting.stops`). A verifying forward counts like a
drafting one. R² is of the whole, stalls included: a low one says that the machine was not quiet, or that verification
grows with what it verifies.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float
from scipy.optimize import nnls

from decode.loop.counts import Counts
from evaluation.hierarchies.generations import Decoded

COUNTED = {
    "N": "num_emitted",
    "N_micro": "num_micro",
    "N_draft": "num_drafted",
    "N_target": "num_target",
    "F_micro": "num_micro_forwards",
    "F_draft": "num_draft_forwards",
}
"""Names that tables have for the counts of three models."""
_REWEIGHTINGS = 30
UNSTOPPED: Mapping[str, str] = {}


@dataclass(frozen=True, kw_only=True)
class TrioTimes:
    """Seconds per forward; or, with t_target_s = 1, in target forwards."""

    t_micro_s: float
    t_draft_s: float
    t_target_s: float
    t_stop_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds that each kind of stop adds to a forward."""
    r2: float | None = None
    """R² of the fit; None where the times were given."""

    def seconds(self, counts: Counts, stops: Mapping[str, str] = UNSTOPPED) -> float:
        """Seconds that the model predicts for these counts, with these stops (`Setting.stops`)."""
        return (
            self.t_micro_s * counts.num_micro_forwards
            + self.t_draft_s * counts.num_draft_forwards
            + self.t_target_s * counts.num_target
            + self.stops_s(counts, stops)
        )

    def stops_s(self, counts: Counts, stops: Mapping[str, str]) -> float:
        """The part of these seconds that stops take."""
        forwards = stopped_forwards(counts, stops)
        return float(sum(self.t_stop_s.get(kind, 0.0) * number for kind, number in forwards.items()))

    def speedup(self, counts: Counts, stops: Mapping[str, str] = UNSTOPPED) -> float:
        """Speed-up over the target alone, which takes t_target per token."""
        return counts.num_emitted * self.t_target_s / self.seconds(counts, stops)


def at_ratios(t_micro: float, t_draft: float, shares: Mapping[str, float]) -> TrioTimes:
    """TrioTimes in target forwards; `shares`: t_stop / t_draft of each kind of stop."""
    t_stop_s = {kind: share * t_draft for kind, share in shares.items()}
    return TrioTimes(t_micro_s=t_micro, t_draft_s=t_draft, t_target_s=1.0, t_stop_s=t_stop_s)


def stopped_forwards(counts: Counts, stops: Mapping[str, str]) -> dict[str, int]:
    """Kind of stop -> the forwards that pay it."""
    forwards: dict[str, int] = {}
    for level, kind in stops.items():
        number = counts.num_micro_forwards if level == "micro" else counts.num_draft_forwards
        forwards[kind] = forwards.get(kind, 0) + int(number)
    return forwards


def redundancy(counts: Counts) -> float:
    """sigma, the share of drafted tokens that are discarded; 0 where nothing was drafted."""
    return 1 - counts.num_accepted / counts.num_drafted if counts.num_drafted else 0.0


def target_utilisation(counts: Counts) -> float:
    """eta, the target's forwards per emitted token: N_target / N."""
    return counts.verification_rate


def swapped(counts: Counts) -> Counts:
    """The same counts with the draft's forwards booked as the micro's, for plain speculation with the micro."""
    return Counts(
        **{
            **vars(counts),
            "num_draft_forwards": 0,
            "num_micro_forwards": counts.num_draft_forwards,
            "num_micro": counts.num_drafted,
        }
    )


def break_even(hierarchy: Counts, plain: Counts, times: TrioTimes, stops: Mapping[str, str] = UNSTOPPED) -> float:
    """t_micro / t_draft below which the hierarchy is the faster one, at these t_draft and t_target; at most 0: never.

    From T_hierarchy / N = T_plain / N' solved for t_micro.

    Args:
        hierarchy: counts and seconds of drafting with the micro.
        plain: counts and seconds of drafting without it.
        times: t_draft_s and t_target_s; its t_micro_s is not read.
        stops: those of the hierarchy; plain speculation at a fixed length has none.
    """
    assert not plain.num_micro_forwards, "plain speculation with the draft has no micro forwards"
    rest_s = times.t_draft_s * hierarchy.num_draft_forwards + times.t_target_s * hierarchy.num_target
    rest_s += times.stops_s(hierarchy, stops)
    spare_s = times.seconds(plain) * hierarchy.num_emitted / plain.num_emitted - rest_s
    return float(spare_s / (hierarchy.num_micro_forwards * times.t_draft_s))


def fit_times(
    decoded: Sequence[Decoded], *, is_micro: Sequence[bool], stops: Sequence[Mapping[str, str]] | None = None
) -> TrioTimes:
    """The three times, and those of stops, that explain the measured seconds best.

    Args:
        decoded: generations of several arms, so that the three counts vary apart.
        is_micro: whether a generation's drafter was the micro alone.
        stops: the stops of each generation (`Setting.stops`); None: there are none.

    Raises:
        ValueError: fewer than four generations with a second round, or none that a model's time could be read from.
    """
    each_stops = [UNSTOPPED] * len(decoded) if stops is None else stops
    rows = [row for row in zip(decoded, is_micro, each_stops, strict=True) if row[0].later.num_target]
    pairs = [(generation, micro) for generation, micro, _ in rows]
    if len(pairs) < 4:
        raise ValueError(
            f"fitting three times needs at least 4 generations of several rounds, there are {len(pairs)}; raise "
            "decode.num_test"
        )
    forwards = np.array([_forwards(generation.later, micro) for generation, micro in pairs], dtype=np.float64)
    seconds = np.array([(generation.later_draft_s, generation.later_target_s) for generation, _ in pairs])
    stopped = [stopped_forwards(generation.later, of_setting) for generation, _, of_setting in rows]
    kinds = list(dict.fromkeys(kind for by_kind in stopped for kind in by_kind))
    stop_columns = np.array([[by_kind.get(kind, 0) for kind in kinds] for by_kind in stopped], dtype=np.float64)
    drafting = np.hstack([forwards[:, :2], stop_columns])
    t_micro_s, t_draft_s, *t_stop_s = least_absolute(drafting, seconds[:, 0])
    (t_target_s,) = least_absolute(forwards[:, 2:], seconds[:, 1])
    if not t_draft_s or not t_target_s:
        raise ValueError(
            f"{len(pairs)} generations give t_draft {t_draft_s:g} s and t_target {t_target_s:g} s; "
            "raise decode.num_dev and decode.num_test, or run on a quieter machine"
        )
    total = seconds.sum(1)
    residual = total - drafting @ [t_micro_s, t_draft_s, *t_stop_s] - forwards[:, 2] * t_target_s
    r2 = 1 - float(residual @ residual) / float(((total - total.mean()) ** 2).sum())
    return TrioTimes(
        t_micro_s=float(t_micro_s),
        t_draft_s=float(t_draft_s),
        t_target_s=float(t_target_s),
        t_stop_s=dict(zip(kinds, map(float, t_stop_s), strict=True)),
        r2=r2,
    )


def least_absolute(
    forwards: Float[np.ndarray, "generation model"], seconds: Float[np.ndarray, " generation"]
) -> Float[np.ndarray, " model"]:
    """argmin over times >= 0 of the sum of |seconds - forwards @ times|, by reweighted least squares."""
    weights = np.ones_like(seconds)
    for _ in range(_REWEIGHTINGS):
        times, _ = nnls(forwards * weights[:, None], seconds * weights)
        # Squares weighted by 1 / |residual| are absolute values; the floor keeps an exact fit from an infinite weight.
        weights = 1 / np.sqrt(np.maximum(np.abs(seconds - forwards @ times), 1e-4 * np.median(seconds) + 1e-12))
    return np.asarray(times)


def _forwards(counts: Counts, is_micro: bool) -> tuple[int, int, int]:
    """Forwards of the three models: (F_micro, F_draft, N_target)."""
    counts = swapped(counts) if is_micro else counts
    return int(counts.num_micro_forwards), int(counts.num_draft_forwards), int(counts.num_target)

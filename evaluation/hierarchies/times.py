"""The times of three models, and HSDDW's two ratios.

    T = (t_micro + t_stop) F_micro + (t_draft + t_stop) F_draft + t_target N_target    F: forwards (law 4.9)

The times are fitted by non-negative least absolute deviations over generations of all configurations (one stalled
generation changes no time): drafting and verifying each to its own clock, without the rounds that read the prompt. The
forwards of the models that a configuration stops pay the t_stop of that kind of stop. A verifying forward counts like a
drafting one. R² is of all seconds, stalls included: a low one says that the machine was busy, or that verification gets
slower with the number of tokens.

    sigma  redundancy           1 - accepted / N_draft      share of the tokens handed to the target that it rejected
    eta    target utilisation   N_target / N                target forwards per emitted token, the verification rate

Both as the authors' program computes them (github.com/valexsyu/HSDDW, scripts/hir_sd_w_dy_wdw/redundency.py at
c8fed41): 1 - sum (accepted) / sum(gamma), and the number of verifications over the output length. The published 44.36 %
and 14.46 % fit: 1 / 0.1446 = 6.9 tokens per round, 5.9 of them accepted out of 5.9 / 0.5564 = 10.6 drafted, the window
being 10. Departure: gamma is here the number of tokens handed to the target; for the configurations that do not loop
the program counts what micro and draft drew, rejected micro tokens included.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.optimize import nnls

from decode.loop.rounds import Counts
from evaluation.hierarchies.decoded import Run, attributed

_REWEIGHTINGS = 30
NO_STOPS: Mapping[str, str] = {}


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

    def seconds(self, counts: Counts, stops: Mapping[str, str] = NO_STOPS) -> Any:
        """Predicted seconds of these counts, numbers or arrays, with a configuration's stops."""
        stop_s = {level: self.t_stop_s.get(kind, 0.0) for level, kind in stops.items()}
        return (
            (self.t_micro_s + stop_s.get("micro", 0.0)) * counts.num_micro_forwards
            + (self.t_draft_s + stop_s.get("draft", 0.0)) * counts.num_draft_forwards
            + self.t_target_s * counts.num_target
        )

    def speedup(self, counts: Counts, stops: Mapping[str, str] = NO_STOPS) -> float:
        """Speed-up over the target alone, which takes t_target per token."""
        return float(counts.num_emitted * self.t_target_s / self.seconds(counts, stops))


def at_ratios(t_micro: float, t_draft: float, shares: Mapping[str, float]) -> TrioTimes:
    """Times in target forwards; `shares`: t_stop / t_draft of each kind of stop."""
    t_stop_s = {kind: share * t_draft for kind, share in shares.items()}
    return TrioTimes(t_micro_s=t_micro, t_draft_s=t_draft, t_target_s=1.0, t_stop_s=t_stop_s)


def redundancy(counts: Counts) -> float:
    """sigma, the share of drafted tokens that are discarded; 0 where nothing was drafted."""
    return 1 - counts.num_accepted / counts.num_drafted if counts.num_drafted else 0.0


def break_even(hierarchy: Counts, plain: Counts, times: TrioTimes, stops: Mapping[str, str] = NO_STOPS) -> float:
    """t_micro / t_draft below which the hierarchy is faster, at these t_draft and t_target; not above 0: never.

    From T_hierarchy / N = T_plain / N' solved for t_micro.

    Args:
        hierarchy: counts of drafting with the micro.
        plain: counts of drafting without it.
        times: t_draft_s and t_target_s; its t_micro_s is not read.
        stops: those of the hierarchy; plain speculation at a fixed length has none.
    """
    assert not plain.num_micro_forwards, "plain speculation with the draft has no micro forwards"
    without_micro_s = replace(times, t_micro_s=0.0).seconds(hierarchy, stops)
    spare_s = times.seconds(plain) * hierarchy.num_emitted / plain.num_emitted - without_micro_s
    return float(spare_s / (hierarchy.num_micro_forwards * times.t_draft_s))


def fit_times(runs: Sequence[Run]) -> TrioTimes:
    """The times of the three models and of stops that explain the measured seconds best.

    Args:
        runs: of several configurations, so that the three counts vary independently.

    Raises:
        ValueError: fewer than four generations with a second round, or none that a model's time could be read from.
    """
    kinds = list(dict.fromkeys(kind for run in runs for kind in run.configuration.stops.values()))
    rows: list[list[float]] = []
    for run in runs:
        later = [one for one in run.decoded if one.later.num_target]
        counts = attributed((one.later for one in later), run.configuration)
        forwards = {"micro": counts.num_micro_forwards, "draft": counts.num_draft_forwards}
        stopped = {kind: np.zeros(len(later)) for kind in kinds}
        for level, kind in run.configuration.stops.items():
            stopped[kind] += forwards[level]
        clock = [[one.later_target_s for one in later], [one.later_draft_s for one in later]]
        rows += np.column_stack([*forwards.values(), *stopped.values(), counts.num_target, *clock]).tolist()
    if len(rows) < 4:
        raise ValueError(
            f"fitting three times needs at least 4 generations of several rounds, there are {len(rows)}; raise "
            "decode.num_test"
        )
    *drafting, verifying, target_s, draft_s = np.array(rows).T
    step_s = least_absolute(np.column_stack(drafting), draft_s)
    (t_target_s,) = least_absolute(verifying[:, None], target_s)
    t_micro_s, t_draft_s, *t_stop_s = step_s.tolist()
    if not t_draft_s or not t_target_s:
        raise ValueError(
            f"{len(rows)} generations give t_draft {t_draft_s:g} s and t_target {t_target_s:g} s; "
            "raise decode.num_dev and decode.num_test, or run on a quieter machine"
        )
    total = draft_s + target_s
    residual = total - np.column_stack(drafting) @ step_s - verifying * t_target_s
    return TrioTimes(
        t_micro_s=t_micro_s,
        t_draft_s=t_draft_s,
        t_target_s=float(t_target_s),
        t_stop_s=dict(zip(kinds, t_stop_s, strict=True)),
        r2=1 - float(residual @ residual) / float(((total - total.mean()) ** 2).sum()),
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

"""What a hierarchy costs: HSDDW's two ratios and the cost model with three times.

    sigma  redundancy           1 - accepted / N_draft      share of the tokens handed to the target that it did not
                                accept
    eta    target utilisation   N_target / N                target forwards per emitted token, the verification rate

Both as the authors' program computes them (github.com/valexsyu/HSDDW, scripts/hir_sd_w_dy_wdw/redundency.py at
c8fed41): 1 - sum (accepted) / sum(gamma), and the number of verifications over the output length. The published 44.36 %
and 14.46 % fit: 1 / 0.1446 = 6.9 tokens per round, 5.9 of them accepted out of 5.9 / 0.5564 = 10.6 drafted, the window
being 10. Departure: gamma is here what the target was handed; for the configurations that do not loop the program
counts what micro and draft drew, rejected micro tokens included.

    T = t_micro F_micro + t_draft F_draft + t_target N_target            F: forwards (law 4.9 with a third time)

fitted by non-negative least absolute deviations over generations of all arms (a stall of the machine moves no time),
drafting and verifying each by its own clock, the rounds that read the prompt left out. What stops cost is in the
forwards that were timed, not charged apart. A verifying forward counts like a drafting one. R² is of the whole, stalls
included: a low one says that the machine was not quiet, or that verification grows with what it verifies.
"""

from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds per forward; or, with t_target_s = 1, in target forwards."""

    t_micro_s: float
    t_draft_s: float
    t_target_s: float
    r2: float | None = None
    """R² of the fit; None where the times were given."""

    def seconds(self, counts: Counts) -> float:
        """Seconds that the model predicts for these counts."""
        return (
            self.t_micro_s * counts.num_micro_forwards
            + self.t_draft_s * counts.num_draft_forwards
            + self.t_target_s * counts.num_target
        )

    def speedup(self, counts: Counts) -> float:
        """Speed-up over the target alone, which takes t_target per token."""
        return counts.num_emitted * self.t_target_s / self.seconds(counts)


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


def break_even(hierarchy: Counts, plain: Counts, times: Times) -> float:
    """t_micro / t_draft below which the hierarchy is the faster one, at these t_draft and t_target; at most 0: never.

    From T_hierarchy / N = T_plain / N' solved for t_micro.

    Args:
        hierarchy: counts and seconds of drafting with the micro.
        plain: counts and seconds of drafting without it.
        times: t_draft_s and t_target_s; its t_micro_s is not read.
    """
    assert not plain.num_micro_forwards, "plain speculation with the draft has no micro forwards"
    rest_s = times.t_draft_s * hierarchy.num_draft_forwards + times.t_target_s * hierarchy.num_target
    spare_s = times.seconds(plain) * hierarchy.num_emitted / plain.num_emitted - rest_s
    return float(spare_s / (hierarchy.num_micro_forwards * times.t_draft_s))


def fit_times(decoded: Sequence[Decoded], *, is_micro: Sequence[bool]) -> Times:
    """The three times that explain the measured seconds best.

    Args:
        decoded: generations of several arms, so that the three counts vary apart.
        is_micro: whether a generation's drafter was the micro alone.

    Raises:
        ValueError: fewer than four generations with a second round, or none that a model's time could be read from.
    """
    pairs = [
        (generation, micro) for generation, micro in zip(decoded, is_micro, strict=True) if generation.later.num_target
    ]
    if len(pairs) < 4:
        raise ValueError(
            f"fitting three times needs at least 4 generations of several rounds, there are {len(pairs)}; raise "
            "decode.num_test"
        )
    forwards = np.array([_forwards(generation.later, micro) for generation, micro in pairs], dtype=np.float64)
    seconds = np.array([(generation.later_draft_s, generation.later_target_s) for generation, _ in pairs])
    t_micro_s, t_draft_s = least_absolute(forwards[:, :2], seconds[:, 0])
    (t_target_s,) = least_absolute(forwards[:, 2:], seconds[:, 1])
    if not t_draft_s or not t_target_s:
        raise ValueError(
            f"{len(pairs)} generations give t_draft {t_draft_s:g} s and t_target {t_target_s:g} s; "
            "raise decode.num_dev and decode.num_test, or run on a quieter machine"
        )
    total = seconds.sum(1)
    residual = total - forwards @ [t_micro_s, t_draft_s, t_target_s]
    r2 = 1 - float(residual @ residual) / float(((total - total.mean()) ** 2).sum())
    return Times(t_micro_s=float(t_micro_s), t_draft_s=float(t_draft_s), t_target_s=float(t_target_s), r2=r2)


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

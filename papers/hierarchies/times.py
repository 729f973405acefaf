"""The times of three models, and HSDDW's two ratios.

    T = (t_micro + t_stop) F_micro + (t_draft + t_stop) F_draft + t_target N_target    F: forwards (law 4.9)

The times are fitted by non-negative least absolute deviations over generations of all competitors, so that one stalled
generation changes no time: drafting and verifying each to its own clock, without the rounds that read the prompt. A
verifying forward counts like a drafting one. A low R² says that the machine was busy, or that verification gets slower
with the number of tokens.

    sigma  redundancy           1 - accepted / N_draft      share of the tokens handed to the target that it rejected
    eta    target utilisation   N_target / N                target forwards per emitted token, the verification rate

Both as the authors' program computes them (github.com/valexsyu/HSDDW, scripts/hir_sd_w_dy_wdw/redundency.py at
c8fed41). Departure: for the configurations that do not loop the program also counts rejected micro tokens as handed on.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import Float

from decode.loop.counts import Counts
from decode.policies.batch import Curve
from evaluation.played import Array, Played
from evaluation.regression import least_absolute
from evaluation.times import Times
from papers.hierarchies.decoded import Decoded

Columns = Callable[[Played], Sequence[Array]]
"""The counts, [setting, prompt], that seconds are explained by."""


def at_ratios(t_micro: float, t_draft: float, shares: Mapping[str, float]) -> Times:
    """Times in target forwards; `shares`: t_stop / t_draft of each kind of stop."""
    return Times(
        Curve.line(t_draft),
        Curve.line(1.0),
        t_stop_s={kind: share * t_draft for kind, share in shares.items()},
        t_micro_s=t_micro,
    )


def redundancy(counts: Counts) -> float:
    """sigma, the share of drafted tokens that are discarded; 0 where nothing was drafted."""
    return 1 - counts.num_accepted / counts.num_drafted if counts.num_drafted else 0.0


def break_even(hierarchy: Played, plain: Played, times: Times) -> float:
    """t_micro / t_draft below which a hierarchy is faster than drafting without the micro; not above 0: never.

    From T_hierarchy / N = T_plain / N' at these t_draft and t_target, solved for t_micro.
    """
    three = hierarchy.total()
    two = plain.total()
    three_s, two_s = (float(replace(times, t_micro_s=0.0).time_s(played).sum()) for played in (hierarchy, plain))
    spare_s = two_s * three.num_emitted / two.num_emitted - three_s
    return float(spare_s / (three.num_micro_forwards * times.t_draft_s))


def fit_times(decoded: Sequence[Decoded]) -> tuple[Times, float]:
    """The times of the three models and of stops that explain the measured seconds best, and R²; of several
    competitors, so that the three counts vary independently. ValueError for no generation with a second round, or none
    that a model's time could be read from.
    """
    stops = (kind for one in decoded for kind in (one.played.micro_stop_kind, one.played.stop_kind))
    kinds = list(dict.fromkeys(filter(None, stops)))

    def drafting(later: Played) -> list[Array]:
        micro = later.counts.num_micro_forwards
        draft = later.counts.num_draft_forwards
        stopped = (micro * (kind == later.micro_stop_kind) + draft * (kind == later.stop_kind) for kind in kinds)
        return [micro, draft, *stopped]

    step_s, (t_target_s,), r2 = fitted_seconds(decoded, drafting, lambda later: [later.counts.num_target])
    t_micro_s, t_draft_s, *t_stop_s = step_s
    if not t_draft_s or not t_target_s:
        raise ValueError(
            f"the generations give t_draft {t_draft_s:g} s and t_target {t_target_s:g} s; "
            "raise decode.num_dev and decode.num_test, or run on a quieter machine"
        )
    times = Times(
        Curve.line(t_draft_s),
        Curve.line(t_target_s),
        "fitted",
        t_stop_s=dict(zip(kinds, t_stop_s, strict=True)),
        t_micro_s=t_micro_s,
    )
    return times, r2


def fitted_seconds(
    decoded: Sequence[Decoded], drafting: Columns, verifying: Columns
) -> tuple[list[float], list[float], float]:
    """(seconds of each count of drafting, of each of verifying, R²), over generations with a second round; ValueError
    if there is none.
    """
    every = [member.played.later for member in decoded if member.played.later is not None]
    has_second = np.concatenate([later.counts.num_target.ravel() > 0 for later in every])
    if not has_second.any():
        raise ValueError("no generation has a second round to fit times to; raise decode.max_new_tokens")

    def rows(columns: Iterable[Sequence[Array]]) -> Float[np.ndarray, "generation column"]:
        parts = [np.column_stack([*map(np.ravel, of_member)]) for of_member in columns]
        return np.concatenate(parts).astype(float)[has_second]

    seconds = [later.seconds for later in every if later.seconds is not None]
    draft_counts = rows(drafting(later) for later in every)
    target_counts = rows(verifying(later) for later in every)
    draft_s, target_s = rows([of["drafting_s"], of["verifying_s"]] for of in seconds).T
    step_s = least_absolute(draft_counts, draft_s)
    verify_s = least_absolute(target_counts, target_s)
    total = draft_s + target_s
    residual = total - draft_counts @ step_s - target_counts @ verify_s
    r2 = 1 - float(residual @ residual) / float(((total - total.mean()) ** 2).sum() or 1.0)
    return step_s.tolist(), verify_s.tolist(), r2

"""The tables of `evaluation hierarchy`: HSDDW's Table 2 (ablation), its Table 4 (sigma, eta, speed-up), and where a third level pays."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from rich.table import Table

from evaluation.console import right
from evaluation.hierarchies.gain import MICRO_RATIOS, paying
from evaluation.hierarchies.runs import Run
from evaluation.hierarchies.times import Times, break_even, redundancy, target_utilisation
from evaluation.intervals import gain_over

_ABLATION = {
    "sd": (False, False),
    "sd + pre-verify": (True, False),
    "sd + self-verify": (False, True),
    "sd + pre-verify + self-verify": (True, True),
    "HSDDW": (True, True),
}
"""contender -> (pre-verify, self-verify), the rows of Table 2; HSDDW also repeats its inner rounds."""
_COUNTS = {
    "N": "num_emitted",
    "N_micro": "num_micro",
    "N_draft": "num_drafted",
    "N_target": "num_target",
    "F_micro": "num_micro_forwards",
    "F_draft": "num_draft_forwards",
}
_QUIET = 0.9
"""R² of the fit below which wall clock is not to be trusted."""


def arms_frame(runs: Sequence[Run], times: Times, *, given: Times) -> pd.DataFrame:
    """One row per contender: counts of three models, sigma, eta, measured and modelled speed-ups. The first run is the target alone."""
    plain = max((run for run in runs if run.contender.name == "sd"), key=lambda run: times.speedup(run.counts))
    return pd.DataFrame([_row(run, times, alone=runs[0], plain=plain, given=given) for run in runs])


def ablation_table(frame: pd.DataFrame) -> Table:
    """HSDDW's Table 2."""
    names = ("speed-up measured", "s.e.", "modelled", "at given ratios")
    table = Table("", "pre-verify", "self-verify", *right(*names), title="ablation (HSDDW, Table 2)")
    rows = frame.set_index("arm")
    for name, (pre, own) in _ABLATION.items():
        row = rows.loc[name]
        speeds = (f"{row[key]:.3f}" for key in ("speedup", "speedup_se", "speedup_modelled", "speedup_at_ratios"))
        table.add_row(name, "x" if pre else "", "x" if own else "", *speeds)
    return table


def arms_table(frame: pd.DataFrame, times: Times, *, given: Times, title: str) -> Table:
    """HSDDW's Table 4, for every contender."""
    t_micro, t_draft, t_target = (1e3 * time for time in (times.t_micro_s, times.t_draft_s, times.t_target_s))
    title = (
        f"{title}; fitted t_micro {t_micro:.2f}, t_draft {t_draft:.2f}, t_target {t_target:.2f} ms per forward, "
        f"R² {times.r2:.3f}; given: {given.t_micro_s:g} : {given.t_draft_s:g} : 1"
    )
    names = (*_COUNTS, "sigma %", "eta %", "tok/s", "speed-up", "s.e.", "modelled", "given", "pays below")
    caption = (
        "N: tokens, F: forwards. Speed-up over the target alone, measured (s.e.: bootstrap over prompts), and from the counts at fitted "
        f"and at given times. Pays below: of t_micro / t_draft, here {times.t_micro_s / times.t_draft_s:.2f}, against sd, from the counts"
    )
    table = Table("drafter", "setting", *right(*names), title=title, caption=caption)
    for row in frame.to_dict("records"):
        rates = (f"{100 * row[key]:.2f}" for key in ("redundancy", "target_utilisation"))
        speeds = (f"{row[key]:.3f}" for key in ("speedup", "speedup_se", "speedup_modelled", "speedup_at_ratios"))
        counts = (str(row[key]) for key in _COUNTS.values())
        table.add_row(row["arm"], row["setting"], *counts, *rates, f"{row['tokens_per_s']:.0f}", *speeds, _below(row["break_even"]))
    return table


def gain_table(gain: pd.DataFrame) -> Table:
    """Gain of the best hierarchy over the best plain speculation, in per cent, and where it is positive."""
    title = "best hierarchy over best plain speculation in per cent (s.e.), modelled, each at its best setting; columns: t_micro / t_draft"
    table = Table("t_draft / t_target", *right(*(f"{ratio:g}" for ratio in MICRO_RATIOS)), "pays at", title=title)
    for draft_ratio, group in gain.groupby("draft_ratio"):
        shown = group.set_index("micro_ratio")
        cells = (f"{100 * shown['gain'][ratio]:+.1f} ({100 * shown['standard_error'][ratio]:.1f})" for ratio in MICRO_RATIOS)
        table.add_row(f"{draft_ratio:.3g}" + (" (here)" if group["is_here"].any() else ""), *cells, paying(group))
    return table


def verdict(runs: Sequence[Run], gain: pd.DataFrame, *, times: Times) -> str:
    """What the figures say, in words."""
    plain, hierarchical = (
        max((run for run in runs if run.contender.num_levels == levels), key=lambda run: run.measured.tokens_per_s) for levels in (2, 3)
    )
    here = gain_over(plain.measured, hierarchical.measured)
    draft_ratio, micro_ratio = times.t_draft_s / times.t_target_s, times.t_micro_s / times.t_draft_s
    lines = [
        f"Measured here (t_draft / t_target = {draft_ratio:.3f}, t_micro / t_draft = {micro_ratio:.2f}): the best hierarchy, "
        f"{hierarchical.name}, is {100 * here.value:+.1f} % (s.e. {100 * here.standard_error:.1f}) "
        f"against the best plain speculation, {plain.name}."
    ]
    for ratio, group in gain.groupby("draft_ratio"):
        name = "as here" if group["is_here"].any() else f"{ratio:g}"
        lines.append(
            f"From the counts, with t_draft / t_target {name}, a third level pays at t_micro / t_draft: {paying(group)}; "
            f"best gain {100 * group['gain'].max():+.1f} %."
        )
    if times.r2 is not None and times.r2 < _QUIET:
        lines.append(
            f"The three times explain only R² = {times.r2:.2f} of the wall clock: this machine was not quiet. Trust what comes from the "
            "counts at given ratios; for measured speed-ups delete the folder and run again."
        )
    return "\n".join(lines)


def _row(run: Run, times: Times, *, alone: Run, plain: Run, given: Times) -> dict[str, object]:
    counts = run.counts
    has_both = bool(counts.num_micro_forwards and counts.num_draft_forwards)
    return {
        "arm": run.contender.name,
        "setting": run.label,
        "num_levels": run.contender.num_levels,
        **{key: int(value) for key, value in vars(counts).items()},
        "redundancy": redundancy(counts),
        "target_utilisation": target_utilisation(counts),
        "acceptance_length": counts.acceptance_length,
        "tokens_per_s": run.measured.tokens_per_s,
        "speedup": run.measured.tokens_per_s / alone.measured.tokens_per_s,
        "speedup_se": gain_over(alone.measured, run.measured).standard_error,
        "speedup_modelled": times.speedup(counts),
        "speedup_at_ratios": given.speedup(counts),
        "break_even": break_even(counts, plain.counts, times) if has_both else None,
    }


def _below(value: float | None) -> str:
    """A break-even in words."""
    if value is None or np.isnan(value):
        return ""
    return f"{value:.2f}" if value > 0 else "never"

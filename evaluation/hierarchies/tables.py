"""The tables of `evaluation hierarchy`: HSDDW's Table 2 (ablation), its Table 4 (sigma, eta, speed-up), and where a
third level pays.

A third level pays where the best hierarchy beats the best plain speculation (draft or micro alone), modelled from
counts at many times. Counts do not depend on times, so one run on dev answers for every machine: each side is at its
best setting for the times in question.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from evaluation.figure import GREY, Plot, figure_of, plot_of
from evaluation.gain import gain_over
from evaluation.hierarchies.runs import Candidate
from evaluation.hierarchies.times import COUNTED, TrioTimes, at_ratios, break_even, redundancy, target_utilisation
from evaluation.table import Table

_ABLATION = {
    "sd": (False, False),
    "sd + pre-verify": (True, False),
    "sd + self-verify": (False, True),
    "sd + pre-verify + self-verify": (True, True),
    "HSDDW": (True, True),
}
"""competitor -> (pre-verify, self-verify), the rows of Table 2; HSDDW also repeats its inner rounds."""
_QUIET = 0.9
"""R² of the fit below which wall clock is not to be trusted."""
MICRO_RATIOS = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5)
"""t_micro / t_draft, the columns of the table."""
_DRAFT_RATIOS = (0.05, 0.1, 0.2, 0.4)
"""t_draft / t_target."""
_FINE = tuple(sorted({*(round(0.01 * step, 2) for step in range(101)), *MICRO_RATIOS}))


def arms_frame(runs: Sequence[Candidate], times: TrioTimes, *, given: TrioTimes) -> pd.DataFrame:
    """One row per competitor: counts of three models, sigma, eta, measured and modelled speed-ups. The first run is the
    target alone.
    """
    plain = max((run for run in runs if run.competitor.name == "sd"), key=lambda run: run.speedup(times))
    return pd.DataFrame([_row(run, times, alone=runs[0], plain=plain, given=given) for run in runs])


def ablation_sheet(frame: pd.DataFrame) -> Table:
    """HSDDW's Table 2."""
    rows = frame.set_index("arm")
    cells = [
        {
            "": name,
            "pre-verify": "x" if pre else "",
            "self-verify": "x" if self_verified else "",
            **_speed_ups(rows.loc[name].to_dict()),
        }
        for name, (pre, self_verified) in _ABLATION.items()
    ]
    return Table("ablation (HSDDW, Table 2)", cells, names=3)


def arms_sheet(frame: pd.DataFrame, times: TrioTimes, *, given: TrioTimes, title: str) -> Table:
    """HSDDW's Table 4, for every competitor."""
    t_micro, t_draft, t_target = (1e3 * time for time in (times.t_micro_s, times.t_draft_s, times.t_target_s))
    title = (
        f"{title}; fitted t_micro {t_micro:.2f}, t_draft {t_draft:.2f}, t_target {t_target:.2f} ms per forward, "
        f"R² {times.r2:.3f}; given: {given.t_micro_s:g} : {given.t_draft_s:g} : 1"
    )
    note = (
        "N: tokens, F: forwards. Speed-up over the target alone, measured (s.e.: bootstrap over prompts), and from "
        "the counts at fitted "
        f"and at given times. Pays below: of t_micro / t_draft, here {times.t_micro_s / times.t_draft_s:.2f}, against "
        "sd, from the counts"
    )
    rows = [
        {
            "drafter": row["arm"],
            "setting": row["setting"],
            **{heading: str(row[name]) for heading, name in COUNTED.items()},
            "sigma %": f"{100 * row['redundancy']:.2f}",
            "eta %": f"{100 * row['target_utilisation']:.2f}",
            "tok/s": f"{row['tokens_per_s']:.0f}",
            **_speed_ups(row),
            "pays below": _below(row["break_even"]),
        }
        for row in frame.to_dict("records")
    ]
    return Table(title, rows, note, names=2)


def gain_sheet(gain: pd.DataFrame, *, split: str) -> Table:
    """Gain of the best hierarchy over the best plain speculation, in per cent, and where it is positive; `split` is
    that of the prompts that choose and report.
    """
    rows = []
    for draft_ratio, group in gain.groupby("draft_ratio"):
        shown = group.set_index("micro_ratio")
        here = " (here)" if group["is_here"].any() else ""
        gains = {
            f"{ratio:g}": f"{100 * shown['gain'][ratio]:+.1f} ({100 * shown['standard_error'][ratio]:.1f})"
            for ratio in MICRO_RATIOS
        }
        rows.append({"t_draft / t_target": f"{draft_ratio:.3g}{here}", **gains, "pays at": paying(group)})
    title = (
        "best hierarchy over best plain speculation in per cent (s.e.), modelled, each at its best setting; columns: "
        "t_micro / t_draft"
    )
    return Table(title, rows, f"both sides are chosen on the prompts that they are reported on, the {split} prompts")


def _speed_ups(row: Mapping[Any, Any]) -> dict[str, str]:
    """The row's speed-ups over the target alone."""
    names = {"speed-up": "speedup", "s.e.": "speedup_se", "modelled": "speedup_modelled", "given": "speedup_at_ratios"}
    return {heading: f"{row[name]:.3f}" for heading, name in names.items()}


def third_level_verdict(
    runs: Sequence[Candidate], dev: Sequence[Candidate], gain: pd.DataFrame, *, times: TrioTimes
) -> str:
    """The result of the figures in words: whether a third level pays. Dev chooses both sides, test reports them."""
    plain, hierarchical = (_chosen(runs, dev or runs, levels, times) for levels in (2, 3))
    here = gain_over(plain.measured, hierarchical.measured)
    chosen_on = "chosen on dev" if dev else "chosen on these very prompts"
    draft_ratio, micro_ratio = times.t_draft_s / times.t_target_s, times.t_micro_s / times.t_draft_s
    lines = [
        f"Measured here (t_draft / t_target = {draft_ratio:.3f}, t_micro / t_draft = {micro_ratio:.2f}): the best "
        "hierarchy, "
        f"{hierarchical.name}, is {100 * here.value:+.1f} % (s.e. {100 * here.standard_error:.1f}) "
        f"against the best plain speculation, {plain.name}, both {chosen_on}."
    ]
    for ratio, group in gain.groupby("draft_ratio"):
        name = "as here" if group["is_here"].any() else f"{ratio:g}"
        lines.append(
            f"From the counts, with t_draft / t_target {name}, a third level pays at t_micro / t_draft: "
            f"{paying(group)}; "
            f"best gain {100 * group['gain'].max():+.1f} %."
        )
    if times.r2 is not None and times.r2 < _QUIET:
        lines.append(
            f"The three times explain only R² = {times.r2:.2f} of the wall clock: this machine was not quiet. Trust "
            "what comes from the "
            "counts at given ratios; for measured speed-ups delete the folder and run again."
        )
    return "\n".join(lines)


def _chosen(runs: Sequence[Candidate], dev: Sequence[Candidate], levels: int, times: TrioTimes) -> Candidate:
    """The run of the competitor with so many models that is fastest on dev, by the cost model."""
    of_levels = [run for run in dev if run.competitor.num_levels == levels]
    best = max(of_levels, key=lambda run: run.speedup(times)).competitor.name
    return next(run for run in runs if run.competitor.name == best)


def _row(
    run: Candidate, times: TrioTimes, *, alone: Candidate, plain: Candidate, given: TrioTimes
) -> dict[str, object]:
    counts = run.counts
    has_both = bool(counts.num_micro_forwards and counts.num_draft_forwards)
    return {
        "arm": run.competitor.name,
        "setting": run.label,
        "num_levels": run.competitor.num_levels,
        **{key: int(value) for key, value in vars(counts).items()},
        "redundancy": redundancy(counts),
        "target_utilisation": target_utilisation(counts),
        "acceptance_length": counts.acceptance_length,
        "tokens_per_s": run.measured.tokens_per_s,
        "speedup": run.measured.tokens_per_s / alone.measured.tokens_per_s,
        "speedup_se": gain_over(alone.measured, run.measured).standard_error,
        "speedup_modelled": run.speedup(times),
        "speedup_at_ratios": run.speedup(given),
        "break_even": break_even(counts, plain.counts, times, run.setting.stops) if has_both else None,
    }


def _below(value: float | None) -> str:
    """A break-even in words."""
    if value is None or np.isnan(value):
        return ""
    return f"{value:.2f}" if value > 0 else "never"


def third_level_frame(
    runs: Sequence[Candidate], times: TrioTimes, shares: Mapping[str, float] | None = None
) -> pd.DataFrame:
    """The gain, and who wins on each side, on a fine grid of t_micro / t_draft, at round t_draft / t_target and at the
    fitted one.

    `shares` are t_stop / t_draft of each kind of stop. `standard_error` is the gain's, with the two winners held fixed:
    it does not know that each is the best of several on the same prompts.
    """
    here = times.t_draft_s / times.t_target_s
    sides = [[run for run in runs if (run.competitor.num_levels == 3) == is_three] for is_three in (False, True)]
    rows = []
    for draft_ratio in sorted({*_DRAFT_RATIOS, here}):
        for micro_ratio in _FINE:
            at = at_ratios(micro_ratio * draft_ratio, draft_ratio, shares or {})
            plain, hierarchical = (max(side, key=lambda run: run.speedup(at)) for side in sides)
            is_column = micro_ratio in MICRO_RATIOS  # a bootstrap for every point of the fine grid would take minutes
            rows.append(
                {
                    "draft_ratio": draft_ratio,
                    "micro_ratio": micro_ratio,
                    "is_here": draft_ratio == here,
                    "gain": hierarchical.speedup(at) / plain.speedup(at) - 1,
                    "standard_error": gain_over(plain.modelled(at), hierarchical.modelled(at)).standard_error
                    if is_column
                    else None,
                    "plain": plain.name,
                    "hierarchy": hierarchical.name,
                }
            )
    return pd.DataFrame(rows)


def paying(group: pd.DataFrame) -> str:
    """The ranges of t_micro / t_draft in which the gain is positive, at one t_draft / t_target."""
    pays = (group["gain"] > 1e-9).to_numpy()
    ratios = group["micro_ratio"].to_numpy()
    # where a range begins, where it ends, in turns
    edges = np.flatnonzero(np.diff(np.concatenate([[0], pays.astype(int), [0]])))
    ranges = [(ratios[start], ratios[stop - 1]) for start, stop in zip(edges[::2], edges[1::2], strict=True)]
    return " or ".join(f"{low:.2f}-{high:.2f}" for low, high in ranges) or "none in 0-1"


def third_level_plot(gain: pd.DataFrame, name: str) -> Plot:
    """The gain against t_micro / t_draft, one line for each t_draft / t_target."""
    figure, axes = figure_of(3.4)
    for draft_ratio, group in gain.groupby("draft_ratio"):
        is_here = bool(group["is_here"].any())
        label = f"{draft_ratio:.3g}" + (" (here)" if is_here else "")
        axes.plot(group["micro_ratio"], 100 * group["gain"], label=label, linewidth=2.4 if is_here else 1.2)
    axes.axhline(0, color=GREY, linestyle="--", linewidth=1)
    axes.set(xlabel="t_micro / t_draft", ylabel="gain of a third level, %")
    axes.legend(title="t_draft / t_target", fontsize=7, title_fontsize=7, frameon=False)
    caption = (
        "Best hierarchy over best plain speculation (draft or micro alone), from counts, each at its best setting for "
        "the times."
    )
    return plot_of(f"third-level-{name}", caption, figure)

"""When does a third level pay? Best hierarchy over best plain speculation (draft or micro alone), modelled from counts
at many times.

Counts do not depend on times, so one run on dev answers for every machine: each side is at its best setting for the
times in question.
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from evaluation.figure import GREY, Plot, figure_of, plot_of
from evaluation.hierarchies.runs import Run
from evaluation.hierarchies.times import Times
from evaluation.intervals import gain_over

MICRO_RATIOS = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5)
"""t_micro / t_draft, the columns of the table."""
_DRAFT_RATIOS = (0.05, 0.1, 0.2, 0.4)
"""t_draft / t_target."""
_FINE = tuple(sorted({*(round(0.01 * step, 2) for step in range(101)), *MICRO_RATIOS}))


def third_level_frame(runs: Sequence[Run], times: Times) -> pd.DataFrame:
    """The gain, and who wins on each side, on a fine grid of t_micro / t_draft, at round t_draft / t_target and at the
    fitted one.

    `standard_error` is the gain's, with the two winners held fixed: it does not know that each is the best of several
    on the same prompts.
    """
    here = times.t_draft_s / times.t_target_s
    sides = [[run for run in runs if (run.competitor.num_levels == 3) == is_three] for is_three in (False, True)]
    rows = []
    for draft_ratio in sorted({*_DRAFT_RATIOS, here}):
        for micro_ratio in _FINE:
            at = Times(t_micro_s=micro_ratio * draft_ratio, t_draft_s=draft_ratio, t_target_s=1.0)
            plain, hierarchical = (max(side, key=lambda run: at.speedup(run.counts)) for side in sides)
            is_column = micro_ratio in MICRO_RATIOS  # a bootstrap for every point of the fine grid would take minutes
            rows.append(
                {
                    "draft_ratio": draft_ratio,
                    "micro_ratio": micro_ratio,
                    "is_here": draft_ratio == here,
                    "gain": at.speedup(hierarchical.counts) / at.speedup(plain.counts) - 1,
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

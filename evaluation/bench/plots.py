"""The picture of a race: gains over the best fixed length, family by family."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from evaluation.bench.abroad import Judged
from evaluation.bench.schedules import UNASSISTED
from evaluation.bench.standings import SAMPLING_NAMES, SCHEDULES, best_of, name_of, ratio_of
from evaluation.contest.arms import ALONE, BASELINE
from evaluation.figure import GREY, Plot, panels_of, plot_of


def race_plot(cells: Sequence[Judged]) -> Plot:
    """Gain over the best fixed length: against the ratio of times where models were slowed, else family by family."""
    is_slowed = any(cell["ratio_wished"] is not None for cell, _ in cells)
    return _against_ratio(cells) if is_slowed else _by_family(cells)


def _by_family(cells: Sequence[Judged]) -> Plot:
    """One panel per dataset and sampling, one row per family."""
    families = _families(cells)
    figure, panels = panels_of(len(cells), width=2.2 + 2.6 * len(cells), height=0.34 * len(families) + 1.4)
    for axes, (cell, standings) in zip(panels, cells, strict=True):
        for row, family in enumerate(families):
            best = best_of(standings, family)
            if best:
                gain = best.over[BASELINE]
                errors = 100 * np.array([[gain.value - gain.low], [gain.high - gain.value]])
                shape = "s" if family in SCHEDULES else "o"
                axes.errorbar(100 * gain.value, row, xerr=errors.clip(min=0), fmt=shape, markersize=4, capsize=2)
        axes.axvline(0, color=GREY, linewidth=1)
        axes.set_title(f"{cell['dataset']}\n{SAMPLING_NAMES[cell['sampling']]}", fontsize=9)
        axes.set_yticks(range(len(families)), [])
        axes.set_ylim(len(families) - 0.5, -0.5)
    panels[0].set_yticks(range(len(families)), [name_of(family) for family in families], fontsize=8)
    figure.supxlabel("gain over the best fixed length, %", fontsize=9)
    caption = "Gain over the best fixed length on a clock; whiskers: 95 %; squares: transformers."
    return plot_of("bench", caption, figure)


def _against_ratio(cells: Sequence[Judged]) -> Plot:
    """One panel per sampling, one line per family."""
    samplings = list(dict.fromkeys(cell["sampling"] for cell, _ in cells))
    figure, panels = panels_of(len(samplings), width=4.4 * len(samplings), height=4.2)
    for axes, sampling in zip(panels, samplings, strict=True):
        of_sampling = sorted(
            (entry for entry in cells if entry[0]["sampling"] == sampling), key=lambda entry: ratio_of(entry[0])
        )
        ratios = [ratio_of(cell) for cell, _ in of_sampling]
        for place, family in enumerate(_families(of_sampling)):
            arms = [best_of(standings, family) for _, standings in of_sampling]
            points = np.array([(np.nan,) * 3 if arm is None else arm.over[BASELINE][:3] for arm in arms])
            errors = np.maximum(0, np.stack([points[:, 0] - points[:, 1], points[:, 2] - points[:, 0]]))
            style = "--" if family in SCHEDULES else "-"
            shifted = np.array(ratios) * 1.01**place  # so that whiskers stand side by side
            look: dict[str, Any] = {"fmt": f"{style}.", "linewidth": 1, "capsize": 2, "label": name_of(family)}
            axes.errorbar(shifted, 100 * points[:, 0], 100 * errors, **look)
        axes.axhline(0, color=GREY, linewidth=1)
        axes.set(xscale="log", xlabel="t_target / t_draft", title=SAMPLING_NAMES[sampling])
        axes.set_xticks(ratios, [f"{ratio:.3g}" for ratio in ratios], minor=False)
        axes.minorticks_off()
    panels[0].set_ylabel("gain over the best fixed length, %")
    panels[-1].legend(fontsize=6)
    return plot_of("bench", "Gain over the best fixed length on a clock; whiskers: 95 %.", figure)


def _families(cells: Sequence[Judged]) -> list[str]:
    """Every family beside the best fixed length, in the order of the arms. Without a draft the target is so far behind
    that nothing else could be told apart: it is there only where nothing else is.
    """
    ran = dict.fromkeys(standing.family for _, standings in cells for standing in standings)
    return [family for family in ran if family not in (BASELINE, ALONE, UNASSISTED)] or [ALONE]

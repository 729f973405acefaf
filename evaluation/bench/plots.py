"""The picture of a race: gains over the best fixed length, family by family."""

from collections.abc import Sequence

import numpy as np

from evaluation.bench.schedules import UNASSISTED
from evaluation.bench.standings import SAMPLING_NAMES, SCHEDULES, best_of, name_of
from evaluation.bench.transfer import CellStandings
from evaluation.families import ALONE, BASELINE
from evaluation.figure import GREY, Plot, panels_of, plot_of


def race_plot(cells: Sequence[CellStandings]) -> Plot:
    """Gain over the best fixed length: one panel per dataset and sampling, one row per family."""
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


def _families(cells: Sequence[CellStandings]) -> list[str]:
    """Every family beside the best fixed length, in the order of the arms. Without a draft the target is so far behind
    that nothing else could be told apart: it is there only where nothing else is.
    """
    ran = dict.fromkeys(standing.family for _, standings in cells for standing in standings)
    return [family for family in ran if family not in (BASELINE, ALONE, UNASSISTED)] or [ALONE]

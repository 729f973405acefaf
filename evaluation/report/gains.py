"""Plots of what is gained: where the oracle's gain goes, every policy's speed-up, and what a verification costs."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.ticker import MaxNLocator

from evaluation.contest.colours import colours_of
from evaluation.contest.results import Result
from evaluation.costs.model import CostModel
from evaluation.figure import GREY, Plot, figure_of, plot_of
from evaluation.intervals import Gain


class Stage(NamedTuple):
    """One step on the way from the best fixed length to the oracle."""

    family: str
    name: str
    known: str
    """Knowledge that the draft stops on, in words."""
    gain: Gain
    """Over the best fixed length."""


def gain_stages(stages: Sequence[Stage], cost: CostModel, *, dataset: str) -> Plot:
    """Gain over the best fixed length, each stage in full colour from where the one above it ends."""
    figure, axes = figure_of(0.5 * len(stages) + 0.8)
    colours = colours_of(stage.family for stage in stages)
    before = 0.0
    for row, (family, _, _, gain) in enumerate(stages):
        value, low, high = (100 * part for part in gain[:3])
        axes.barh(row, min(before, value), color=colours[family], alpha=0.35, height=0.62)
        if value > before:
            axes.barh(row, value - before, left=before, color=colours[family], height=0.62)
        if row:
            axes.errorbar(value, row, xerr=[[value - low], [high - value]], color=GREY, capsize=3, linewidth=1.2)
            axes.annotate(
                f"{value:+.0f} %",
                (max(high, 0), row),
                xytext=(5, 0),
                textcoords="offset points",
                va="center",
                fontsize=9,
            )
        before = value
    axes.set_yticks(range(len(stages)), [f"{stage.name}\n{stage.known}" for stage in stages])
    axes.invert_yaxis()
    axes.axvline(0, color=GREY, linewidth=1)
    axes.margins(x=0.14)
    axes.set_xlabel("predicted gain over the best fixed length, %")
    return plot_of(
        f"gain-{cost.ratio:.3g}",
        f"Where the oracle's gain goes at {cost.title}: {dataset}. Full colour is what a stage adds to the one above "
        "it; whiskers are 95 % intervals. No policy that can be run reaches the perfect head or the oracle.",
        figure,
    )


def speed_up_bars(results: Sequence[Result], cost: CostModel, *, names: Mapping[str, str], best: str) -> Plot:
    """Speed-up over the target alone of every family, with the interval of its gain over the best fixed length; `best`
    is the family that dev chooses, which is marked.
    """
    figure, axes = figure_of(0.3 * len(results) + 1.0)
    base = next(result.speed_up for result in results if result.family == "fixed_length")
    shown = sorted(results, key=lambda result: result.speed_up)
    values = np.array([result.speed_up for result in shown])
    low, high = (base * (1 + np.array([getattr(result.gain, end) for result in shown])) for end in ("low", "high"))
    errors = np.maximum(0, np.stack([values - low, high - values]))
    colours = colours_of(result.family for result in results)
    labels = [names.get(result.family, result.family) for result in shown]
    axes.barh(labels, values, xerr=errors, color=[colours[result.family] for result in shown], ecolor=GREY, capsize=2)
    axes.get_yticklabels()[[result.family for result in shown].index(best)].set_fontweight("bold")
    axes.axvline(1, color=GREY, linestyle="--", linewidth=1)
    axes.margins(y=0.01)
    axes.set_xlabel("predicted speed-up over the target alone")
    return plot_of(
        f"speed_up-{cost.ratio:.3g}",
        f"Predicted speed-up at {cost.title}, in bold what dev chooses of what can be run; whiskers: 95 %, against the "
        "best fixed length.",
        figure,
    )


def verification_curve(cost: CostModel) -> Plot:
    """Seconds of a verification by the number of drafted tokens, in draft forwards."""
    figure, axes = figure_of(2.8)
    forwards = np.asarray(cost.t_target_s) / cost.t_draft_s
    axes.plot(forwards, color="#3b6fb6", marker="o", markersize=3)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="drafted tokens that are verified", ylabel="draft forwards", ylim=(0, 1.1 * forwards.max()))
    added = forwards[-1] / forwards[0] - 1
    return plot_of(
        "verification",
        f"What one verification costs here ({cost.origin}): {forwards[0]:.1f} draft forwards without a drafted token, "
        f"{added:+.0%} with {len(forwards) - 1}.",
        figure,
    )

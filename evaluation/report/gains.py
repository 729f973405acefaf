"""Plots of what every policy gains and of what a verification costs."""

from collections.abc import Sequence

import numpy as np
from matplotlib.ticker import MaxNLocator

from evaluation.contest.results import Result
from evaluation.families import BASELINE, family, styles_of
from evaluation.figure import GREY, Plot, figure_of, plot_of
from evaluation.times import Times


def speed_up_bars(results: Sequence[Result], cost: Times, *, best: str) -> Plot:
    """Speed-up over the target alone of every family, with the interval of its gain over the best fixed length; `best`
    is the family that dev chooses, which is marked.
    """
    figure, axes = figure_of(0.3 * len(results) + 1.0)
    base = next(result.speed_up for result in results if result.family == BASELINE)
    shown = sorted(results, key=lambda result: result.speed_up)
    values = np.array([result.speed_up for result in shown])
    low, high = (base * (1 + np.array([getattr(result.gain, end) for result in shown])) for end in ("low", "high"))
    errors = np.maximum(0, np.stack([values - low, high - values]))
    styles = styles_of(result.family for result in results)
    labels = [family(result.family).label for result in shown]
    colours = [styles[result.family].colour for result in shown]
    axes.barh(labels, values, xerr=errors, color=colours, ecolor=GREY, capsize=2)
    axes.get_yticklabels()[[result.family for result in shown].index(best)].set_fontweight("bold")
    axes.axvline(1, color=GREY, linestyle="--", linewidth=1)
    axes.margins(y=0.01)
    axes.set_xlabel("predicted speed-up over the target alone")
    return plot_of(
        f"speed_up-{cost.slug}",
        f"Predicted speed-up at {cost.title}, in bold what dev chooses of what can be run; whiskers: 95 %, against the "
        "best fixed length.",
        figure,
    )


def verification_curve(cost: Times) -> Plot:
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

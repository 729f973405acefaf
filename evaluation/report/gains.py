"""Plots of what every policy gains and of what a verification costs."""

import numpy as np
from matplotlib.ticker import MaxNLocator

from evaluation.contest import Contest
from evaluation.families import BASELINE, family, styles_of
from evaluation.figure import GREY, Plot, figure_of, plot_of
from evaluation.times import Times


def speed_up_bars(contest: Contest) -> Plot:
    """Speed-up over the target alone of every family, with the interval of its gain over the best fixed length; the
    family that dev chooses is in bold.
    """
    results, times = contest.results, contest.times
    figure, axes = figure_of(0.3 * len(results) + 1.0)
    names = sorted(results, key=lambda name: results[name].tokens_per_s)
    values = times.t_target_s[0] * np.array([results[name].tokens_per_s for name in names])
    base = values[names.index(BASELINE)]
    low, high = (base * (1 + np.array([getattr(contest.gain(name), end) for name in names])) for end in ("low", "high"))
    errors = np.maximum(0, np.stack([values - low, high - values]))
    styles = styles_of(results)
    colours = [styles[name].colour for name in names]
    axes.barh([family(name).label for name in names], values, xerr=errors, color=colours, ecolor=GREY, capsize=2)
    axes.get_yticklabels()[names.index(contest.best.family)].set_fontweight("bold")
    axes.axvline(1, color=GREY, linestyle="--", linewidth=1)
    axes.margins(y=0.01)
    axes.set_xlabel("predicted speed-up over the target alone")
    return plot_of(
        f"speed_up-{times.slug}",
        f"Predicted speed-up at {times.title}, in bold what dev chooses of what can be run; whiskers: 95 %, against "
        "the best fixed length.",
        figure,
    )


def verification_curve(times: Times) -> list[Plot]:
    """Seconds of a verification by the number of drafted tokens, in draft forwards; no plot if all take the same."""
    if len(times.t_target_s) == 1:
        return []
    figure, axes = figure_of(2.8)
    forwards = np.asarray(times.t_target_s) / times.t_draft_s
    axes.plot(forwards, color="#3b6fb6", marker="o", markersize=3)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="drafted tokens that are verified", ylabel="draft forwards", ylim=(0, 1.1 * forwards.max()))
    added = forwards[-1] / forwards[0] - 1
    plot = plot_of(
        "verification",
        f"What one verification costs here, {times.origin}: {forwards[0]:.1f} draft forwards without a drafted token, "
        f"{added:+.0%} with {len(forwards) - 1}.",
        figure,
    )
    return [plot]

"""Plots of an evaluation, as SVG for the page and as files."""

from collections.abc import Mapping, Sequence
from textwrap import fill

import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from scipy.special import expit

from evaluation.competitor import CALIBRATED
from evaluation.contest import Contest, Replays, Result, fastest_heads
from evaluation.families import BASELINE, BOUNDS, family, styles_of
from evaluation.gain import MIN_PROMPTS
from evaluation.report.frames import threshold_curve, threshold_of
from evaluation.report.tables import deciding_families, speed_text, stage_rows
from evaluation.traces.trace import Trace
from heads.measures.figure import GREY, Plot, draw_bins, figure_of, panels_of, plot_of
from heads.model.head import TIMING_LABELS, AcceptanceHead, Timing

_BINS = 15
_FEWEST = 5
"""Tokens in a bin that the reliability plot shows."""
_LINES: Mapping[Timing, str] = {"fed": "--", "drawn": "-", "prefix": ":"}
"""Timing -> line of its best head."""
_LOWER = 0.5
"""How far plots of thresholds reach below the choices of dev, as a part of what is above them."""


def all_plots(replays: Replays, contest: Contest) -> list[Plot]:
    """All plots of one dataset but `stage_plot`, which each set of times has."""
    plots = [*thresholds(contest), draft_lengths(contest)]
    if heads := fastest_heads(contest.results):
        plots.append(reliability_plot(replays.traces.test, heads))
    return plots


def thresholds(contest: Contest) -> list[Plot]:
    """The plots of `threshold_figures`."""
    caption = (
        "Predicted gain over the best fixed length on test, by {}. Band: 95 % interval over prompts. Dot: dev's "
        "choice. Thick: the thresholds that dev cannot tell from it."
    )
    figures = threshold_figures(contest)
    return [
        plot_of(f"thresholds-{number}", caption.format(axis), figure)
        for number, (axis, figure) in enumerate(figures.items(), 1)
    ]


def threshold_figures(contest: Contest) -> dict[str, Figure]:
    """Name of a threshold -> the gain over the best fixed length by its value, of each family whose settings differ by
    it alone, with bands of 95 % and the values that are within noise of dev's best; all on one scale.
    """
    by_axis = dict[str, list[Result]]()
    for name, result in contest.results.items():
        parameter = threshold_of(result)
        if name not in BOUNDS and len(result.competitor.settings) > 4 and parameter is not None:
            by_axis.setdefault(_axis(result, parameter), []).append(result)
    figures = {axis: threshold_figure(contest, results) for axis, results in by_axis.items()}
    top = max((figure.axes[0].dataLim.y1 for figure in figures.values()), default=0.0)
    chosen = [100 * result.over(contest.baseline).value for results in by_axis.values() for result in results]
    span = top - min(chosen, default=0.0) + 1
    for figure in figures.values():
        figure.axes[0].set(ylim=(top - (1 + _LOWER) * span, top + 0.05 * span))
    return figures


def threshold_figure(contest: Contest, results: Sequence[Result]) -> Figure:
    """The curves of families with one threshold, as `threshold_figures` draws them."""
    figure, axes = figure_of(2.8)
    axes.axhline(0, color=GREY, linewidth=1)
    styles = styles_of(result.family for result in results)
    for result in results:
        colour, line = styles[result.family]
        curve = threshold_curve(contest, result)
        values = curve[threshold_of(result)].to_numpy()
        percent = 100 * curve["gain"].to_numpy()
        if contest.num_prompts >= MIN_PROMPTS:
            ends = 100 * curve[["low", "high"]].to_numpy(dtype=float)
            axes.fill_between(values, *ends.T, color=colour, alpha=0.15, linewidth=0)
        axes.plot(values, percent, line, color=colour, linewidth=1.2, label=family(result.family).label)
        is_equal = curve["is_equal"].to_numpy()
        axes.plot(values[is_equal], percent[is_equal], color=colour, linewidth=4, alpha=0.8)
        is_chosen = curve["is_chosen"].to_numpy()
        axes.plot(values[is_chosen], percent[is_chosen], "o", markersize=6, color=colour)
        axes.set(xlabel=_axis(result, str(threshold_of(result))), ylabel="gain, %")
    return figure


def _axis(result: Result, parameter: str) -> str:
    """The name of a threshold, as decode.grid and --policy have it; those that bound different probabilities differ."""
    name = "head" if result.competitor.head else result.family
    is_raw = not result.setting.get(CALIBRATED, True)
    return f"{parameter} of {name}{' on raw probabilities' if is_raw else ''}"


def draft_lengths(contest: Contest) -> Plot:
    """How long the drafts of the families that decide are, at the settings that dev chose."""
    figure, axes = figure_of(3.0)
    for name, (colour, line) in styles_of(deciding_families(contest)).items():
        result = contest.results[name]
        label = family(name).label
        if name == BASELINE:  # a single spike would flatten every other line
            length = next(iter(result.setting.values()))
            axes.axvline(length, color=colour, linestyle="-.", label=f"{label}: {length}")
            continue
        lengths = result.played.lengths[0].sum(0)
        share = 100 * lengths / lengths.sum()
        axes.step(np.arange(len(lengths)), share, where="mid", color=colour, linestyle=line, label=label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return plot_of(
        "draft_lengths",
        f"Draft lengths, where a target forward costs {contest.times.ratio:.1f} draft forwards.",
        figure,
        xlabel="drafted tokens in a round",
        ylabel="% of rounds",
    )


def reliability_plot(trace: Trace, heads: Mapping[Timing, AcceptanceHead]) -> Plot:
    """Calibrated prediction against the share accepted, over the tokens that the draft draws first at each position,
    above the number of tokens.
    """
    figure, (axes, below) = panels_of(1, width=4.4, height=4.2, rows=(3, 1))
    bins = {f"best {TIMING_LABELS[timing]} head": bins_of(trace, head) for timing, head in heads.items()}
    draw_bins(axes, below, bins, lines=[_LINES[timing] for timing in heads])
    below.set_xlabel("predicted probability of acceptance")
    return plot_of(
        "reliability",
        "Are the heads' predictions right? On the grey diagonal, a prediction of 70 % comes true for 70 % of the "
        "tokens. Calibrated predictions on test tokens, and how many of them there are.",
        figure,
        ylabel="accepted share of tokens",
    )


def bins_of(trace: Trace, head: AcceptanceHead) -> dict[str, Float[np.ndarray, " bin"]]:
    """The reliability of a head's calibrated predictions for the tokens that the draft draws first. Each bin of
    predictions has their mean, the share of accepted tokens, and the number of tokens, 0 if it is below `_FEWEST`.
    """
    drawn, is_accepted = trace.first_drawn[trace.is_drafted], trace.is_first_accepted[trace.is_drafted]
    logit = trace.logit(head).astype(np.float64)
    if head.timing == "fed":  # its score of a token is at the token after it
        after = np.minimum(drawn + 1, len(trace.token) - 1)
        # else the next token in flat order begins another branch or row
        is_next = (after > drawn) & (trace.before[after] == drawn)
        is_next &= np.isfinite(trace.signal("log_token_prob")[after])  # else no draft of a reduced vocabulary draws it
        drawn, is_accepted = after[is_next], is_accepted[is_next]
    prob = expit(head.calibrated_logit(logit[drawn]))
    index = np.minimum((prob * _BINS).astype(int), _BINS - 1)
    count = np.bincount(index, minlength=_BINS)
    count[count < _FEWEST] = 0
    divisor = np.maximum(count, 1)
    predicted = np.bincount(index, prob, _BINS) / divisor
    return {"predicted": predicted, "true": np.bincount(index, is_accepted, _BINS) / divisor, "count": count}


def stage_plot(contest: Contest) -> Plot:
    """Tokens per second of each stage, in full colour from where the one before it ends."""
    stages = stage_rows(contest)
    figure, axes = figure_of(0.72 * len(stages) + 1.2)
    styles = styles_of(stage["family"] for stage in stages)
    base = before = stages[0]["tokens_per_s"].value
    for row, stage in enumerate(stages):
        text, end, colour = stage["missing"].partition(":")[0], base, styles[stage["family"]][0]
        if "gain" in stage:
            speed = stage["tokens_per_s"]
            value = end = speed.value
            text = speed_text(value)
            axes.barh(row, min(before, value) - base, left=base, color=colour, alpha=0.35, height=0.62)
            axes.barh(row, max(value - before, 0), left=before, color=colour, height=0.62)
            if row and speed.low is not None:
                end = speed.high
                whiskers = [[value - speed.low], [end - value]]
                axes.errorbar(value, row, xerr=whiskers, color=GREY, capsize=3, linewidth=1.2)
            before = value
        axes.annotate(text, (max(end, base), row), xytext=(5, 0), textcoords="offset points", va="center", fontsize=9)
    axes.set_yticks(range(len(stages)), [f"{stage['stage']}\n{fill(stage['knows'], 26)}" for stage in stages])
    axes.invert_yaxis()
    axes.axvline(base, color=GREY, linewidth=1)
    axes.margins(x=0.3)
    percent = (lambda speed: 100 * (np.asarray(speed) / base - 1), lambda gain: base * (1 + np.asarray(gain) / 100))
    gains = axes.secondary_xaxis("top", functions=percent)
    gains.set_xlabel("gain over the best fixed length, %")
    gains.tick_params(labelsize=9)
    return plot_of(
        f"gain-{contest.times.slug}",
        f"Where the oracle's gain goes at {contest.times.title}: {contest.dataset}. Full colour is what a stage adds "
        "to the one above it; whiskers are 95 % intervals, paired with the best fixed length. No policy that can be "
        "run reaches the perfect head or the oracle.",
        figure,
        xlabel="predicted tokens per second",
    )

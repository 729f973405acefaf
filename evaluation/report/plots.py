"""Plots of an evaluation, as SVG for the page and as files."""

from collections.abc import Mapping, Sequence
from textwrap import fill

import numpy as np
from matplotlib.ticker import MaxNLocator
from scipy.special import expit

from evaluation.competitor import CALIBRATED
from evaluation.contest import Contest, Replays, Result, best_heads
from evaluation.families import BASELINE, BOUNDS, COLOURS, HEADS, PRODUCT, family, styles_of
from evaluation.figure import GREY, Plot, figure_of, plot_of
from evaluation.report.tables import deciding_families, speed_text, stages_of
from evaluation.traces.trace import Trace
from heads.model.head import TIMING_LABELS, AcceptanceHead, Timing

_BINS = 15
_RAW = " on raw probabilities"
_FEWEST = 5
"""Tokens in a bin that the reliability plot shows."""
_LINES: Mapping[Timing, str] = {"fed": "--", "drawn": "-", "prefix": ":"}
"""Timing -> line of its best head."""


def all_plots(replays: Replays, contest: Contest) -> list[Plot]:
    """All plots of one dataset but `stage_plot`, which each set of times has."""
    plots, heads = [*thresholds(contest), draft_lengths(contest)], best_heads(contest.results)
    return [*plots, reliability_plot(replays.traces.test, heads)] if heads else plots


def thresholds(contest: Contest) -> list[Plot]:
    """Speed-up over the threshold of each family whose settings differ by one, at its best arm; a plot for each
    parameter.
    """
    times, by_parameter = contest.times, dict[str, list[Result]]()
    for name, result in contest.results.items():
        settings = result.competitor.settings
        parameter = _threshold_of(settings)
        if name in BOUNDS or len(settings) <= 4 or parameter is None:
            continue
        # the product's parameter has the name of token_prob's, but bounds another probability, as does a raw one
        if name == PRODUCT:
            parameter = PRODUCT
        elif not settings[0].get(CALIBRATED, True):
            parameter = f"{parameter}{_RAW}"
        by_parameter.setdefault(parameter, []).append(result)
    plots = []
    for number, (parameter, members) in enumerate(by_parameter.items(), 1):
        figure, axes = figure_of(2.8)
        styles = styles_of(result.family for result in members)
        for result in members:
            assert result.arm is not None
            colour, line = styles[result.family]
            threshold = _threshold_of(result.competitor.settings)
            assert threshold is not None
            values = [setting[threshold] for setting in result.competitor.settings]
            speed_up = times.tokens_per_s(result.arm.test) * times.t_target_s[0]
            axes.plot(values, speed_up, color=colour, linestyle=line, label=family(result.family).label)
            axes.plot(values[result.number], speed_up[result.number], "o", markersize=6, color=colour)
        caption = f"Predicted speed-up over the target alone by {parameter}, on test. The dot marks dev's choice."
        name = f"thresholds-{number}"
        plots.append(plot_of(name, caption, figure, xlabel=parameter, ylabel="predicted speed-up"))
    return plots


def _threshold_of(settings: Sequence[Mapping[str, object]]) -> str | None:
    """The one parameter by which settings differ, if it is a number that is no count."""
    varying = [key for key in settings[0] if len({setting[key] for setting in settings}) > 1]
    return varying[0] if len(varying) == 1 and isinstance(settings[0][varying[0]], float) else None


def draft_lengths(contest: Contest) -> Plot:
    """How long the drafts of the families that decide are, at the settings that dev chose."""
    figure, axes = figure_of(3.0)
    for name, (colour, line) in styles_of(deciding_families(contest)).items():
        result, label = contest.results[name], family(name).label
        assert result.played is not None
        if name == BASELINE:  # a single spike would flatten every other line
            length = next(iter(result.setting.values()))
            axes.axvline(length, color=colour, linestyle="-.", label=f"{label}: {length}")
            continue
        lengths = result.played.lengths[0].sum(0)
        share = 100 * lengths / lengths.sum()
        axes.step(np.arange(len(lengths)), share, where="mid", color=colour, linestyle=line, label=label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    caption = f"Draft lengths, where a target forward costs {contest.times.ratio:.1f} draft forwards."
    settings = {"xlabel": "drafted tokens in a round", "ylabel": "% of rounds"}
    return plot_of("draft_lengths", caption, figure, **settings)


def reliability_plot(trace: Trace, heads: Mapping[Timing, AcceptanceHead]) -> Plot:
    """Calibrated prediction against the share accepted, over the tokens that the draft draws first at each position."""
    figure, axes = figure_of(3.0)
    drawn, is_accepted = trace.first_drawn[trace.is_drafted], trace.is_first_accepted[trace.is_drafted]
    axes.plot([0, 1], [0, 1], color=GREY, linestyle="--", linewidth=1)
    for timing, head in heads.items():
        logit = trace.logit(head).astype(np.float64)
        at, accepted = drawn, is_accepted
        if head.timing == "fed":  # its score of a token is at the token after it
            at = np.minimum(drawn + 1, len(trace.token) - 1)
            is_next = (at > drawn) & (
                trace.before[at] == drawn
            )  # else the next token in flat order begins another branch or row
            is_next &= np.isfinite(trace.signal("log_token_prob")[at])  # else no draft of a reduced vocabulary draws it
            at, accepted = at[is_next], is_accepted[is_next]
        prob = expit(head.calibrated_logit(logit[at]))
        index = np.minimum((prob * _BINS).astype(int), _BINS - 1)
        count = np.bincount(index, minlength=_BINS)
        some = count >= _FEWEST
        mean = np.bincount(index, prob, _BINS)[some] / count[some]
        share, label = np.bincount(index, accepted, _BINS)[some] / count[some], f"best {TIMING_LABELS[timing]} head"
        axes.plot(mean, share, _LINES[timing], marker="o", markersize=3, color=COLOURS[HEADS], label=label)
    return plot_of(
        "reliability",
        "Are the heads' predictions right? On the grey diagonal, a prediction of 70 % comes true for 70 % of the "
        "tokens. Calibrated predictions on test tokens.",
        figure,
        xlabel="predicted probability of acceptance",
        ylabel="accepted share of tokens",
        xlim=(0, 1),
        ylim=(0, 1),
    )


def stage_plot(contest: Contest) -> Plot:
    """Tokens per second of each stage, in full colour from where the one before it ends."""
    stages = stages_of(contest)
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

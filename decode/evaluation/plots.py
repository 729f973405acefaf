"""Plots of an evaluation, as SVG for the page and as files (design section 2; SpecDec++ Figure 4)."""

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.special import expit

from decode.costs.model import CostModel
from decode.evaluation.results import Arm, Result, chosen, throughput
from decode.traces.trace import Trace

_BINS = 15


class Plot(NamedTuple):
    """One figure."""

    name: str
    caption: str
    svg: str


def speed_up_bars(results: Sequence[Result], cost: CostModel, names: Mapping[str, str]) -> Plot:
    """Speed-up over the target alone of every family, with the interval of its gain over the best fixed length."""
    figure, axes = figure_of(0.34 * len(results) + 1.0)
    base = next(result.speed_up for result in results if result.family == "fixed_length")
    shown = sorted(results, key=lambda result: result.speed_up)
    values = np.array([result.speed_up for result in shown])
    low, high = (base * (1 + np.array([getattr(result, end) for result in shown])) for end in ("gain_low", "gain_high"))
    errors = np.maximum(0, np.stack([values - low, high - values]))
    colours = [
        "#b9c2d0" if r.family.startswith(("perfect", "oracle")) else "#c4532d" if r.family.startswith(("head", "auto")) else "#3b6fb6"
        for r in shown
    ]
    axes.barh(
        [names.get(result.family, result.family) for result in shown], values, xerr=errors, color=colours, ecolor="#1d2430", capsize=2
    )
    axes.axvline(1, color="#98a2b3", linestyle="--", linewidth=1)
    axes.set_xlabel("speed-up over the target alone")
    return plot_of(
        f"speed_up-{cost.ratio:.3g}",
        f"Speed-up at t_target/t_draft = {cost.ratio:.2f} ({cost.origin}); whiskers: 95 %, against the best fixed length.",
        figure,
    )


def pareto(arms: Sequence[Arm], names: Mapping[str, str]) -> Plot:
    """Discard rate against verification rate of every setting (SpecDec++ Figure 4)."""
    figure, axes = figure_of(3.6)
    for place, family in enumerate(dict.fromkeys(arm.grid.family for arm in arms)):
        points = np.concatenate([_rates(arm) for arm in arms if arm.grid.family == family], axis=1)
        marker = ".x+"[place // 10]  # there are ten colours
        axes.plot(points[0], points[1], marker, markersize=4, label=names.get(family, family))
    axes.set(xlabel="verification rate", ylabel="discard rate", ylim=(-0.05, 2.5))
    axes.legend(fontsize=6, ncols=2)
    return plot_of("pareto", "Discard rate against verification rate, one point per setting.", figure)


def thresholds(arms: Sequence[Arm], cost: CostModel, names: Mapping[str, str]) -> Plot:
    """Throughput over the threshold of each family with one parameter, at its best arm."""
    figure, axes = figure_of(3.6)
    for family in dict.fromkeys(arm.grid.family for arm in arms):
        arm, _ = chosen([arm for arm in arms if arm.grid.family == family], cost)
        values = [list(setting.values()) for setting in arm.grid.settings]
        if all(len(value) == 1 and isinstance(value[0], float) for value in values) and len(values) > 4:
            axes.plot([value[0] for value in values], throughput(arm.test, cost) * cost.t_target_s[0], label=names.get(family, family))
    axes.set(xlabel="threshold", ylabel="speed-up")
    axes.legend(fontsize=6, ncols=2)
    return plot_of("thresholds", "Speed-up over each policy's threshold, on test; of heads the best of each timing.", figure)


def draft_lengths(arms: Sequence[Arm], cost: CostModel, names: Mapping[str, str]) -> Plot:
    """How long drafts are at the dev-chosen settings."""
    figure, axes = figure_of(3.6)
    for family in dict.fromkeys(arm.grid.family for arm in arms):
        if family.startswith(("perfect_fed", "heuristic", "max_prob", "self_verify", "ada_edl")):
            continue
        arm, setting = chosen([arm for arm in arms if arm.grid.family == family], cost)
        lengths = arm.test.lengths[setting].sum(0)
        axes.step(np.arange(len(lengths)), lengths / lengths.sum(), where="mid", label=names.get(family, family))
    axes.set(xlabel="drafted tokens in a round", ylabel="share of rounds")
    axes.legend(fontsize=6, ncols=2)
    return plot_of("draft_lengths", f"Draft lengths at t_target/t_draft = {cost.ratio:.2f}.", figure)


def reliability(trace: Trace, heads: Mapping[str, Any]) -> Plot:
    """Calibrated prediction against the share accepted, over the tokens that the draft draws first at each position."""
    figure, axes = figure_of(3.6)
    drawn = np.where(trace.is_rejected, trace.branch, np.arange(trace.num_positions))
    axes.plot([0, 1], [0, 1], color="#98a2b3", linestyle="--", linewidth=1)
    for name, head in heads.items():
        logit = trace.logit(head).astype(np.float64)
        at, accepted = (drawn, ~trace.is_rejected) if head.timing == "drawn" else _scored_later(trace, drawn)
        prob = expit(head.calibrated_logit(logit[at]))
        index = np.minimum((prob * _BINS).astype(int), _BINS - 1)
        count = np.bincount(index, minlength=_BINS)
        some = count >= 5
        mean = np.bincount(index, prob, _BINS)[some] / count[some]
        axes.plot(mean, np.bincount(index, accepted, _BINS)[some] / count[some], marker="o", markersize=3, label=name)
    axes.set(xlabel="predicted acceptance (calibrated)", ylabel="share accepted", xlim=(0, 1), ylim=(0, 1))
    axes.legend(fontsize=6)
    return plot_of("reliability", "Calibrated predictions against outcomes, on the trace's test tokens.", figure)


def entropies(trace: Trace) -> Plot:
    """H(q) where the draft's token was accepted, and where it was rejected."""
    figure, axes = figure_of(3.6)
    entropy = trace.signals["entropy"][: trace.num_positions]
    bins = np.linspace(0, max(1.0, float(entropy.max())), 40).tolist()
    for label, mask in (("accepted", ~trace.is_rejected), ("rejected", trace.is_rejected)):
        axes.hist(entropy[mask], bins=bins, histtype="step", density=True, label=f"{label} (mean {entropy[mask].mean():.2f})")
    axes.set(xlabel="H(q) in nats", ylabel="density")
    axes.legend(fontsize=8)
    return plot_of("entropy", "Entropy of the draft where its token was accepted and where it was rejected.", figure)


def _scored_later(trace: Trace, drawn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where the fed-time score of each drawn token stands (with the token after it), and whether that token was accepted."""
    following = drawn + 1
    fits = following < len(trace.token)
    following = np.where(fits, following, 0)
    fits &= trace.before[following] == drawn
    return following[fits], ~trace.is_rejected[fits]


def _rates(arm: Arm) -> np.ndarray:
    counts = arm.test.counts
    tokens = counts.num_emitted.sum(-1)
    return np.stack([counts.num_target.sum(-1) / tokens, counts.num_discarded.sum(-1) / tokens])


def figure_of(height: float) -> tuple[Figure, Axes]:
    """One pair of axes, in the width and style of all plots."""
    figure = Figure(figsize=(5.6, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    return figure, axes


def plot_of(name: str, caption: str, figure: Figure) -> Plot:
    """The figure as SVG text, the same bytes for the same figure."""
    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return Plot(name, caption, re.sub(r"^.*?(?=<svg)", "", text, count=1, flags=re.DOTALL))

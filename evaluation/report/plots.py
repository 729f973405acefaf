"""Plots of an evaluation, as SVG for the page and as files (SpecDec++ Figure 4)."""

from collections.abc import Mapping, Sequence

import numpy as np
from scipy.special import expit

from evaluation.contest.arms import Arm, Replays, by_family, fastest_on_dev
from evaluation.contest.results import Result
from evaluation.costs.model import CostModel
from evaluation.figure import BLUE, DARK, GREY, PALE, RED, Plot, figure_of, plot_of
from evaluation.traces.trace import Array, Trace
from heads.model.head import AcceptanceHead

_BINS = 15
_FEWEST = 5
"""Tokens in a bin that the reliability plot shows."""
_LEFT_OUT = ("perfect_fed", "heuristic", "max_prob", "self_verify", "ada_edl")
"""Families without a line of draft lengths, where there are too many to tell apart."""


def all_plots(replays: Replays, cost: CostModel, *, names: Mapping[str, str]) -> list[Plot]:
    """All plots of one dataset but the bars, which every cost has of its own."""
    arms, test = replays.arms, replays.traces.test
    plots = [pareto(arms, names), thresholds(arms, cost, names=names), draft_lengths(arms, cost, names=names)]
    best = replays.best(cost)
    if best:
        plots.append(reliability_plot(test, {f"best {timing}-time head": head for timing, head in best.items()}))
    return [*plots, entropies(test)]


def speed_up_bars(results: Sequence[Result], cost: CostModel, *, names: Mapping[str, str]) -> Plot:
    """Speed-up over the target alone of every family, with the interval of its gain over the best fixed length."""
    figure, axes = figure_of(0.34 * len(results) + 1.0)
    base = next(result.speed_up for result in results if result.family == "fixed_length")
    shown = sorted(results, key=lambda result: result.speed_up)
    values = np.array([result.speed_up for result in shown])
    low, high = (base * (1 + np.array([getattr(result.gain, end) for result in shown])) for end in ("low", "high"))
    errors = np.maximum(0, np.stack([values - low, high - values]))
    labels, colours = (
        [names.get(result.family, result.family) for result in shown],
        [_colour(result.family) for result in shown],
    )
    axes.barh(labels, values, xerr=errors, color=colours, ecolor=DARK, capsize=2)
    axes.axvline(1, color=GREY, linestyle="--", linewidth=1)
    axes.set_xlabel("speed-up over the target alone")
    return plot_of(
        f"speed_up-{cost.ratio:.3g}",
        f"Predicted speed-up at {cost.title}; whiskers: 95 %, against the best fixed length.",
        figure,
    )


def pareto(arms: Sequence[Arm], names: Mapping[str, str]) -> Plot:
    """Discard rate against verification rate of every setting (SpecDec++ Figure 4)."""
    figure, axes = figure_of(3.6)
    for place, (family, members) in enumerate(by_family(arms).items()):
        points = np.concatenate([_rates(arm) for arm in members], axis=1)
        marker = ".x+"[place // 10]  # there are ten colours
        axes.plot(points[0], points[1], marker, markersize=4, label=names.get(family, family))
    axes.set(xlabel="verification rate", ylabel="discard rate", ylim=(-0.05, 2.5))
    axes.legend(fontsize=6, ncols=2)
    return plot_of("pareto", "Discard rate against verification rate, one point per setting.", figure)


def thresholds(arms: Sequence[Arm], cost: CostModel, *, names: Mapping[str, str]) -> Plot:
    """Throughput over the threshold of each family with one parameter, at its best arm."""
    figure, axes = figure_of(3.6)
    for family, members in by_family(arms).items():
        arm, _ = fastest_on_dev(members, cost)
        values = [list(setting.values()) for setting in arm.grid.settings]
        if all(len(value) == 1 and isinstance(value[0], float) for value in values) and len(values) > 4:
            speed_up = cost.tokens_per_s(arm.test) * cost.t_target_s[0]
            axes.plot([value[0] for value in values], speed_up, label=names.get(family, family))
    axes.set(xlabel="threshold", ylabel="speed-up")
    axes.legend(fontsize=6, ncols=2)
    return plot_of(
        "thresholds", "Speed-up over each policy's threshold, on test; of heads the best of each timing.", figure
    )


def draft_lengths(arms: Sequence[Arm], cost: CostModel, *, names: Mapping[str, str]) -> Plot:
    """How long drafts are at the dev-chosen settings."""
    figure, axes = figure_of(3.6)
    for family, members in by_family(arms).items():
        if family in _LEFT_OUT:
            continue
        arm, setting = fastest_on_dev(members, cost)
        lengths = arm.test.lengths[setting].sum(0)
        axes.step(np.arange(len(lengths)), lengths / lengths.sum(), where="mid", label=names.get(family, family))
    axes.set(xlabel="drafted tokens in a round", ylabel="share of rounds")
    axes.legend(fontsize=6, ncols=2)
    return plot_of("draft_lengths", f"Draft lengths at t_target/t_draft = {cost.ratio:.2f}.", figure)


def reliability_plot(trace: Trace, heads: Mapping[str, AcceptanceHead]) -> Plot:
    """Calibrated prediction against the share accepted, over the tokens that the draft draws first at each position."""
    figure, axes = figure_of(3.6)
    drawn = trace.first_drawn
    axes.plot([0, 1], [0, 1], color=GREY, linestyle="--", linewidth=1)
    for name, head in heads.items():
        logit = trace.logit(head).astype(np.float64)
        at, accepted = (drawn, trace.is_first_accepted) if head.timing != "fed" else _scored_later(trace, drawn)
        prob = expit(head.calibrated_logit(logit[at]))
        index = np.minimum((prob * _BINS).astype(int), _BINS - 1)
        count = np.bincount(index, minlength=_BINS)
        some = count >= _FEWEST
        mean = np.bincount(index, prob, _BINS)[some] / count[some]
        axes.plot(mean, np.bincount(index, accepted, _BINS)[some] / count[some], marker="o", markersize=3, label=name)
    axes.set(xlabel="predicted acceptance (calibrated)", ylabel="share accepted", xlim=(0, 1), ylim=(0, 1))
    axes.legend(fontsize=6)
    return plot_of("reliability", "Calibrated predictions against outcomes, on the trace's test tokens.", figure)


def entropies(trace: Trace) -> Plot:
    """H(q) where the draft's token was accepted, and where it was rejected."""
    figure, axes = figure_of(3.6)
    entropy, is_accepted = trace.signals["entropy"][trace.first_drawn], trace.is_first_accepted
    bins = np.linspace(0, max(1.0, float(entropy.max())), 40).tolist()
    for label, mask in (("accepted", is_accepted), ("rejected", ~is_accepted)):
        axes.hist(
            entropy[mask], bins=bins, histtype="step", density=True, label=f"{label} (mean {entropy[mask].mean():.2f})"
        )
    axes.set(xlabel="H(q) in nats", ylabel="density")
    axes.legend(fontsize=8)
    return plot_of("entropy", "Entropy of the draft where its token was accepted and where it was rejected.", figure)


def _colour(family: str) -> str:
    """Bounds pale, heads red, all others blue."""
    return PALE if family.startswith(("perfect", "oracle")) else RED if family.startswith(("head", "auto")) else BLUE


def _scored_later(trace: Trace, drawn: Array) -> tuple[Array, Array]:
    """Index of each drawn token's fed-time score (it stands at the token after it), and whether the drawn token was
    accepted.
    """
    following = drawn + 1
    fits = following < len(trace.token)
    following = np.where(fits, following, 0)
    fits &= trace.before[following] == drawn  # else the next token in flat order begins another branch or row
    return following[fits], trace.is_first_accepted[fits]


def _rates(arm: Arm) -> Array:
    counts = arm.test.counts
    tokens = counts.num_emitted.sum(-1)
    return np.stack([counts.num_target.sum(-1) / tokens, counts.num_discarded.sum(-1) / tokens])

"""The tables of `hierarchy`: HSDDW's Table 4 (sigma, eta, speed-up) for every competitor, and where a third level pays.

A third level pays where the best hierarchy beats the best plain speculation (draft or micro alone), predicted from
counts. Counts do not depend on times, so one run answers for every machine: each side is at its best setting for the
times in question.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from operator import itemgetter

import numpy as np
import pandas as pd

from evaluation.contest import Result, best_setting
from evaluation.gain import MIN_PROMPTS, conclusion, gain_over
from evaluation.table import Table, flat, shown
from evaluation.times import Times
from heads.measures.figure import GREY, Plot, figure_of, plot_of
from papers.hierarchies.configurations import PLAIN
from papers.hierarchies.decoded import Decoded
from papers.hierarchies.times import at_ratios, break_even, redundancy

_COLUMNS = {
    "drafter": ("drafter", ""),
    "setting": ("setting", ""),
    "tokens": ("num_emitted", ""),
    "micro tokens": ("num_micro", ""),
    "draft tokens": ("num_drafted", ""),
    "micro forwards": ("num_micro_forwards", ""),
    "draft forwards": ("num_draft_forwards", ""),
    "target forwards": ("num_target", ""),
    "redundancy": ("redundancy", ".2%"),
    "utilisation": ("target_utilisation", ".2%"),
    "tokens/s": ("tokens_per_s", ".0f"),
    "speed-up": ("speedup", ".3f"),
    "95 % from": ("speedup_low", ".3f"),
    "to": ("speedup_high", ".3f"),
    "modelled": ("speedup_modelled", ".3f"),
    "given": ("speedup_at_ratios", ".3f"),
    "faster below": ("break_even", ".2f"),
}
_QUIET = 0.9
"""R² of the fit below which wall clock is not to be trusted."""
MICRO_RATIOS = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5)
"""t_micro / t_draft, the columns of the table."""
_DRAFT_RATIOS = (0.05, 0.1, 0.2, 0.4)
"""t_draft / t_target."""
_FINE = tuple(sorted({*(round(0.01 * step, 2) for step in range(101)), *MICRO_RATIOS}))


def hierarchy_rows(decoded: Sequence[Decoded], times: Times, given: Times) -> list[dict[str, object]]:
    """One row per competitor, decoded on the test prompts at one setting each, the target alone first: counts of three
    models, sigma, eta, measured speed-ups, and those predicted at fitted times and at given ones of other hardware.
    """
    rows = []
    alone = decoded[0].result()
    plain = next(member.played for member in decoded if member.competitor.family == PLAIN)
    for member in decoded:
        result = member.result()
        counts = member.played.total()
        rows.append(
            {
                "drafter": result.family,
                "setting": result.label,
                "num_levels": member.num_levels,
                **vars(counts),
                "redundancy": redundancy(counts),
                "target_utilisation": counts.verification_rate,
                "acceptance_length": counts.acceptance_length,
                "tokens_per_s": result.tokens_per_s,
                **flat({"speedup": result.over(alone).speed(1.0)}),
                "speedup_modelled": best_setting(member.played, times)[1] * times.alone_s,
                "speedup_at_ratios": best_setting(member.played, given)[1] * given.alone_s,
                "break_even": break_even(member.played, plain, times) if member.num_levels == 3 else None,
            }
        )
    return rows


def table_4(rows: Sequence[Mapping[str, object]], times: Times, r2: float, *, given: Times, title: str) -> Table:
    """HSDDW's Table 4, for every competitor."""
    t_micro, t_draft, t_target = (1e3 * time for time in (times.t_micro_s, times.t_draft_s, times.alone_s))
    title = (
        f"{title}; fitted t_micro {t_micro:.2f}, t_draft {t_draft:.2f}, t_target {t_target:.2f} ms per forward, "
        f"R² {r2:.3f}; given: {given.t_micro_s:g} : {given.t_draft_s:g} : 1"
    )
    note = (
        "Redundancy: the paper's sigma; utilisation: its eta. Speed-up over the target alone: measured (95 % interval: "
        f"paired bootstrap of prompts, from {MIN_PROMPTS} on), modelled from the counts at fitted times, and at given "
        "ones. Faster below: from the counts, the hierarchy is faster than sd while t_micro / t_draft is below this "
        f"(never, if this is negative); here it is {t_micro / t_draft:.2f}"
    )
    return Table(title, shown(rows, _COLUMNS), note, names=2)


def fastest_sides(decoded: Sequence[Decoded], times: Times) -> list[tuple[Decoded, int, float]]:
    """The fastest of plain speculation and the target alone, and the fastest hierarchy, as predicted at these times:
    competitor, number of its setting, tokens per second.
    """
    sides = [[one for one in decoded if (one.num_levels == 3) == is_hierarchy] for is_hierarchy in (False, True)]
    return [max(((one, *best_setting(one.played, times)) for one in side), key=itemgetter(2)) for side in sides]


def third_level_frame(decoded: Sequence[Decoded], times: Times, shares: Mapping[str, float]) -> pd.DataFrame:
    """The gain of the best hierarchy over the best plain speculation on a fine grid of t_micro / t_draft, at round
    t_draft / t_target and at the fitted one.

    `shares` are t_stop / t_draft of each kind of stop. `low` and `high` are the 95 % interval of the gain between the
    two winners; it does not include that each is the best of several on the same prompts.
    """
    rows = []
    measured_ratio = times.t_draft_s / times.alone_s
    for draft_ratio, micro_ratio in product(sorted({*_DRAFT_RATIOS, measured_ratio}), _FINE):
        at = at_ratios(micro_ratio * draft_ratio, draft_ratio, shares)
        (plain, of_plain, plain_speed), (best, of_best, speed) = fastest_sides(decoded, at)
        row = {
            "draft_ratio": draft_ratio,
            "micro_ratio": micro_ratio,
            "is_here": draft_ratio == measured_ratio,
            "gain": speed / plain_speed - 1,
            "low": None,
            "high": None,
            "plain": result_name(plain.result(of_plain)),
            "hierarchy": result_name(best.result(of_best)),
        }
        if micro_ratio in MICRO_RATIOS:  # a bootstrap for every point of the fine grid would take minutes
            gain = gain_over(at.throughput(plain.played).at(of_plain), at.throughput(best.played).at(of_best))
            row |= {"low": gain.low, "high": gain.high}
        rows.append(row)
    return pd.DataFrame(rows)


def result_name(result: Result) -> str:
    """Name and setting."""
    return f"{result.family} {result.label}".removesuffix(" -")


def gain_table(gain: pd.DataFrame, *, split: str) -> Table:
    """The gain in per cent, and where it is positive; `split` is that of the prompts that choose and report."""
    rows = []
    for draft_ratio, label, group in _by_draft_ratio(gain):
        at = 100 * group.set_index("micro_ratio")[["gain", "low", "high"]].loc[list(MICRO_RATIOS)].astype(float)
        # without an interval its ends are NaN in the frame
        cells = {
            f"{ratio:g}": f"{value:+.1f}" if np.isnan(low) else f"{value:+.1f} ({low:.1f}, {high:.1f})"
            for ratio, value, low, high in at.itertuples()
        }
        rows.append({"t_draft / t_target": f"{draft_ratio:.3g}{label}", **cells, "pays at": paying(group)})
    title = (
        "best hierarchy over best plain speculation in per cent (95 % interval), predicted, each at its best setting; "
        "columns: t_micro / t_draft"
    )
    return Table(title, rows, f"both sides are chosen on the prompts that they are reported on, the {split} prompts")


def third_level_verdict(
    test: Sequence[Decoded], dev: Sequence[Decoded], gain: pd.DataFrame, *, times: Times, r2: float = 1.0
) -> str:
    """Whether a third level pays, in words. Dev chooses both sides, test reports them."""
    on_test = {member.competitor.family: member for member in test}
    plain, best = (on_test[one.competitor.family].result() for one, *_ in fastest_sides(dev or test, times))
    hierarchy = f"the best hierarchy, {result_name(best)},"
    speculation = f"the best plain speculation, {result_name(plain)}"
    lines = [
        f"Measured here (t_draft / t_target = {times.t_draft_s / times.alone_s:.3f}, t_micro / t_draft = "
        f"{times.t_micro_s / times.t_draft_s:.2f}), both sides chosen on {'dev' if dev else 'the same prompts'}: "
        f"{conclusion(hierarchy, best.over(plain), speculation, len(plain.throughput.tokens))}."
    ]
    lines += [
        f"From the counts, with t_draft / t_target {'as here' if label else f'{ratio:g}'}, a third level pays at "
        f"t_micro / t_draft: {paying(group)}; best gain {100 * group['gain'].max():+.1f} %."
        for ratio, label, group in _by_draft_ratio(gain)
    ]
    if r2 < _QUIET:
        lines.append(
            f"The three times explain only R² = {r2:.2f} of the wall clock: this machine was busy. Trust the "
            "predictions from counts at given ratios; to measure speed-ups again, delete the folder and run again."
        )
    return "\n".join(lines)


def paying(group: pd.DataFrame) -> str:
    """The ranges of t_micro / t_draft in which the gain is positive, at one t_draft / t_target."""
    pays = group["gain"] > 1e-9
    # pays = [1, 1, 0, 1]: the ranges are 0 to 1 and 3 to 3
    ranges = group["micro_ratio"][pays].groupby((~pays).cumsum()[pays]).agg(["first", "last"])
    return " or ".join(f"{low:.2f}-{high:.2f}" for low, high in ranges.to_numpy()) or "none in 0-1"


def third_level_plot(gain: pd.DataFrame, name: str) -> Plot:
    """The gain against t_micro / t_draft, one line for each t_draft / t_target."""
    figure, axes = figure_of(3.4)
    for draft_ratio, mark, group in _by_draft_ratio(gain):
        width = 2.4 if mark else 1.2
        axes.plot(group["micro_ratio"], 100 * group["gain"], label=f"{draft_ratio:.3g}{mark}", linewidth=width)
    axes.axhline(0, color=GREY, linestyle="--", linewidth=1)
    axes.set(xlabel="t_micro / t_draft", ylabel="gain of a third level, %")
    axes.legend(title="t_draft / t_target", fontsize=7, title_fontsize=7, frameon=False)
    caption = "Best hierarchy over best plain speculation, from counts, each at its best setting for the times."
    return plot_of(f"third-level-{name}", caption, figure)


def _by_draft_ratio(gain: pd.DataFrame) -> Iterator[tuple[float, str, pd.DataFrame]]:
    """(t_draft / t_target, " (here)" for the fitted one, its rows)."""
    for ratio, group in gain.groupby("draft_ratio"):
        yield float(ratio), " (here)" if group["is_here"].any() else "", group  # type: ignore[arg-type]

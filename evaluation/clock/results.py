"""`evaluation evaluate --clock`: clocked generations beside what the times predict of the same prompts (law 4.9).

Every family decodes at the setting that dev chose, in real generations that the trace is played to, and so does the
target alone. The oracle and the perfect head are left out: they know what no loop knows.

    difference            clocked tokens/s over predicted ones - 1
    draft, verify, rest   clocked less predicted seconds of drafts, of verifications, and between rounds (where nothing
                          is predicted), over all predicted seconds
    common                median difference of all families: the machine's speed now against that when it was timed
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from decode.experiment import Experiment
from decode.policies import FixedLength
from evaluation.clock.turns import PrimedLoop, clock, replayed_on
from evaluation.competitor import Competitor
from evaluation.contest import Contest, Result, replay_arms, result_of
from evaluation.families import ALONE, BASELINE, REPLAYED, family, styles_of
from evaluation.figure import GREY, Plot, figure_of, legend_below, plot_of
from evaluation.gain import Splits, Throughput, gain_over
from evaluation.played import Played
from evaluation.table import Table, flat, shown
from evaluation.times import Times
from evaluation.traces.trace import Array, Trace

TOLERANCE = 0.03
"""A difference beyond this is pointed out."""
_PARTS = ("draft", "verify", "rest")
_COLUMNS = {
    "setting": ("setting", ""),
    "predicted tokens/s": ("predicted_tokens_per_s", ".1f"),
    "clocked tokens/s": ("clocked_tokens_per_s", ".1f"),
    "difference": ("difference", "+.1%"),
}


@dataclass(frozen=True, kw_only=True)
class ClockReport:
    """The clock's rows of one dataset."""

    dataset: str
    about: str
    """One line on what was timed."""
    rows: Sequence[Mapping[str, Any]]
    """A family and its setting, predicted and clocked tokens per second, their difference and its parts, and the
    predicted and the clocked gain over the best fixed length.
    """

    @property
    def common(self) -> float:
        """Median difference of all families, the machine's speed."""
        return float(np.median([row["difference"] for row in self.rows]))

    @property
    def verdict(self) -> str:
        """The families that differ by more than `TOLERANCE`, and the part of a round that they differ in."""
        beyond = [row for row in self.rows if abs(row["difference"]) > TOLERANCE]
        if not beyond:
            return f"every family is within {TOLERANCE:.0%} of its prediction"
        listed = ", ".join(
            f"{row['family']} {row['difference']:+.1%}, most of it {max(_PARTS, key=lambda part: abs(row[part]))}"
            for row in beyond
        )
        relative = {row["family"]: (1 + row["difference"]) / (1 + self.common) - 1 for row in self.rows}
        others = ", ".join(f"{name} {part:+.1%}" for name, part in relative.items() if abs(part) > TOLERANCE)
        return (
            f"beyond {TOLERANCE:.0%} of the prediction: {listed}; {self.common:+.1%} is the median of all families; "
            f"beyond {TOLERANCE:.0%} of that median: {others or 'none'}"
        )

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON has it."""
        report = {"dataset": self.dataset, "about": self.about, "verdict": self.verdict, "common": self.common}
        return report | {"rows": [flat(row) for row in self.rows]}

    @property
    def table(self) -> Table:
        """A row for each family."""
        rows = [
            {
                "policy": family(row["family"]).label,
                **cells,
                **{f"of it {part}": f"{row[part]:+.1%}" for part in _PARTS},
                "predicted gain": row["predicted_gain"].text,
                "clocked gain": row["clocked_gain"].text,
            }
            for row, cells in zip(self.rows, shown(self.rows, _COLUMNS), strict=True)
        ]
        note = f"{self.verdict}; gains over the best fixed length, with 95 % paired bootstrap intervals over prompts"
        return Table(f"{self.dataset} on a clock: {self.about}", rows, note, names=2)

    @property
    def plot(self) -> Plot:
        """Plot of clocked over predicted tokens per second."""
        figure, axes = figure_of(5.2)
        predicted, clocked = (
            np.array([row[f"{kind}_tokens_per_s"] for row in self.rows]) for kind in ("predicted", "clocked")
        )
        ends = np.array([min(predicted.min(), clocked.min()), max(predicted.max(), clocked.max())])
        axes.fill_between(ends, ends * (1 - TOLERANCE), ends * (1 + TOLERANCE), color=GREY, alpha=0.25, linewidth=0)
        axes.plot(ends, ends, color=GREY, linestyle="--", linewidth=1)
        styles = styles_of(row["family"] for row in self.rows)
        for row, *point in zip(self.rows, predicted, clocked, strict=True):
            colour, _, marker = styles[row["family"]]
            axes.plot(*point, marker, color=colour, markersize=5, label=family(row["family"]).label)
        axes.set(xlabel="predicted tokens/s", ylabel="clocked tokens/s")
        legend_below(axes)
        return plot_of(
            f"clock-{self.dataset}",
            f"Clocked against predicted tokens/s; the band is {TOLERANCE:.0%} wide each way.",
            figure,
        )


def report_of(
    seconds: Float[Array, "runner repeat row part"],
    agrees: Bool[Array, " row"],
    runners: Sequence[Result],
    times: Times,
    *,
    dataset: str,
    rows: Sequence[int],
) -> ClockReport:
    """Every runner, over the rows that all of them decoded as replayed; rows of one prompt, such as the turns of a
    conversation, count together.

    Args:
        seconds, agrees: as `clock` returns them.
        runners: the best fixed length among them.
        times: predict them.
        dataset: its name.
        rows: numbers of the clocked rows on the test split.

    Raises:
        ValueError: there is no such row.
    """
    if not agrees.any():
        raise ValueError(
            f"{dataset}: no response is decoded as it was replayed; record the trace again with the models as they are "
            "now"
        )
    agreeing = [row for row, is_same in zip(rows, agrees, strict=True) if is_same]
    every, timed = [replayed_on(runner, agreeing) for runner in runners], seconds[:, :, agrees]
    wall_s = np.median(timed[..., 0], axis=1)
    predicted = [_by_prompt(played, times.time_s(played)[0]) for played in every]
    measured = [_by_prompt(played, wall_s[number]) for number, played in enumerate(every)]
    base = [runner.family for runner in runners].index(BASELINE)
    results = [
        {
            "family": runner.family,
            "setting": runner.label,
            "predicted_tokens_per_s": expected.tokens_per_s,
            "clocked_tokens_per_s": throughput.tokens_per_s,
            "difference": throughput.tokens_per_s / expected.tokens_per_s - 1,
            **_parts(wall_s[number].sum(), timed[number].sum((0, 1)), every[number], times),
            "predicted_gain": gain_over(predicted[base], expected),
            "clocked_gain": gain_over(measured[base], throughput),
        }
        for number, (runner, expected, throughput) in enumerate(zip(runners, predicted, measured, strict=True))
    ]
    about = _about(len(measured[0].tokens), agrees, num_repeats=seconds.shape[1])
    return ClockReport(dataset=dataset, about=about, rows=results)


def _about(num_prompts: int, agrees: Bool[Array, " row"], *, num_repeats: int) -> str:
    num_rows, num_left_out = int(agrees.sum()), int((~agrees).sum())
    about = f"{num_rows} responses to " * (num_prompts < num_rows) + (
        f"{num_prompts} test prompts, medians of {num_repeats} generations each, prompts read beforehand"
    )
    if num_left_out:
        about += f"; {num_left_out} responses left out, where a threshold falls between the last bits of loop and trace"
    return about


def _by_prompt(played: Played, seconds: Array) -> Throughput:
    _, numbers = np.unique(played.prompt_of_row, return_inverse=True)
    tokens = np.bincount(numbers, played.counts.num_emitted[0])
    return Throughput(tokens.astype(np.int64), np.bincount(numbers, seconds))


def _parts(wall_s: float, totals_s: Array, played: Played, times: Times) -> dict[str, float]:
    """Clocked less predicted seconds of each part, over all predicted seconds; each part has its share of `wall_s`."""
    total_s, lengths = float(times.time_s(played).sum()), played.lengths[0].sum(0)
    verify_s = float(lengths @ times.target_s(np.arange(len(lengths))))
    draft, verify = wall_s * totals_s[1:] / totals_s[0]
    seconds = (draft - (total_s - verify_s), verify - verify_s, wall_s - draft - verify)
    return {part: float(part_s / total_s) for part, part_s in zip(_PARTS, seconds, strict=True)}


def check_clock(num_prompts: int, repeats: int, *, as_recorded: bool = False) -> None:
    """Raise ValueError unless a clock can run so often; on a record, which may have no prompts, it cannot at all."""
    if num_prompts > 0 and as_recorded:
        raise ValueError("--clock decodes, and decode.as_recorded has neither models nor prompts; give one of the two")
    if num_prompts < 0:
        raise ValueError(f"clock is {num_prompts}; it is a number of test prompts, 0 for none")
    if repeats < 1:
        raise ValueError(f"repeats is {repeats}; every generation is timed at least once")


def clock_dataset(
    experiment: Experiment, contest: Contest, test: Trace, *, num_prompts: int, repeats: int
) -> ClockReport:
    """The first test prompts of one dataset, every turn of each once, on the loop of the config."""
    loop, rows, times = PrimedLoop.of(experiment), rows_of(test, num_prompts), contest.times
    alone = next(replay_arms([Competitor(ALONE, ALONE, FixedLength(0), ({},))], Splits(test, test)))
    runners = [result_of(alone, 0, times)]
    runners += [result for name, result in contest.results.items() if name not in REPLAYED]
    clocked = clock(loop, runners, test.select(rows), rows, repeats=repeats, name=contest.dataset)
    return report_of(*clocked, runners, times, dataset=contest.dataset, rows=rows)


def rows_of(trace: Trace, num_prompts: int) -> list[int]:
    """Rows of the first prompts, each turn with its first draw."""
    firsts = {(row.dataset, row.id): number for number, row in reversed([*enumerate(trace.rows)])}
    return sorted(number for number in firsts.values() if trace.prompt_of_row[number] < num_prompts)

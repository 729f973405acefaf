"""`evaluation evaluate` on a clock: what it said beside what replay and the cost model predict of the same prompts (law
4.9).

Every family plays at the setting that dev chose, in real generations that the trace is played to. The oracle and the
perfect head know what no loop knows, so they are not there; the target alone is.

difference            clocked tokens/s over predicted ones - 1
draft, verify, rest   where it lies: clocked less predicted seconds of drafts, of verifications, and between rounds
                      (where nothing is predicted), over all predicted seconds; less time in them means more tokens/s
common                the median of all differences: the machine's pace today against that when its costs were measured
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from decode.experiment import Experiment
from decode.policies import FixedLength
from evaluation.clock.primed import PrimedLoop
from evaluation.clock.turns import Clocked, clock, replayed_on
from evaluation.competitor import Competitor
from evaluation.contest import Contest, Result, replay_arms, result_of
from evaluation.families import ALONE, BASELINE, BOUNDS, family, styles_of
from evaluation.figure import GREY, Plot, figure_of, legend_below, plot_of
from evaluation.gain import Spent, Splits, gain_over
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
        """Median difference of all families, the machine's pace."""
        return float(np.median([row["difference"] for row in self.rows]))

    @property
    def verdict(self) -> str:
        """The families that differ by more than `TOLERANCE`, and the part of a round that they differ in."""
        beyond = [row for row in self.rows if abs(row["difference"]) > TOLERANCE]
        if not beyond:
            return f"every family is within {TOLERANCE:.0%} of its prediction"
        listed = ", ".join(
            f"{row['family']} {row['difference']:+.1%} (most of it: {max(_PARTS, key=lambda part: abs(row[part]))})"
            for row in beyond
        )
        against_pace = {row["family"]: (1 + row["difference"]) / (1 + self.common) - 1 for row in self.rows}
        apart = ", ".join(
            f"{name} {difference:+.1%}" for name, difference in against_pace.items() if abs(difference) > TOLERANCE
        )
        pace = f"{self.common:+.1%} is the median of all families, the machine's pace"
        return (
            f"beyond {TOLERANCE:.0%} of the prediction: {listed}; {pace}; beyond {TOLERANCE:.0%} of that pace: "
            f"{apart or 'none'}"
        )

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON has it."""
        return {
            "dataset": self.dataset,
            "about": self.about,
            "verdict": self.verdict,
            "common": self.common,
            "rows": [flat(row) for row in self.rows],
        }

    @property
    def sheet(self) -> Table:
        """The table of every family."""
        note = f"{self.verdict}; gains over the best fixed length, with 95 % paired bootstrap intervals over prompts"
        rows = [
            {
                "policy": family(row["family"]).label,
                **cells,
                "of it draft / verify / rest": " / ".join(f"{row[part]:+.1%}" for part in _PARTS),
                "predicted gain": row["predicted_gain"].text,
                "clocked gain": row["clocked_gain"].text,
            }
            for row, cells in zip(self.rows, shown(self.rows, _COLUMNS), strict=True)
        ]
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
        for row, *place in zip(self.rows, predicted, clocked, strict=True):
            colour, _, marker = styles[row["family"]]
            axes.plot(*place, marker, color=colour, markersize=5, label=family(row["family"]).label)
        axes.set(xlabel="predicted tokens/s", ylabel="clocked tokens/s")
        legend_below(axes)
        return plot_of(
            f"clock-{self.dataset}",
            f"Clocked against predicted tokens/s; the band is {TOLERANCE:.0%} wide each way.",
            figure,
        )


def report_of(
    clocked: Clocked, runners: Sequence[Result], cost: Times, *, dataset: str, rows: Sequence[int]
) -> ClockReport:
    """Every runner, over the rows that all of them played as replayed; rows of one prompt, such as the turns of a
    conversation, count together.

    Args:
        clocked: seconds of the rows.
        runners: the best fixed length among them.
        cost: predicts them.
        dataset: its name.
        rows: numbers of the clocked rows on the test split.

    Raises:
        ValueError: there is no such row.
    """
    kept = clocked.agrees
    if not kept.any():
        raise ValueError(
            f"{dataset}: no response is decoded as it was replayed; record the trace again with the models as they are "
            "now"
        )
    replays = [replayed_on(runner, rows) for runner in runners]
    predicted = [_by_prompt(replayed, cost.time_s(replayed)[0, kept], kept) for replayed in replays]
    measured = [_by_prompt(replayed, clocked.wall_s(number), kept) for number, replayed in enumerate(replays)]
    base = next(number for number, runner in enumerate(runners) if runner.family == BASELINE)
    results = []
    for number, runner in enumerate(runners):
        expected, spent = predicted[number], measured[number]
        results.append(
            {
                "family": runner.family,
                "setting": runner.label,
                "predicted_tokens_per_s": expected.tokens_per_s,
                "clocked_tokens_per_s": spent.tokens_per_s,
                "difference": spent.tokens_per_s / expected.tokens_per_s - 1,
                **_parts(clocked, number, replays[number], cost=cost),
                "predicted_gain": gain_over(predicted[base], expected),
                "clocked_gain": gain_over(measured[base], spent),
            }
        )
    about = _about(clocked, num_prompts=len(measured[0].tokens))
    return ClockReport(dataset=dataset, about=about, rows=results)


def _by_prompt(replayed: Played, seconds: Array, kept: Array) -> Spent:
    """Tokens and seconds of each prompt, its kept rows together."""
    _, numbers = np.unique(replayed.prompt_of_row[kept], return_inverse=True)
    tokens = np.bincount(numbers, replayed.counts.num_emitted[0, kept])
    return Spent(tokens.astype(np.int64), np.bincount(numbers, seconds))


def _about(clocked: Clocked, *, num_prompts: int) -> str:
    """One line on what was timed."""
    num_rows, num_repeats = int(clocked.agrees.sum()), clocked.seconds.shape[1]
    about = f"{num_prompts} test prompts, medians of {num_repeats} generations each, prompts read beforehand"
    about = f"{num_rows} responses to {about}" if num_prompts < num_rows else about
    if left_out := len(clocked.agrees) - num_rows:
        about += f"; {left_out} responses left out, where a threshold falls between the last bits of loop and trace"
    return about


def _parts(clocked: Clocked, number: int, replayed: Played, *, cost: Times) -> dict[str, float]:
    """Clocked less predicted seconds of each part, over all predicted seconds."""
    kept = clocked.agrees
    total_s = float(cost.time_s(replayed)[0, kept].sum())
    verify_s = float((replayed.lengths[0, kept] @ cost.target_s(np.arange(replayed.lengths.shape[-1]))).sum())
    wall_s = float(clocked.wall_s(number).sum())
    spent = {"draft": wall_s * clocked.share(number, "draft_s"), "verify": wall_s * clocked.share(number, "target_s")}
    spent["rest"] = wall_s - sum(spent.values())
    expected = {"draft": total_s - verify_s, "verify": verify_s, "rest": 0.0}
    return {part: (spent[part] - expected[part]) / total_s for part in expected}


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
    runners += [result for name, result in contest.results.items() if name not in BOUNDS]
    clocked = clock(loop, runners, test.select(rows), rows, repeats=repeats, name=contest.dataset)
    return report_of(clocked, runners, times, dataset=contest.dataset, rows=rows)


def rows_of(trace: Trace, num_prompts: int) -> list[int]:
    """Rows of the first prompts, each turn with its first draw."""
    return sorted(row for row in trace.first_draws if trace.prompt_of_row[row] < num_prompts)

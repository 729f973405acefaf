"""Views of the results of an evaluation: every figure as a frame, the curve of a threshold, and gains by part of the
prompts. Everything is a pandas DataFrame.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
from jaxtyping import Int

from decode.loop.counts import Counts
from decode.policies.base import Policy
from evaluation.contest import Contest, Result
from evaluation.families import BASELINE
from evaluation.gain import gain_over
from evaluation.played import Played
from evaluation.report.conclusion import near_best
from evaluation.traces.replay import Rounds, replay_rounds
from evaluation.traces.trace import Array, Trace, TraceRow

BY = ("category", "prompt_length", "response_position")
"""What the test prompts can be divided by."""
_NUM_PARTS = 4
"""Groups of prompts by length, and parts of the longest response."""


def frame_of(contests: Iterable[Contest]) -> pd.DataFrame:
    """A row for each family of each contest and each split, at the setting that dev chose: `dataset`, `times`,
    `family`, `setting`, `split`, `tokens_per_s`; and `gain` over the best fixed length on the same prompts, with its
    95 % interval, `low` and `high`, which fewer than 10 prompts do not have. On dev the gain is optimistic, because dev
    chose the setting.
    """
    rows = []
    for contest in contests:
        for name, result in contest.results.items():
            row = {"dataset": contest.dataset, "times": contest.times.title, "family": name, "setting": result.label}
            gain = _on_dev(result).over(_on_dev(contest.baseline))
            rows.append({**row, "split": "dev", "tokens_per_s": result.on_dev, **gain.interval})
            gain = contest.gain(name)
            rows.append({**row, "split": "test", "tokens_per_s": result.tokens_per_s, **gain.interval})
    return pd.DataFrame(rows)


def threshold_of(result: Result) -> str | None:
    """The one parameter by which the settings of a family's arm differ, if it is a number that is no count."""
    settings = result.competitor.settings
    varying = [key for key in settings[0] if len({setting[key] for setting in settings}) > 1]
    if len(varying) != 1 or not isinstance(settings[0][varying[0]], float):
        return None
    return varying[0]


def threshold_curve(contest: Contest, result: Result) -> pd.DataFrame:
    """The gain over the best fixed length on test by threshold, the lowest first: a column with the name of the
    parameter, `gain`, `low` and `high` (95 % over prompts; the error of measured times, which moves all thresholds
    alike, is left out); `is_chosen`: dev's choice; `is_equal`: the thresholds around it that dev cannot tell from it.

    Raises:
        ValueError: the settings of the family do not differ by one threshold alone.
    """
    parameter = threshold_of(result)
    if parameter is None or result.arm is None:
        raise ValueError(f"{result.family} has no curve: its settings do not differ by one threshold alone")
    throughput = contest.times.throughput(result.arm.test)
    near = near_best(result, contest.times)
    equal_values = [] if near is None else near[1]
    rows = []
    for number, setting in enumerate(result.competitor.settings):
        value = setting[parameter]
        gain = gain_over(contest.baseline.throughput, throughput.at(number))
        is_chosen = number == result.number
        rows.append(
            {parameter: value, **gain.interval, "is_chosen": is_chosen, "is_equal": is_chosen or value in equal_values}
        )
    return pd.DataFrame(rows).sort_values(parameter, ignore_index=True)


def parts_of(contest: Contest, traces: Sequence[Trace], by: str) -> pd.DataFrame:
    """Gains on parts of the test prompts, at the settings that dev chose for all of them: `part`, `num_prompts`,
    `family`, `setting`, `tokens_per_s`, `gain`, `low`, `high`. A part of fewer than 10 prompts has no interval.

    Args:
        contest: of these prompts.
        traces: of the test prompts, in the contest's order.
        by: category, as the prompts have it; prompt_length, in tokens, in quarters of the prompts; or
            response_position, where a round starts in its response, in quarters of the longest response.

    Raises:
        ValueError: another `by`, or a trace without prompts (a published record) for prompt_length.
    """
    if by not in BY:
        raise ValueError(f"by is {by!r}; it is one of {', '.join(BY)}")
    rows = [row for trace in traces for row in trace.rows]
    is_by_row = by != "response_position"
    parts = _by_row(contest, _labels(rows, by)) if is_by_row else _by_position(contest, traces, rows)
    records = []
    for label, results in parts.items():
        base = results[BASELINE]
        for name, result in results.items():
            part = {"part": label, "num_prompts": len(base.throughput.tokens), "family": name, "setting": result.label}
            records.append({**part, "tokens_per_s": result.tokens_per_s, **result.over(base).interval})
    return pd.DataFrame(records)


def _on_dev(result: Result) -> Result:
    assert result.arm is not None, "dev chose it from an arm"
    return replace(result, played=result.arm.dev.select([result.number]))


def _labels(rows: Sequence[TraceRow], by: str) -> list[str]:
    if by == "category":
        return [row.category or "none" for row in rows]
    lengths = np.array([len(row.prompt_ids) for row in rows])
    if not lengths.any():
        raise ValueError("this trace was published without prompts, so their lengths are unknown")
    edges = np.unique(np.quantile(lengths, np.linspace(0, 1, _NUM_PARTS + 1), method="nearest"))
    return _ranges(lengths, edges)


def _ranges(values: Int[Array, " row"], edges: Int[Array, " edge"]) -> list[str]:
    """The range of ascending edges that each value is in, such as 12-30; the last one includes its end."""
    if len(edges) == 1:
        return [str(edges[0])] * len(values)
    number = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, len(edges) - 2)
    last = np.append(edges[1:-1] - 1, edges[-1])
    return [f"{edges[index]}-{last[index]}" for index in number]


def _by_row(contest: Contest, labels: Sequence[str]) -> dict[str, dict[str, Result]]:
    """Part -> family -> its result on the rows of that part; parts in ascending order."""
    parts: dict[str, dict[str, Result]] = {}
    for label in sorted(set(labels), key=lambda label: (len(label), label)):
        rows = [number for number, of_row in enumerate(labels) if of_row == label]
        parts[label] = {
            name: replace(result, played=result.played.select([0], rows)) for name, result in contest.results.items()
        }
    return parts


def _by_position(contest: Contest, traces: Sequence[Trace], rows: Sequence[TraceRow]) -> dict[str, dict[str, Result]]:
    """Part of the responses -> family -> its result on the rounds that start there, for the prompts that reach it."""
    prompt_of_row = contest.baseline.played.prompt_of_row
    lengths = np.array([len(row.response_ids) for row in rows])
    edges = np.unique(np.linspace(0, lengths.max(), _NUM_PARTS + 1).astype(int))
    numbers = range(len(edges) - 1)
    reached = [np.isin(prompt_of_row, prompt_of_row[lengths > edges[number]]).nonzero()[0] for number in numbers]
    parts: dict[str, dict[str, Result]] = {f"{edges[number]}-{edges[number + 1] - 1}": {} for number in numbers}
    for name, result in contest.results.items():
        every = played_by_position(result.policy, result.played, traces, edges)
        for number, label in enumerate(parts):
            parts[label][name] = replace(result, played=every[number].select([0], reached[number]))
    return parts


def played_by_position(
    policy: Policy, played: Played, traces: Sequence[Trace], edges: Int[Array, " edge"]
) -> list[Played]:
    """What one setting does in each part of the responses, by where its rounds start; `played`: in whole responses."""
    rounds = _joined_rounds([replay_rounds(trace, policy) for trace in traces], traces)
    part = np.searchsorted(edges, _starts(rounds), side="right") - 1
    every = []
    for number in range(len(edges) - 1):
        within = Rounds(*(column[part == number] for column in rounds))
        every.append(_played_in(within, played))
    return every


def _joined_rounds(every: Sequence[Rounds], traces: Sequence[Trace]) -> Rounds:
    """The rounds of several traces, of one setting, whose rows are numbered one after the other."""
    firsts = np.cumsum([0, *(len(trace.rows) for trace in traces)])
    numbered = [rounds._replace(lane=rounds.lane + first) for rounds, first in zip(every, firsts, strict=False)]
    return Rounds.joined(numbered)


def _starts(rounds: Rounds) -> Int[Array, " round"]:
    """The position in its response at which each round starts; rounds are in order, lane after lane."""
    before = np.cumsum(rounds.emitted) - rounds.emitted
    _, first, lane = np.unique(rounds.lane, return_index=True, return_inverse=True)
    return before - before[first][lane]


def _played_in(rounds: Rounds, played: Played) -> Played:
    size = played.lengths.shape[1]
    lengths = np.zeros_like(played.lengths)
    np.add.at(lengths[0], (rounds.lane, rounds.drafted), 1)
    emitted, forwards = (
        np.bincount(rounds.lane, column, minlength=size)[None].astype(int)
        for column in (rounds.emitted, rounds.forwards)
    )
    return replace(played, counts=Counts(num_emitted=emitted, num_draft_forwards=forwards), lengths=lengths)

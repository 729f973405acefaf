"""`evaluation evaluate --clock`: clocked generations beside what the times predict of the same prompts (law 4.9).

Every family decodes at the setting that dev chose, in real generations that the trace is played to
(`evaluation.traces.sampler`), and so does the target alone. The oracle and the perfect head are left out: they know
what no loop knows. `evaluation.sources.primed` runs the clock.

    difference            clocked tokens/s over predicted ones - 1
    draft, verify, rest   clocked less predicted seconds of drafts, of verifications, and between rounds (where nothing
                          is predicted), over all predicted seconds
    common                median difference of all families: the machine's speed now against that when it was timed

A gain is contradicted if the interval of the clocked one excludes it, and they differ by more than `TOLERANCE`; the
verdict then follows the clock. Times have a pace, which is clocked seconds over predicted ones. A machine that is
slower in all it does has one pace, which changes no gain, so each part of a round is compared with another one:

    t_draft        pace of the drafts of the best fixed length     against that of the target alone
    t_target(k)    pace of its verifications                       against that of the target alone
    a stop         pace of the drafts of its policy                against that of the best fixed length's drafts
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from evaluation.contest import Contest, Result
from evaluation.families import ALONE, BASELINE, family
from evaluation.gain import MIN_PROMPTS
from evaluation.played import Played, latency_of
from evaluation.table import Table, flat, shown
from evaluation.times import CERTAIN, MEASURED, Times

COSTS_AGAIN = "acceptance-heads costs --again"
TOLERANCE = 0.03
"""A difference beyond this is pointed out."""
_PARTS = {"draft": "drafting", "verify": "verification", "rest": "the rest"}
_GAINS = ("predicted_gain", "clocked_gain")
_COLUMNS = {
    "policy": ("policy", ""),
    "setting": ("setting", ""),
    "predicted tokens/s": ("predicted_tokens_per_s", ".1f"),
    "clocked tokens/s": ("clocked_tokens_per_s", ".1f"),
    "difference": ("difference", "+.1%"),
    **{f"of it {words}": (part, "+.1%") for part, words in _PARTS.items()},
    "predicted gain": ("predicted_gain", ""),
    "clocked gain": ("clocked_gain", ""),
    "request p50 s": ("request_p50_s", ".3g"),
    "request p95 s": ("request_p95_s", ".3g"),
    "first token p50 s": ("first_token_p50_s", ".2g"),
    "first token p95 s": ("first_token_p95_s", ".2g"),
}


@dataclass(frozen=True)
class ClockReport:
    """What was predicted and what the clock says of the same families on the same prompts of one dataset."""

    predicted: Contest
    clocked: Contest
    about: str = ""
    """What was clocked, in a few words."""

    @property
    def dataset(self) -> str:
        return self.clocked.dataset

    def difference(self, name: str) -> float:
        """Clocked over predicted tokens per second of a family, less 1."""
        return self.clocked.results[name].tokens_per_s / self.predicted.results[name].tokens_per_s - 1

    def speed_up(self, name: str) -> float:
        """How many times as fast as the target alone a family was on the clock."""
        return self.clocked.results[name].tokens_per_s / self.clocked.results[ALONE].tokens_per_s

    @cached_property
    def common(self) -> float:
        """The median difference of all families."""
        return float(np.median([self.difference(name) for name in self.clocked.results]))

    @cached_property
    def parts(self) -> dict[str, dict[str, float | None]]:
        """Family -> clocked less predicted seconds of each part, over all predicted seconds, and clocked over predicted
        seconds of drafts (None without any) and of verifications.
        """
        return {name: _parts(result.played, self.predicted.times) for name, result in self.clocked.results.items()}

    @property
    def verdict(self) -> str:
        """The families that differ by more than `TOLERANCE`, and the part of a round that they differ in."""
        listed = []
        for name in self.clocked.results:
            difference = self.difference(name)
            if abs(difference) > TOLERANCE:
                sizes = {words: abs(self.parts[name][part] or 0.0) for part, words in _PARTS.items()}
                most = max(sizes, key=sizes.__getitem__)
                listed.append(f"{family(name).label} {difference:+.1%}, most of it {most}")
        if not listed:
            return f"every family is within {TOLERANCE:.0%} of its prediction"
        return (
            f"beyond {TOLERANCE:.0%} of the prediction: {', '.join(listed)}; {self.common:+.1%} is the median of all "
            "families"
        )

    @property
    def rows(self) -> list[dict[str, Any]]:
        """A row for each family, for tables and JSON."""
        return [
            {
                "family": name,
                "setting": result.label,
                "predicted_tokens_per_s": self.predicted.results[name].tokens_per_s,
                "clocked_tokens_per_s": result.tokens_per_s,
                "difference": self.difference(name),
                **self.parts[name],
                "predicted_gain": self.predicted.gain(name),
                "clocked_gain": self.clocked.gain(name),
                **latency_of(result.played),
                "tokens": result.throughput.tokens.tolist(),
                "seconds": result.throughput.seconds.tolist(),
            }
            for name, result in self.clocked.results.items()
        ]

    def as_dict(self) -> dict[str, object]:
        """This dataset's entry of clock.json: what was clocked, its verdict, and a row for every policy."""
        return {
            "dataset": self.dataset,
            "about": self.about,
            "verdict": self.verdict,
            "common": self.common,
            "rows": [flat(row) for row in self.rows],
        }


def clock_table(report: ClockReport) -> Table:
    """A row for each family."""
    rows = [
        row | {name: row[name].text for name in _GAINS} | {"policy": family(row["family"]).label} for row in report.rows
    ]
    note = (
        f"{report.verdict}; gains over the best fixed length, with 95 % paired bootstrap intervals over prompts "
        f"(from {MIN_PROMPTS} on); 50th and 95th percentiles of a request's seconds and of those to its first token, "
        "without reading the prompt"
    )
    return Table(f"{report.dataset} on a clock: {report.about}", shown(rows, _COLUMNS), note, names=2)


def check_clock(num_prompts: int, repeats: int, *, as_recorded: bool = False) -> None:
    """Raise ValueError unless a clock can run so often; on a record, which may have no prompts, it cannot at all."""
    if num_prompts > 0 and as_recorded:
        raise ValueError("--clock decodes, and decode.as_recorded has neither models nor prompts; give one of the two")
    if num_prompts < 0:
        raise ValueError(f"clock is {num_prompts}; it is a number of test prompts, 0 for none")
    if repeats < 1:
        raise ValueError(f"repeats is {repeats}; every generation is timed at least once")


def report_of(
    on_clock: Sequence[Played], runners: Sequence[Result], times: Times, *, dataset: str, about: str = ""
) -> ClockReport:
    """Every runner, the best fixed length among them, predicted and clocked on the same rows; rows of one prompt, such
    as the turns of a conversation, count together. `on_clock`: what each runner did, with its seconds (`clock`).
    """
    predicted = {}
    clocked = {}
    exact = replace(times, errors=CERTAIN)  # the error of the times is left out on both sides: the clock shows it
    for runner, played in zip(runners, on_clock, strict=True):
        clocked[runner.family] = replace(runner, played=played, arm=None, times=None)
        predicted[runner.family] = replace(clocked[runner.family], times=exact)
    return ClockReport(Contest(dataset, times, predicted), Contest(dataset, times, clocked), about)


def about_clock(played: Played, num_left_out: int, *, num_repeats: int) -> str:
    """What was clocked, in a few words."""
    num_rows = len(played.prompt_of_row)
    num_prompts = len(np.unique(played.prompt_of_row))
    responses = f"{num_rows} responses to " if num_prompts < num_rows else ""
    about = f"{responses}{num_prompts} test prompts, medians of {num_repeats} generations each, prompts read beforehand"
    if num_left_out:
        about += f"; {num_left_out} responses left out, where a threshold falls between the last bits of loop and trace"
    return about


def _parts(played: Played, times: Times) -> dict[str, float | None]:
    """Clocked less predicted seconds of each part, over all predicted seconds; and clocked over predicted seconds of
    drafts, None without any, and of verifications.
    """
    assert played.seconds is not None
    whole, draft, verify = (float(played.seconds[name].sum()) for name in ("whole_s", "drafting_s", "verifying_s"))
    total_s = float(times.time_s(played).sum())
    lengths = played.lengths[0].sum(0)
    verify_s = float(lengths @ times.target_s(np.arange(len(lengths))))
    seconds = (draft - (total_s - verify_s), verify - verify_s, whole - draft - verify)
    draft_pace = float(draft / (total_s - verify_s)) if played.counts.num_drafted.sum() else None
    paces = {"draft_pace": draft_pace, "verify_pace": float(verify / verify_s)}
    return {part: float(part_s / total_s) for part, part_s in zip(_PARTS, seconds, strict=True)} | paces


def contradicted(report: ClockReport) -> list[str]:
    """The families whose predicted gain over the best fixed length the clock contradicts."""
    names = []
    for name in report.clocked.results:
        clocked = report.clocked.gain(name)
        predicted = report.predicted.gain(name).value
        if clocked.excludes(predicted) and abs(clocked.value - predicted) > TOLERANCE:
            names.append(name)
    return names


def stale_times(report: ClockReport) -> list[str]:
    """Names of the times that explain what the clock contradicts; none if it contradicts nothing."""
    names = contradicted(report)
    if not names:
        return []
    fixed = report.parts[BASELINE]
    alone = report.parts.get(ALONE, fixed)
    stale = []
    if _differs(fixed["draft_pace"], alone["verify_pace"]):
        stale.append("the draft step")
    if _differs(fixed["verify_pace"], alone["verify_pace"]):
        stale.append("the verification of drafted tokens")
    stale += [
        f"the stop of {family(name).label}"
        for name in names
        if _differs(report.parts[name]["draft_pace"], fixed["draft_pace"])
    ]
    return stale


def _differs(pace: float | None, other: float | None) -> bool:
    """Whether two paces differ by more than `TOLERANCE`; None where nothing was predicted."""
    return pace is not None and other is not None and abs(pace / other - 1) > TOLERANCE


def contradiction(report: ClockReport) -> str:
    """What the clock contradicts, the stale times, and the command that measures them again."""
    gains = "; ".join(
        f"{family(name).label} {100 * report.predicted.gain(name).value:+.1f} % predicted, "
        f"{report.clocked.gain(name).words} clocked"
        for name in contradicted(report)
    )
    stale = stale_times(report)
    times = f"Stale times: {', '.join(stale)}." if stale else "No single time explains it."
    first = (
        "" if report.predicted.times.origin.startswith(MEASURED) else "leave out the given times (decode.t_*), and run "
    )
    remedy = f"To renew them, {first}`{COSTS_AGAIN}`."
    return f"The clock contradicts gains over the best fixed length: {gains}. {times} {remedy}"

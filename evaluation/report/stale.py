"""A clock against a prediction (law 4.9): which gains it contradicts, which times are then stale, and the contest by
the clock, which the verdict follows.

A gain is contradicted if the interval of the clocked one excludes it, and they differ by more than `TOLERANCE`. Times
have a pace, which is clocked seconds over predicted ones. A machine that is slower in all it does has one pace, which
changes no gain, so each part of a round is compared with another one:

    t_draft        pace of the drafts of the best fixed length     against that of the target alone
    t_target(k)    pace of its verifications                       against that of the target alone
    a stop         pace of the drafts of its policy                against that of the best fixed length's drafts
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from evaluation.clock import TOLERANCE, Report, Row
from evaluation.contest import Contest
from evaluation.families import ALONE, BASELINE, family
from evaluation.gain import Throughput
from evaluation.times import MEASURED

COSTS_AGAIN = "acceptance-heads costs --again"


def contradicted(report: Report) -> list[Row]:
    """The rows whose predicted gain over the best fixed length the clock contradicts."""
    rows = []
    for row in report["rows"]:
        clocked, predicted = row["clocked_gain"], row["predicted_gain"].value
        if clocked.low is None or clocked.high is None:
            continue
        is_excluded = not clocked.low <= predicted <= clocked.high
        if is_excluded and abs(clocked.value - predicted) > TOLERANCE:
            rows.append(row)
    return rows


def stale_times(report: Report) -> list[str]:
    """Names of the times that explain what the clock contradicts; none if it contradicts nothing."""
    of_family: dict[str, Row] = {row["family"]: row for row in report["rows"]}
    rows = contradicted(report)
    if not rows:
        return []
    fixed = of_family[BASELINE]
    alone = of_family.get(ALONE, fixed)
    stale = []
    if _differs(fixed["draft_pace"], alone["verify_pace"]):
        stale.append("the draft step")
    if _differs(fixed["verify_pace"], alone["verify_pace"]):
        stale.append("the verification of drafted tokens")
    stale += [
        f"the stop of {family(row['family']).label}" for row in rows if _differs(row["draft_pace"], fixed["draft_pace"])
    ]
    return stale


def _differs(pace: float | None, other: float | None) -> bool:
    """Whether two paces differ by more than `TOLERANCE`; None where nothing was predicted."""
    return pace is not None and other is not None and abs(pace / other - 1) > TOLERANCE


def contradiction(report: Report, contest: Contest) -> str:
    """What the clock contradicts, the stale times, and the command that measures them again; empty if nothing."""
    rows = contradicted(report)
    if not rows:
        return ""
    gains = "; ".join(
        f"{family(row['family']).label} {100 * row['predicted_gain'].value:+.1f} % predicted, "
        f"{row['clocked_gain'].words} clocked"
        for row in rows
    )
    stale = stale_times(report)
    times = f"Stale times: {', '.join(stale)}." if stale else "No single time explains it."
    first = "" if contest.times.origin.startswith(MEASURED) else "leave out the given times (decode.t_*), and run "
    remedy = f"To renew them, {first}`{COSTS_AGAIN}`."
    return f"The clock contradicts gains over the best fixed length: {gains}. {times} {remedy}"


def by_the_clock(contest: Contest, report: Report) -> Contest:
    """The contest with clocked instead of predicted seconds, on the prompts that were clocked; of the families,
    those that were.
    """
    results = {}
    for row in report["rows"]:
        if (result := contest.results.get(row["family"])) is not None:
            throughput = Throughput(np.array(row["tokens"]), np.array(row["seconds"]))
            results[row["family"]] = replace(result, throughput=throughput, played=None, arm=None, times=None)
    return Contest(contest.dataset, contest.times, results)


def clocked_speed_up(report: Report, name: str) -> float:
    """How many times as fast as the target alone a family was on the clock."""
    speeds: Mapping[str, Any] = {row["family"]: row["clocked_tokens_per_s"] for row in report["rows"]}
    return float(speeds[name] / speeds[ALONE])

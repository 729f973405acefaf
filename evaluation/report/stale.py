"""A clock against a prediction (law 4.9): which gains it contradicts, which times are then stale, and the contest by
the clock, which the verdict follows.

A gain is contradicted if the interval of the clocked one excludes it, and they differ by more than `TOLERANCE`. Times
have a pace, which is clocked seconds over predicted ones. A machine that is slower in all it does has one pace, which
changes no gain, so each part of a round is compared with another one:

    t_draft        pace of the drafts of the best fixed length     against that of the target alone
    t_target(k)    pace of its verifications                       against that of the target alone
    a stop         pace of the drafts of its policy                against that of the best fixed length's drafts
"""

from evaluation.clock import TOLERANCE, ClockReport
from evaluation.contest import Contest
from evaluation.families import ALONE, BASELINE, family
from evaluation.times import MEASURED

COSTS_AGAIN = "acceptance-heads costs --again"


def contradicted(report: ClockReport) -> list[str]:
    """The families whose predicted gain over the best fixed length the clock contradicts."""
    names = []
    for name in report.clocked.results:
        clocked = report.clocked.gain(name)
        predicted = report.predicted.gain(name).value
        if clocked.low is None or clocked.high is None:
            continue
        is_excluded = not clocked.low <= predicted <= clocked.high
        if is_excluded and abs(clocked.value - predicted) > TOLERANCE:
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


def contradiction(report: ClockReport, contest: Contest) -> str:
    """What the clock contradicts, the stale times, and the command that measures them again; empty if nothing."""
    names = contradicted(report)
    if not names:
        return ""
    gains = "; ".join(
        f"{family(name).label} {100 * report.predicted.gain(name).value:+.1f} % predicted, "
        f"{report.clocked.gain(name).words} clocked"
        for name in names
    )
    stale = stale_times(report)
    times = f"Stale times: {', '.join(stale)}." if stale else "No single time explains it."
    first = "" if contest.times.origin.startswith(MEASURED) else "leave out the given times (decode.t_*), and run "
    remedy = f"To renew them, {first}`{COSTS_AGAIN}`."
    return f"The clock contradicts gains over the best fixed length: {gains}. {times} {remedy}"


def by_the_clock(contest: Contest, report: ClockReport) -> Contest:
    """The contest with clocked instead of predicted seconds, on the prompts that were clocked; of the families,
    those that were.
    """
    results = {name: result for name, result in report.clocked.results.items() if name in contest.results}
    return Contest(contest.dataset, contest.times, results)


def clocked_speed_up(report: ClockReport, name: str) -> float:
    """How many times as fast as the target alone a family was on the clock."""
    results = report.clocked.results
    return results[name].tokens_per_s / results[ALONE].tokens_per_s

"""Which setting of each competitor goes to the test prompts: the fastest on dev, by counts times times.

    T = a rounds + b num_draft_forwards + c rounds + d N_draft

a and b are fitted to the seconds of drafting, c and d to those of verifying, over all generations that the competitor's
settings wrote on dev (least absolute deviations: a stall of the machine moves no time). So a tree pays for the nodes
that it verifies and a stop for its own work in every draft step (law 4.9), and one setting's noise on the clock does
not choose it. The clock judges on test.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from decode.loop.counts import Counts
from evaluation.hierarchies.runs import Run, at_settings, best_on_dev
from evaluation.hierarchies.times import least_absolute
from evaluation.intervals import Spent
from evaluation.papers.drafts import Contest


class ModelledTimes(NamedTuple):
    """a, b, c and d, in seconds."""

    begin_s: float
    draft_s: float
    verify_s: float
    node_s: float

    def spent(self, run: Run) -> Spent:
        """The tokens of each prompt, and T."""
        return run.spent([float(np.dot(self, [*_drafting(counts), *_verifying(counts)])) for counts in run.each])


def finalists_of(contest: Contest, dev: Sequence[Run]) -> Contest:
    """The contest at the settings that are clocked on test: the published length, and what dev chooses.

    Args:
        contest: all settings.
        dev: what they did on dev.

    Raises:
        ValueError: something is to be chosen, and there is no dev prompt.
    """
    names = {one.name for one in contest.competitors}
    runs = [run for run in dev if run.competitor.name in names]
    if not (runs and runs[0].decoded) and any(len(one.settings) > 1 for one in contest.competitors):
        raise ValueError(
            "fixed lengths and thresholds are chosen on dev prompts, and there are none; raise decode.num_dev"
        )
    times = {name: fitted([run for run in runs if run.competitor.name == name]) for name in names} if runs else {}
    best = best_on_dev(runs, lambda run: times[run.competitor.name].spent(run).tokens_per_s)
    fixed, *stops = at_settings(contest.competitors, best)
    lengths = {setting.key: setting for setting in (contest.published, fixed.settings[0]) if setting is not None}
    return contest._replace(
        fixed=replace(fixed, settings=tuple(lengths.values())),
        stops=tuple(stops),
        best=fixed.settings[0],
    )


def fitted(runs: Sequence[Run]) -> ModelledTimes:
    """The times of one competitor, from all its settings; rounds that read a prompt are left out.

    Raises:
        ValueError: no generation has a second round.
    """
    decoded = [one for run in runs for one in run.decoded if one.later.num_target]
    if not decoded:
        raise ValueError(
            "no dev generation has a second round, so that nothing is timed; raise decode.max_new_tokens or "
            "decode.num_dev"
        )
    drafting = least_absolute(
        np.array([_drafting(one.later) for one in decoded]), np.array([one.later_draft_s for one in decoded])
    )
    verifying = least_absolute(
        np.array([_verifying(one.later) for one in decoded]), np.array([one.later_target_s for one in decoded])
    )
    return ModelledTimes(*drafting.tolist(), *verifying.tolist())


def joined(parts: Sequence[Sequence[Run]]) -> list[Run]:
    """The same competitors over several datasets, as one run each."""
    return [
        replace(same[0], decoded=tuple(one for run in same for one in run.decoded)) for same in zip(*parts, strict=True)
    ]


def _drafting(counts: Counts) -> tuple[float, float]:
    return float(counts.num_target), float(counts.num_draft_forwards)


def _verifying(counts: Counts) -> tuple[float, float]:
    return float(counts.num_target), float(counts.num_drafted)

"""A clocked table about drafts: dev chooses a setting of each competitor, the clock judges it on test.

    T = a rounds + b num_draft_forwards + c rounds + d N_draft

a and b are fitted to the seconds of drafting, c and d to those of verifying, over all generations that the competitor's
settings wrote on dev (least absolute deviations: a stall of the machine moves no time). So a tree pays for the nodes
that it verifies and a stop for its own work in every draft step (law 4.9), and one setting's noise on the clock does
not choose it. The fastest by this T goes to the test prompts.

There the clock gives speed-ups by category, what stops gain with 95 % intervals over prompts, and in words whether one
pays. A stop is held against the same draft at its published length, and at the fixed length that dev chose: the faster
of them it has to beat.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import Float

from decode.loop.counts import Counts
from evaluation.gain import Gain, Spent, gain_over
from evaluation.hierarchies.built import Standing
from evaluation.hierarchies.runs import Candidate, at_settings, best_on_dev
from evaluation.hierarchies.times import least_absolute
from evaluation.papers.drafts import Contest

Runs = Mapping[tuple[str, str], Candidate]
"""(competitor, key of its setting) -> its run on the test prompts."""


def by_key(runs: Sequence[Candidate]) -> Runs:
    """The runs by competitor and key of the setting; a setting that ran twice counts once."""
    return {(run.competitor.name, run.setting.key): run for run in runs}


def lines_of(finalists: Contest, runs: Runs) -> list[Standing]:
    """One kind of draft: as published, at the fixed length that dev chose, and with every stop.

    The two fixed lengths are each other's rivals, and those of every stop.
    """
    name, best, published = finalists.fixed.name, finalists.best, finalists.published
    assert best is not None, "dev has chosen"
    fixed = {"published": runs[name, published.key]} if published else {}
    fixed["best fixed"] = runs[name, best.key]
    rows = [
        (f"{name}, {'best fixed' if rival_name == 'best fixed' else 'as published'}", run, set(fixed) - {rival_name})
        for rival_name, run in fixed.items()
    ]
    rows += [(stop.name, runs[stop.name, stop.settings[0].key], set(fixed)) for stop in finalists.stops]
    return [
        Standing(
            family=method,
            setting=run.label,
            spent=run.measured,
            rivals={rival_name: rival.measured for rival_name, rival in fixed.items() if rival_name in rivals},
        )
        for method, run, rivals in rows
    ]


def gain_cells(line: Standing) -> dict[str, str]:
    """Cells of its gains over both fixed lengths; empty over itself, and where a draft has no published length."""
    return {f"over {name}": line.over[name].text if name in line.over else "" for name in ("published", "best fixed")}


def line_rows(lines: Sequence[Standing], alone: Spent, categories: Sequence[str]) -> list[dict[str, str]]:
    """Speed-ups over the target alone by category of the prompts, over all of them, and gains."""
    labels = np.array(categories)
    parts = {name: labels == name for name in sorted(set(categories))} | {"Avg.": np.full(len(labels), True)}

    def speed_up(spent: Spent, part: np.ndarray) -> float:
        return _part(spent, part).tokens_per_s / _part(alone, part).tokens_per_s

    return [
        {
            "Methods": line.family,
            **{name: f"{speed_up(line.spent, part):.2f}" for name, part in parts.items()},
            "setting": line.setting,
            **gain_cells(line),
        }
        for line in lines
    ]


def stop_verdict(lines: Sequence[Standing], finalists: Sequence[Contest]) -> str:
    """The stops that beat the best fixed length of their own draft on the clock, the whole interval above 0, and those
    that do not.

    The best is the faster one on test, of the length that dev chose and the published one: dev's choice may have been
    an unlucky one.
    """
    names = {stop.name for contest in finalists for stop in contest.stops}
    gains = {
        line.family: gain_over(max(line.rivals.values(), key=lambda rival: rival.tokens_per_s), line.spent)
        for line in lines
        if line.family in names
    }
    # a single prompt has no interval: NaN is above no bound
    won, lost = (
        {name: gain for name, gain in gains.items() if (gain.low > 0 and gain.standard_error >= 0) == is_won}
        for is_won in (True, False)
    )
    said = {
        f"{len(won)} of {len(gains)} stops beat the best fixed length of the same draft on the clock": won,
        "No stop beats the best fixed length of the same draft on the clock" if not won else "not so": lost,
    }
    return "; ".join(f"{what}: {_listed(which)}" for what, which in said.items() if which)


def _listed(gains: Mapping[str, Gain]) -> str:
    return ", ".join(f"{name} {gain.text}" for name, gain in gains.items())


def shown_speed_up(alone: Spent, drafted: Spent) -> str:
    """Speed-up over the target alone, with its interval."""
    gain = gain_over(alone, drafted)
    return f"{1 + gain.value:.2f}x ({1 + gain.low:.2f}, {1 + gain.high:.2f})"


def _part(spent: Spent, chosen: np.ndarray) -> Spent:
    return Spent(spent.tokens[chosen], spent.seconds[chosen])


def finalists_of(contest: Contest, dev: Sequence[Candidate]) -> Contest:
    """The contest at the settings that are clocked on test: the published length, and what dev chooses.

    Args:
        contest: all settings.
        dev: the runs of all settings on dev.

    Raises:
        ValueError: something is to be chosen, and there is no dev prompt.
    """
    names = {competitor.name for competitor in contest.competitors}
    runs = [run for run in dev if run.competitor.name in names]
    if not (runs and runs[0].decoded) and any(len(competitor.settings) > 1 for competitor in contest.competitors):
        raise ValueError(
            "fixed lengths and thresholds are chosen on dev prompts, and there are none; raise decode.num_dev"
        )
    times = {name: fitted([run for run in runs if run.competitor.name == name]) for name in names} if runs else {}

    def modelled(run: Candidate) -> float:
        coefficients = times[run.competitor.name]
        seconds = [float(np.dot(coefficients, [*_drafting(counts), *_verifying(counts)])) for counts in run.each]
        return run.spent(seconds).tokens_per_s

    best = best_on_dev(runs, modelled)
    fixed, *stops = at_settings(contest.competitors, best)
    lengths = {setting.key: setting for setting in (contest.published, fixed.settings[0]) if setting is not None}
    return contest._replace(
        fixed=replace(fixed, settings=tuple(lengths.values())),
        stops=tuple(stops),
        best=fixed.settings[0],
    )


def fitted(runs: Sequence[Candidate]) -> Float[np.ndarray, " 4"]:
    """a, b, c and d of one competitor, in seconds, from all its settings; rounds that read a prompt are left out.

    Raises:
        ValueError: no generation has a second round.
    """
    decoded = [generation for run in runs for generation in run.decoded if generation.later.num_target]
    if not decoded:
        raise ValueError(
            "no dev generation has a second round, so that nothing is timed; raise decode.max_new_tokens or "
            "decode.num_dev"
        )
    drafting = least_absolute(
        np.array([_drafting(generation.later) for generation in decoded]),
        np.array([generation.later_draft_s for generation in decoded]),
    )
    verifying = least_absolute(
        np.array([_verifying(generation.later) for generation in decoded]),
        np.array([generation.later_target_s for generation in decoded]),
    )
    return np.concatenate([drafting, verifying])


def joined(parts: Sequence[Sequence[Candidate]]) -> list[Candidate]:
    """The same competitors over several datasets, as one run each."""
    return [
        replace(same[0], decoded=tuple(generation for run in same for generation in run.decoded))
        for same in zip(*parts, strict=True)
    ]


def _drafting(counts: Counts) -> tuple[float, float]:
    return float(counts.num_target), float(counts.num_draft_forwards)


def _verifying(counts: Counts) -> tuple[float, float]:
    return float(counts.num_target), float(counts.num_drafted)

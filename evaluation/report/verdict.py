"""The sentences of an evaluation, and the verdict: which policy to use here, kept in the run's folder as verdict.json,
which `generate` follows.

Dev chooses one setting of the fixed length, of the policies that need no training, and of the heads. Test judges: the
best fixed length is recommended unless the best policy without training beats it beyond chance, and either of them
unless the best head does. `evaluate` and `tune` both end with this verdict. Everything is predicted from counts and
times (law 4.9).
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from decode.experiment import Experiment
from decode.policies.recommended import VERDICT
from evaluation.contest import Arm, Contest, Replays, Result, fastest_on_dev
from evaluation.families import BASELINE, HEADS, TRAINING_FREE, family
from evaluation.gain import Gain, shortage
from evaluation.played import joined
from evaluation.report.tables import values_of
from evaluation.splits import repeated_splits
from evaluation.times import Times
from store.shards import write_atomic


def sentence_of(contest: Contest) -> str:
    """The best head, the best policy that needs no training and the best fixed length, each chosen on dev, with their
    gains; a second sentence where the interval does not show that training pays.
    """
    where, free = contest.times.where, contest.leaders[TRAINING_FREE]
    best, length = contest.leaders.get(HEADS, free), contest.baseline.setting["k"]
    if best.family == BASELINE:
        return f"{where}: no policy that needs no training is faster than the best fixed length, {length}."
    sentence = (
        f"{where}: {_named(best)}, predicted {contest.gain(best.family).words} over the best fixed length, {length}"
    )
    if best is free:
        return f"{sentence}. It needs no training, and no trained heads are compared with it."
    lead = contest.gain(best.family, free.family)
    over = "" if free.family == BASELINE else f", and {lead.words} over {_rival(free.family)}, which needs no training"
    return f"{sentence}{over}.{doubt_of(lead, free.family, contest.num_prompts)}"


def doubt_of(lead: Gain, free_family: str, num_prompts: int) -> str:
    """What the interval of a head's lead over the best policy without training does not show, in a sentence."""
    if lead.low is None:
        return f" {shortage(lead, num_prompts)}."
    if lead.is_below_noise:
        return f" No trained head is faster here: use {_rival(free_family)}."
    if lead.is_above_noise:
        return ""
    rival = "the best fixed length" if free_family == BASELINE else _rival(free_family)
    return (
        f" With {num_prompts} test prompts this difference could be chance, and {rival} may be as fast; raise "
        "decode.num_test to settle it."
    )


def _rival(rival: str) -> str:
    name = family(rival).label
    return f"the {name}" if name[0].islower() else name


def _named(result: Result) -> str:
    values = values_of(result.setting)
    if result.family == BASELINE:
        return f"fixed length {values}" if result.setting["k"] else "no draft (fixed length 0)"
    name = f"head {head}" if (head := result.competitor.head) else family(result.family).label
    return f"{name} at {values}" if values else name


def recommend(contest: Contest, experiment: Experiment) -> dict[str, Any]:
    """The verdict as verdict.json has it."""
    leaders, best = contest.leaders, BASELINE
    reasons = [] if HEADS in leaders else ["no head takes part (`acceptance-heads train` and `export` make heads)"]
    for group in (TRAINING_FREE, HEADS):
        if group not in leaders or leaders[group].family == BASELINE:
            continue
        lead = contest.gain(leaders[group].family, leaders[best].family)
        if lead.low is None:
            reasons.append(shortage(lead, contest.num_prompts))
            break
        if lead.is_above_noise:
            reasons = [f"{lead.words} over {_named(leaders[best])}", *reasons[: HEADS not in leaders]]
            best = group
        elif group == HEADS:
            reasons.append(f"no head beats it {'here' if lead.value <= 0 else 'beyond chance'}, {lead.words}")
    result = leaders[best]
    gain, path = contest.gain(result.family), experiment.head_paths.get(result.competitor.head)
    name = "head" if result.competitor.head else result.competitor.name
    values = [
        f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in result.setting.items()
    ]
    spec = f"{name}:{','.join([*([path] if path else []), *values])}".removesuffix(":")
    over = f"{gain.words} over the best fixed length" if best != BASELINE else "as the best fixed length"
    return {
        "sentence": f"Use {_named(result)}: {'; '.join(reasons)}.",
        # a head that was calibrated for this trace alone is in no directory
        "policy": spec if best != HEADS or path else None,
        "head": path,
        "speed": f"predicted {result.tokens_per_s * contest.times.t_target_s[0]:.2f} times as fast as the target alone,"
        f" {over}, {contest.baseline.setting['k']}",
        "gain": gain._asdict(),
        "costs": contest.times.title,
        "of": experiment.identity,
    }


def pooled(every: Sequence[Replays], times: Times) -> Contest:
    """The contest over the prompts of all datasets together, whose competitors are the same."""
    arms = [
        Arm(arms[0].competitor, joined([arm.dev for arm in arms]), joined([arm.test for arm in arms]))
        for arms in zip(*(replays.arms for replays in every), strict=True)
    ]
    return Contest("", times, fastest_on_dev(arms, times), repeated_splits(arms, times))


def write_verdict(verdict: Mapping[str, Any], directory: Path) -> Path:
    """Write verdict.json; its path."""
    write_atomic(directory / VERDICT, json.dumps(verdict, indent=1).encode())
    return directory / VERDICT

"""The verdict: which policy to use here, kept in the run's folder as verdict.json, which `generate` follows.

Dev chooses one setting of the fixed length, of the policies that need no training, and of the heads. Test judges: the
best fixed length is recommended unless the best policy without training beats it beyond chance, and either of them
unless the best head does. `evaluate` and `tune` both end with this function's sentence.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from decode.experiment import Experiment
from decode.policies.recommended import VERDICT
from evaluation.contest import Arm, Contest, Replays, Result, fastest_on_dev
from evaluation.families import BASELINE, HEADS, TRAINING_FREE, family
from evaluation.played import joined
from evaluation.report.results import values_of
from evaluation.times import Times
from store.shards import write_atomic


def recommend(contest: Contest, experiment: Experiment) -> dict[str, Any]:
    """The verdict as verdict.json has it."""
    leaders, best = contest.leaders, BASELINE
    reasons = [] if HEADS in leaders else ["no head takes part (`acceptance-heads train` and `export` make heads)"]
    for group in (TRAINING_FREE, HEADS):
        if group not in leaders or leaders[group].family == BASELINE:
            continue
        lead = contest.gain(leaders[group].family, leaders[best].family)
        if lead.low > 0:
            reasons = [f"{lead.words} over {named(leaders[best])}", *reasons[: HEADS not in leaders]]
            best = group
        elif group == HEADS:
            reasons.append(f"no head beats it {'here' if lead.value <= 0 else 'beyond chance'}, {lead.words}")
    result = leaders[best]
    gain, path = contest.gain(result.family), experiment.head_paths.get(result.competitor.head)
    over = f"{gain.words} over the best fixed length" if best != BASELINE else "as the best fixed length"
    return {
        "sentence": f"Use {named(result)}: {'; '.join(reasons)}.",
        # a head that was calibrated for this trace alone is in no directory
        "policy": spec_of(result, path) if best != HEADS or path else None,
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
    return Contest("", times, fastest_on_dev(arms, times))


def named(result: Result) -> str:
    """A policy with its setting, in a sentence."""
    values = values_of(result.setting)
    if result.family == BASELINE:
        return f"fixed length {values}" if result.setting["k"] else "no draft (fixed length 0)"
    name = f"head {head}" if (head := result.competitor.head) else family(result.family).label
    return f"{name} at {values}" if values else name


def spec_of(result: Result, path: str | None) -> str:
    """The policy as `generate --policy` takes it."""
    values = [
        f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in result.setting.items()
    ]
    name = "head" if result.competitor.head else result.competitor.name
    return f"{name}:{','.join([*([path] if path else []), *values])}".removesuffix(":")


def write_verdict(verdict: Mapping[str, Any], directory: Path) -> Path:
    """Write verdict.json; its path."""
    write_atomic(directory / VERDICT, json.dumps(verdict, indent=1).encode())
    return directory / VERDICT

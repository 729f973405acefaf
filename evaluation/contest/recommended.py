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
from decode.policies.chosen import VERDICT
from evaluation.contest.arms import Arm, Pick, Replays, picks_of
from evaluation.contest.results import champions_of
from evaluation.contest.tables import values_of
from evaluation.families import BASELINE, HEADS, TRAINING_FREE, family
from evaluation.gain import gain_over
from evaluation.played import joined
from evaluation.times import Times
from store.shards import write_atomic


def recommend(every: Sequence[Replays], cost: Times, experiment: Experiment) -> dict[str, Any]:
    """The verdict over the prompts of all datasets together, whose grids are the same, as verdict.json has it."""
    champions = champions_of(picks_of(joined_arms(every), cost).values(), cost)
    spent, best = {group: pick.spent(cost) for group, pick in champions.items()}, BASELINE
    reasons = [] if HEADS in champions else ["no head takes part (`acceptance-heads train` and `export` make heads)"]
    for group in (TRAINING_FREE, HEADS):
        if group not in champions or champions[group].family == BASELINE:
            continue
        lead = gain_over(spent[best], spent[group])
        if lead.low > 0:
            reasons = [f"{lead.words} over {named(champions[best])}", *reasons[: HEADS not in champions]]
            best = group
        elif group == HEADS:
            reasons.append(f"no head beats it {'here' if lead.value <= 0 else 'beyond chance'}, {lead.words}")
    pick, gain = champions[best], gain_over(spent[BASELINE], spent[best])
    path = experiment.head_paths.get(pick.arm.grid.head)
    over = f"{gain.words} over the best fixed length" if best != BASELINE else "as the best fixed length"
    return {
        "sentence": f"Use {named(pick)}: {'; '.join(reasons)}.",
        # a head that was calibrated for this trace alone is in no directory
        "policy": spec_of(pick, path) if best != HEADS or path else None,
        "head": path,
        "speed": f"predicted {spent[best].tokens_per_s * cost.t_target_s[0]:.2f} times as fast as the target alone, "
        f"{over} ({champions[BASELINE].values['k']})",
        "gain": gain._asdict(),
        "costs": cost.title,
        "of": experiment.identity,
    }


def joined_arms(every: Sequence[Replays]) -> list[Arm]:
    """The arms of all datasets, as if these were one."""
    return [
        Arm(arms[0].grid, joined([arm.dev for arm in arms]), joined([arm.test for arm in arms]))
        for arms in zip(*(replays.arms for replays in every), strict=True)
    ]


def named(pick: Pick) -> str:
    """A policy with its setting, in a sentence."""
    values = values_of(pick.values)
    if pick.family == BASELINE:
        return f"fixed length {values}" if pick.values["k"] else "no draft (fixed length 0)"
    name = f"head {head}" if (head := pick.arm.grid.head) else family(pick.family).label
    return f"{name} at {values}" if values else name


def spec_of(pick: Pick, path: str | None) -> str:
    """The policy as `generate --policy` takes it."""
    values = [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in pick.values.items()]
    name = "head" if pick.arm.grid.head else pick.arm.grid.name
    return f"{name}:{','.join([*([path] if path else []), *values])}".removesuffix(":")


def write_verdict(verdict: Mapping[str, Any], directory: Path) -> Path:
    """Write verdict.json; its path."""
    write_atomic(directory / VERDICT, json.dumps(verdict, indent=1).encode())
    return directory / VERDICT

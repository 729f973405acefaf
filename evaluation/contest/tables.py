"""The table, results.csv and counts-DATASET.parquet of `evaluation evaluate`."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from decode.policies.registry import POLICIES, RULES
from evaluation.contest.arms import ALONE, BASELINE, Arm
from evaluation.contest.results import Result
from evaluation.costs.model import CostModel
from evaluation.sheet import Sheet, flat

_BEHIND = {
    "head_specdec": "SpecDec++",
    "head_fed": "best head, fed-time with scalars",
    "head_drawn": "best head, drawn-time",
    "head_prefix": "best prefix head",
    "auto_fed": "auto, fed-time head",
    "auto_fed_online": "auto online, fed-time",
    "auto_drawn": "auto, drawn-time head",
    "auto_drawn_online": "auto online, drawn-time",
    "auto_drawn_learning": "auto online, head learning",
    "auto_prefix": "auto, prefix head",
    "auto_prefix_online": "auto online, prefix head",
    "auto_prefix_learning": "auto online, prefix, learning",
    "auto_confidence": "auto, DSpark's confidence",
    "auto_confidence_learning": "auto online, confidence learning",
    "auto_max_prob": "auto, largest probability (vLLM)",
    "auto_max_prob_learning": "auto online, largest probability learning",
    "perfect_fed": "perfect head, fed-time",
    "perfect_drawn": "perfect head",
    "oracle": "oracle",
}
"""Names of what stands behind the training-free policies."""


class _Names(Mapping[str, str]):
    """Looked up when they are asked for: a policy of one's own is registered when its name is first read."""

    def _all(self) -> dict[str, str]:
        registered = {name: entry.label for name, entry in (POLICIES | RULES).items() if name != "head"}
        return {ALONE: "target alone", **registered, **_BEHIND}

    def __getitem__(self, family: str) -> str:
        return self._all()[family]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())


NAMES: Mapping[str, str] = _Names()
"""Family -> what tables and plots call it, in the order of the rows: baselines, training-free policies, heads, the
rule, bounds.
"""


def ordered(results: Sequence[Result]) -> list[Result]:
    """The rows in the order of `NAMES`."""
    places = {family: place for place, family in enumerate(NAMES)}
    return sorted(results, key=lambda result: places.get(result.family, len(places)))


def result_sheet(results: Sequence[Result], cost: CostModel, *, dataset: str, num_prompts: int) -> Sheet:
    """One dataset at one cost; the target alone stands above the families."""
    alone = 1 / cost.t_target_s[0]
    oracle = next(result.tokens_per_s for result in results if result.family == "oracle")
    first = ("target alone", "-", "", "1.00", f"{alone:.1f}", f"{100 * alone / oracle:.1f}", "0.000", "1.000", "1.00")
    rows = [
        {
            "policy": NAMES.get(result.family, result.family),
            "setting": result.label,
            "gain": "" if result.family == BASELINE else result.gain.text,
            "speed-up": f"{result.speed_up:.2f}",
            "tokens/s": f"{result.tokens_per_s:.1f}",
            "% of oracle": f"{result.percent_of_oracle:.1f}",
            "discard rate": f"{result.discard_rate:.3f}",
            "verification rate": f"{result.verification_rate:.3f}",
            "acceptance length": f"{result.acceptance_length:.2f}",
        }
        for result in results
    ]
    return Sheet(
        f"{dataset}: {num_prompts} test prompts, settings chosen on dev; {cost.title}",
        [dict(zip(rows[0], first, strict=True)), *rows],
        "predicted from counts and times (law 4.9). gain: throughput over the best fixed length's, with its 95 % "
        "interval: paired bootstrap of test prompts, at the settings that dev chose. Bold: the best "
        "on dev of what can be run",
        names=2,
    )


def values_of(setting: Mapping[str, Any]) -> str:
    """The values of a setting, without their names."""
    return ", ".join(f"{value:.3g}" if isinstance(value, float) else f"{value}" for value in setting.values())


def result_frame(results: Sequence[Result], cost: CostModel, *, dataset: str, chosen_on: str) -> pd.DataFrame:
    """The same as rows of numbers; `chosen_on`: the dataset whose dev prompts chose head and setting."""
    rows = [
        {"dataset": dataset, "chosen_on": chosen_on, "ratio": cost.ratio, "costs": cost.origin, **flat(result)}
        for result in results
    ]
    for row in rows:
        row["setting"] = json.dumps(row["setting"])
    return pd.DataFrame(rows)


def write_counts(path: Path, arms: Sequence[Arm]) -> None:
    """Totals of every setting of every grid on both splits."""
    rows = []
    for arm in arms:
        for split, replayed in (("dev", arm.dev), ("test", arm.test)):
            for setting, described in enumerate(arm.grid.settings):
                rows.append(
                    {
                        "family": arm.grid.family,
                        "name": arm.grid.name,
                        "setting": json.dumps(dict(described), default=float),
                        "split": split,
                        **{
                            name: int(values[setting].sum())
                            for name, values in vars(replayed.counts).items()
                            if hasattr(values, "sum")
                        },
                        "rounds_by_length": replayed.lengths[setting].sum(0).tolist(),
                    }
                )
    pd.DataFrame(rows).to_parquet(path, index=False)

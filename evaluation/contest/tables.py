"""The table, results.csv and counts-DATASET.parquet of `evaluation evaluate`."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from evaluation.contest.arms import Arm
from evaluation.contest.results import Result
from evaluation.families import BASELINE, ORACLE, families, family
from evaluation.table import Table, flat
from evaluation.times import Times


def ordered(results: Sequence[Result]) -> list[Result]:
    """Results in the order of `families`."""
    names = list(families())
    return sorted(results, key=lambda result: names.index(result.family) if result.family in names else len(names))


def result_sheet(results: Sequence[Result], cost: Times, *, dataset: str, num_prompts: int) -> Table:
    """One dataset at one cost; the target alone stands above the families."""
    alone = 1 / cost.t_target_s[0]
    oracle = next(result.tokens_per_s for result in results if result.family == ORACLE)
    first = ("target alone", "-", "", "1.00", f"{alone:.1f}", f"{100 * alone / oracle:.1f}", "0.000", "1.000", "1.00")
    rows = [
        {
            "policy": family(result.family).label,
            "setting": result.label,
            "gain": "" if result.family == BASELINE else result.gain.text,
            "speed-up": f"{result.speed_up:.2f}",
            "tokens/s": f"{result.tokens_per_s:.1f}",
            "% of oracle's tokens/s": f"{result.percent_of_oracle:.1f}",
            "discard rate": f"{result.discard_rate:.3f}",
            "verification rate": f"{result.verification_rate:.3f}",
            "acceptance length": f"{result.acceptance_length:.2f}",
        }
        for result in results
    ]
    return Table(
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


def result_frame(results: Sequence[Result], cost: Times, *, dataset: str, chosen_on: str) -> pd.DataFrame:
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

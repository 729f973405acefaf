"""Every row of an evaluation: the table, results.csv and counts-DATASET.parquet."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from evaluation.contest import Arm, Contest, Result
from evaluation.families import ALONE, BASELINE, ORACLE, PERFECT, TRAINING_FREE, family
from evaluation.table import Table, flat

PREDICTED = "predicted: replayed counts of forwards times the seconds of each (law 4.9 of docs/laws.md)"
"""What the figures of a table are, for its note."""


def figures_of(result: Result, contest: Contest) -> dict[str, Any]:
    """The columns of results.csv: one family on test, against the rivals of a contest on the same prompts."""
    assert result.played is not None
    counts, known = result.played.total(), contest.results
    is_of_contest = known.get(result.family) is result
    gain, lead = (
        contest.gain(result.family, rival.family) if is_of_contest else result.over(rival)
        for rival in (contest.baseline, contest.leaders[TRAINING_FREE])
    )
    return {
        "family": result.family,
        "name": result.competitor.name,
        "setting": json.dumps(dict(result.setting)),
        "discard_rate": counts.discard_rate,
        "verification_rate": counts.verification_rate,
        "acceptance_length": counts.acceptance_length,
        "mean_draft_length": counts.num_drafted / counts.num_target,
        "tokens_per_s": result.tokens_per_s,
        "speed_up": result.tokens_per_s * contest.times.t_target_s[0],
        **flat({"gain": gain, "lead": lead}),
        "percent_of_oracle": result.percent_of(known[ORACLE]),
        "percent_of_perfect": result.percent_of(known.get(PERFECT)),
    }


def result_frame(rows: Iterable[Mapping[str, Any]], contest: Contest, *, chosen_on: str) -> pd.DataFrame:
    """Rows of results.csv; `chosen_on`: the dataset whose dev prompts chose head and setting."""
    times, dataset = contest.times, contest.dataset
    where = {"dataset": dataset, "chosen_on": chosen_on, "ratio": times.ratio, "costs": times.origin}
    return pd.DataFrame([{**where, **row} for row in rows])


def contest_frame(contest: Contest) -> pd.DataFrame:
    """Every family of a contest as rows of results.csv."""
    rows = (figures_of(result, contest) for result in contest.results.values())
    return result_frame(rows, contest, chosen_on=contest.dataset)


def result_table(contest: Contest) -> Table:
    """Every family of a contest below the target alone."""
    times, oracle = contest.times, contest.results[ORACLE]
    alone = 1 / times.t_target_s[0]
    first = {"policy": family(ALONE).label, "setting": "-", "gain": "", "speed-up": "1.00", "tokens/s": f"{alone:.1f}"}
    first |= {"% of oracle's tokens/s": f"{100 * alone / oracle.tokens_per_s:.1f}"}
    rows = [first | {"discard rate": "0.000", "verification rate": "1.000", "acceptance length": "1.00"}]
    for name, result in contest.results.items():
        assert result.played is not None
        counts = result.played.total()
        rows.append(
            {
                "policy": family(name).label,
                "setting": result.label,
                "gain": "" if name == BASELINE else contest.gain(name).text,
                "speed-up": f"{result.tokens_per_s * times.t_target_s[0]:.2f}",
                "tokens/s": f"{result.tokens_per_s:.1f}",
                "% of oracle's tokens/s": f"{result.percent_of(oracle):.1f}",
                "discard rate": f"{counts.discard_rate:.3f}",
                "verification rate": f"{counts.verification_rate:.3f}",
                "acceptance length": f"{counts.acceptance_length:.2f}",
            }
        )
    return Table(
        title_of(contest),
        rows,
        f"{PREDICTED}. gain: throughput over the best fixed length's, with its 95 % "
        "interval: paired bootstrap of test prompts, at the settings that dev chose. Bold: the best on dev of what can "
        "be run",
        names=2,
    )


def title_of(contest: Contest) -> str:
    """Dataset, prompts and times, as titles of tables have them."""
    return f"{contest.dataset}: {contest.num_prompts} test prompts, settings chosen on dev; {contest.times.title}"


def values_of(setting: Mapping[str, Any]) -> str:
    """The values of a setting, without their names."""
    return ", ".join(f"{value:.3g}" if isinstance(value, float) else f"{value}" for value in setting.values())


def write_counts(path: Path, arms: Sequence[Arm]) -> None:
    """Totals of every setting of every competitor on both splits."""
    rows = [
        {
            "family": arm.competitor.family,
            "name": arm.competitor.name,
            "setting": json.dumps(dict(setting), default=float),
            "split": split,
            **{key: value for key, value in vars(played.total(number)).items() if "micro" not in key},
            "rounds_by_length": played.lengths[number].sum(0).tolist(),
        }
        for arm in arms
        for split, played in (("dev", arm.dev), ("test", arm.test))
        for number, setting in enumerate(arm.competitor.settings)
    ]
    pd.DataFrame(rows).to_parquet(path, index=False)

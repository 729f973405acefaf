"""Every row of an evaluation: the table, and the records of results.csv."""

import json
from collections.abc import Mapping
from typing import Any

from evaluation.contest import Contest, Result
from evaluation.families import ALONE, BASELINE, BOUNDS, ORACLE, PERFECT, TRAINING_FREE, family
from evaluation.table import Table, flat

PREDICTED = "predicted: replayed counts of forwards times the seconds of each (law 4.9 of docs/laws.md)"
"""What the figures of a table are, for its note."""


def records_of(
    results: Mapping[str, Result], contest: Contest, *, chosen_on: str | None = None
) -> list[dict[str, Any]]:
    """Rows of results.csv: families on test, against the rivals of a contest on the same prompts.

    Args:
        results: by family; those of the contest, or others.
        contest: of the rivals.
        chosen_on: the dataset whose dev prompts chose head and setting; None: the contest's.
    """
    times, rivals = contest.times, (contest.baseline, contest.leaders[TRAINING_FREE])
    where: dict[str, Any] = {"dataset": contest.dataset, "chosen_on": chosen_on or contest.dataset}
    where |= {"ratio": times.ratio, "costs": times.origin}
    rows = []
    for name, result in results.items():
        assert result.played is not None
        counts = result.played.total()
        gain, lead = (
            contest.gain(name, rival.family) if contest.results.get(name) is result else result.over(rival)
            for rival in rivals
        )
        row = {
            "family": name,
            "name": result.competitor.name,
            "setting": json.dumps(dict(result.setting)),
            "discard_rate": counts.discard_rate,
            "verification_rate": counts.verification_rate,
            "acceptance_length": counts.acceptance_length,
            "mean_draft_length": counts.num_drafted / counts.num_target,
            "tokens_per_s": result.tokens_per_s,
            "speed_up": result.tokens_per_s * times.t_target_s[0],
            **flat({"gain": gain, "lead": lead}),
            "percent_of_oracle": result.percent_of(contest.results[ORACLE]),
            "percent_of_perfect": result.percent_of(contest.results.get(PERFECT)),
        }
        rows.append(where | row)
    return rows


def result_table(contest: Contest) -> Table:
    """Every family of a contest below the target alone."""
    times, oracle, best = contest.times, contest.results[ORACLE], contest.best.family
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
    note = (
        f"{PREDICTED}. gain: throughput over the best fixed length's, with its 95 % interval: paired bootstrap of test "
        "prompts, at the settings that dev chose. Bold: the best on dev of what can be run"
    )
    kinds = dict.fromkeys(BOUNDS, "bound") | {best: "best"}
    marks = {number: kinds[name] for number, name in enumerate(contest.results, 1) if name in kinds}
    return Table(title_of(contest), rows, note, names=2, marks=marks)


def title_of(contest: Contest) -> str:
    """Dataset, prompts and times, as titles of tables have them."""
    return f"{contest.dataset}: {contest.num_prompts} test prompts, settings chosen on dev; {contest.times.title}"


def values_of(setting: Mapping[str, Any]) -> str:
    """The values of a setting, without their names."""
    return ", ".join(f"{value:.3g}" if isinstance(value, float) else f"{value}" for value in setting.values())

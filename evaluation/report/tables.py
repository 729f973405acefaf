"""The rows and tables of a contest: every family (results.csv), and where the oracle's gain goes, in tokens per second
(stages.csv).

    best fixed length -> product of token probabilities -> best head -> perfect head -> oracle

Each stage knows more than the one before it. What it adds says what is missing below it: training, what the draft
cannot see, or the random draw. In greedy decoding nothing is drawn, and the oracle is ahead of the perfect head by the
rejected tokens that it does not draft. If dev prefers another policy without training to the product, that policy has
its own stage. A stage that did not compete keeps its row, which says why.

The interval of a speed is the best fixed length's speed times 1 + the ends of its gain's interval: it says how sure the
difference is on the same prompts, not how fast they are. What a stage adds has its own interval, paired with the stage
before it over the same prompts.
"""

import json
from collections.abc import Mapping
from textwrap import fill
from typing import Any

from evaluation.competitor import values_of
from evaluation.contest import Contest, Result, fastest
from evaluation.families import (
    ALONE,
    BASELINE,
    BOUND,
    BOUNDS,
    CUSTOM,
    ENGINES,
    HEADS,
    LENGTHS,
    ORACLE,
    PERFECT,
    PRODUCT,
    TRAINING_FREE,
    family,
)
from evaluation.gain import MIN_PROMPTS, Gain, shortage
from evaluation.splits import NUM_SPLITS, RepeatedSplits
from evaluation.table import Table, flat, shown

_PREDICTED = "predicted: replayed counts of forwards times the seconds of each (law 4.9 of docs/laws.md)"
"""What the figures of a table are, for its note."""
_REDRAWN = (
    f"{NUM_SPLITS} splits: the median gain with dev and test redrawn among the same prompts, ± its standard deviation "
    "between splits"
)
_COLUMNS = {
    "policy": ("policy", ""),
    "setting": ("label", ""),
    "gain": ("gain", ""),
    "speed-up": ("speed_up", ".2f"),
    f"{NUM_SPLITS} splits": ("splits", ""),
    "leads": ("leads", ""),
    "tokens/s": ("tokens_per_s", ".1f"),
    "% of oracle's tokens/s": ("percent_of_oracle", ".1f"),
    "discard rate": ("discard_rate", ".3f"),
    "verification rate": ("verification_rate", ".3f"),
    "acceptance length": ("acceptance_length", ".2f"),
}
_MISSING = {
    PRODUCT: "not compared: decode.policies lacks it",
    HEADS: "not compared: no trained heads (acceptance-heads export)",
    PERFECT: "not in the trace: decode.perfect_head is false",
}
"""Stage -> why it may have no figures."""


def records_of(
    results: Mapping[str, Result], contest: Contest, *, chosen_on: str | None = None
) -> list[dict[str, Any]]:
    """Rows of results.csv: families on test, against the rivals of a contest on the same prompts; dev prompts of
    `chosen_on`, or else the contest's, chose head and setting.
    """
    times, rivals = contest.times, (contest.baseline, contest.leaders[TRAINING_FREE])
    rows = []
    for name, result in results.items():
        counts = result.played.total()
        gain, lead = (
            contest.gain(name, rival.family) if contest.results.get(name) is result else result.over(rival)
            for rival in rivals
        )
        row = {
            "dataset": contest.dataset,
            "chosen_on": chosen_on or contest.dataset,
            "ratio": times.ratio,
            "costs": times.origin,
            "family": name,
            "name": result.competitor.name,
            "setting": json.dumps(dict(result.setting)),
            "discard_rate": counts.discard_rate,
            "verification_rate": counts.verification_rate,
            "acceptance_length": counts.acceptance_length,
            "mean_draft_length": counts.num_drafted / counts.num_target,
            "tokens_per_s": result.tokens_per_s,
            "speed_up": result.tokens_per_s * times.alone_s,
            **flat({"gain": gain, "lead": lead}),
            "percent_of_oracle": result.percent_of(contest.results[ORACLE]),
            "percent_of_perfect": result.percent_of(contest.results.get(PERFECT)),
        }
        if contest.splits is not None and contest.results.get(name) is result:
            row["splits_median_gain"] = contest.splits.median(name)
            row["splits_spread"] = contest.splits.spread(name)
            row["splits_leading"] = None if name in BOUNDS else contest.splits.share_leading(name)
        rows.append(row)
    return rows


def result_table(contest: Contest) -> Table:
    """Every family of a contest below the target alone."""
    alone = 1 / contest.times.alone_s
    rows: list[dict[str, Any]] = [
        {
            "policy": family(ALONE).label,
            "label": "-",
            "gain": "",
            "speed_up": 1.0,
            "splits": "",
            "leads": "",
            "tokens_per_s": alone,
            "percent_of_oracle": 100 * alone / contest.results[ORACLE].tokens_per_s,
            "discard_rate": 0.0,
            "verification_rate": 1.0,
            "acceptance_length": 1.0,
        }
    ]
    for record, (name, result) in zip(records_of(contest.results, contest), contest.results.items(), strict=True):
        gain = "" if name == BASELINE else contest.gain(name).text
        cells = {"policy": family(name).label, "label": result.label, "gain": gain, "splits": "", "leads": ""}
        if contest.splits is not None:
            cells["splits"] = splits_text(contest.splits, name)
            cells["leads"] = "" if name in BOUNDS else f"{contest.splits.share_leading(name):.0%}"
        rows.append(record | cells)
    note = (
        f"{_PREDICTED}. gain: throughput over the best fixed length's{_interval_note(contest)}. {_REDRAWN}; leads: the "
        "share of splits in which it is the fastest that can be run. Bold: the best on dev of what can be run"
    )
    kinds = dict.fromkeys(BOUNDS, "bound") | {contest.best.family: "best"}
    return Table(
        title_of(contest),
        shown(rows, _COLUMNS),
        note,
        names=2,
        marks={number: kinds[name] for number, name in enumerate(contest.results, 1) if name in kinds},
    )


def title_of(contest: Contest) -> str:
    """Dataset, prompts and times, as titles of tables have them."""
    return f"{contest.dataset}: {contest.num_prompts} test prompts, settings chosen on dev; {contest.times.title}"


def stage_rows(contest: Contest) -> list[dict[str, Any]]:
    """Every stage of a contest in order, as rows of stages.csv whose gains are not flat yet; one that did not compete
    has no figures, and the first one adds nothing.
    """
    results, leaders = contest.results, contest.leaders
    free, head = leaders[TRAINING_FREE].family, leaders[HEADS].family if HEADS in leaders else HEADS
    whole = results[ORACLE].tokens_per_s - contest.baseline.tokens_per_s
    knowledge = {
        BASELINE: "the same length in every round",
        PRODUCT: "what the draft knows of itself",
        **({} if free in (BASELINE, PRODUCT) else {free: "what else the draft knows of itself"}),
        head: "what a head learned",
        PERFECT: "what the draft cannot see, or a head has not learned",
        ORACLE: "the random draw, and each token before it is drawn",
    }
    stages: list[dict[str, Any]] = []
    pending: list[str] = []  # knowledge of missing stages, which the next one that has figures adds too
    before: Result | None = None
    for name, knows in knowledge.items():
        pending.append(knows)
        stage = {"stage": "best head" if name == HEADS else family(name).label, "family": name, "setting": ""}
        result = results.get(name)
        if result is None:
            stages.append({**stage, "knows": knows, "missing": _MISSING[name]})
            continue
        stage["setting"] = " at ".join(filter(None, (result.competitor.head, values_of(result.setting))))
        gain, share = contest.gain(name), None
        base = result.tokens_per_s / (1 + gain.value)
        figures: dict[str, Any] = {"tokens_per_s": gain.speed(base), "gain": gain}
        if before:
            figures["added"] = contest.gain(name, before.family)
            share = 100 * (result.tokens_per_s - before.tokens_per_s) / whole if whole > 0 else None
        figures["percent_of_oracle_gain"] = share
        stages.append({**stage, "knows": "; ".join(pending), "missing": "", **figures})
        before, pending = result, []
    return stages


def stage_table(contest: Contest) -> Table:
    """The stages below the target alone; the note has their settings, and what else decides."""
    stages, alone = stage_rows(contest), speed_text(1 / contest.times.alone_s)
    rows = [{"stage": f"{family(ALONE).label}\nno draft", "tokens/s": alone}]
    for stage in stages:
        row = {"stage": f"{stage['stage']}\n{fill(stage['missing'] or stage['knows'], 30)}"}
        if "gain" in stage:
            row["tokens/s"] = speed_text(stage["tokens_per_s"].value)
        if "added" in stage:
            row["tokens/s"] = _speed_words(stage["tokens_per_s"])
            row["gain"] = stage["gain"].words
            if contest.splits is not None:
                row[f"{NUM_SPLITS} splits"] = splits_text(contest.splits, stage["family"])
            row["adds"] = stage["added"].words
        rows.append(row)
    of_stages = [stage["family"] for stage in stages]
    settings = [f"{stage['stage']} {stage['setting']}" for stage in stages if stage["setting"]]
    slower = [stage["stage"] for stage in stages if "added" in stage and stage["added"].value < 0]
    beside = [_gain_line(contest, name) for name in deciding_families(contest) if name not in of_stages]
    notes = [
        f"{_PREDICTED}. gain: tokens/s over the best fixed length's{_interval_note(contest)}. tokens/s has the same "
        f"interval, times the best fixed length's. adds: over the row above. {_REDRAWN}. Bold: the best on dev of what "
        "can be run",
        *([f"{' and '.join(slower)}: slower than the row above"] if slower else []),
        *([f"Beside them, over the best fixed length: {'; '.join(beside)}"] if beside else []),
        f"Chosen on dev: {'; '.join(settings)}. --all: every policy's row",
    ]
    return Table(
        title_of(contest),
        rows,
        ". ".join(notes),
        marks={number: "best" for number, name in enumerate(of_stages, 1) if name == contest.best.family},
    )


def _gain_line(contest: Contest, name: str) -> str:
    parts = [family(name).label, values_of(contest.results[name].setting)]
    return f"{' at '.join(filter(None, parts))}: {contest.gain(name).words}"


def brief_table(contest: Contest) -> Table:
    """The stages in a line each, with a short note: what `all` prints, whose report has the rest."""
    table = stage_table(contest)
    rows = []
    for row in table.rows:
        stage, _, _ = row["stage"].partition("\n")
        tokens_per_s, _, _ = row.get("tokens/s", "").partition(" ")
        rows.append({**row, "stage": stage, "tokens/s": tokens_per_s})
    interval = ", with its 95 % interval"
    if contest.num_prompts < MIN_PROMPTS:
        interval = _interval_note(contest)
    note = (
        f"gain: predicted, over the best fixed length{interval}; adds: over the row above; {NUM_SPLITS} splits: median "
        "gain with dev and test redrawn"
    )
    title = f"{contest.dataset}: {contest.num_prompts} test prompts; {contest.times.title.partition(';')[0]}"
    return Table(title, rows, note, marks=table.marks)


def deciding_families(contest: Contest) -> list[str]:
    """The families whose rows decide, in the order of the table: the best fixed length, the best on dev of each kind of
    policy, every custom policy, the perfect head and the oracle.
    """
    results, kinds = contest.results, {name: family(name).kind for name in contest.results}
    shown = {BASELINE, PERFECT, ORACLE, *(result.family for result in contest.leaders.values())}
    for kind in set(kinds.values()) - {LENGTHS, BOUND}:
        shown.add(fastest(result for name, result in results.items() if kinds[name] == kind).family)
    return [name for name, kind in kinds.items() if name in shown or kind in (CUSTOM, ENGINES)]


def splits_text(splits: RepeatedSplits, name: str) -> str:
    """Median gain in repeated splits and its spread: +12.3% ± 0.7."""
    return f"{splits.median(name):+.1%} ± {100 * splits.spread(name):.1f}"


def _interval_note(contest: Contest) -> str:
    """What the intervals of a contest's gains are, or why there are none, as a note continues."""
    if contest.num_prompts >= MIN_PROMPTS:
        return ", with its 95 % interval: paired bootstrap of test prompts, at the settings that dev chose"
    return f". {shortage(contest.gain(contest.best.family), contest.num_prompts)}"


def _speed_words(speed: Gain) -> str:
    if speed.low is None or speed.high is None:
        return speed_text(speed.value)
    return f"{speed_text(speed.value)} ({speed_text(speed.low)}, {speed_text(speed.high)})"


def speed_text(tokens_per_s: float) -> str:
    """Tokens per second, in whole numbers from 100 on."""
    return f"{tokens_per_s:.{0 if tokens_per_s >= 100 else 1}f}"

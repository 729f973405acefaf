"""Where the oracle's gain goes: the rows of stages.csv and of the first table of an evaluation, in tokens per second.

    best fixed length -> product of token probabilities -> best head -> perfect head -> oracle

Each stage knows more than the one before it. What it adds says what is missing below it: training, what the draft
cannot see, or the random draw. In greedy decoding nothing is drawn, and the oracle is ahead of the perfect head by the
rejected tokens that it does not draft. If dev prefers another policy without training to the product, that policy has
its own stage. A stage that did not compete keeps its row, which says why.

The interval of a speed is the best fixed length's speed times 1 + the ends of its gain's interval: it says how sure the
difference is on the same prompts, not how fast they are. What a stage adds has its own interval, paired with the stage
before it over the same prompts.
"""

from textwrap import fill
from typing import Any

from evaluation.contest import Contest, Result, fastest
from evaluation.families import (
    ALONE,
    BASELINE,
    BOUND,
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
from evaluation.gain import Gain
from evaluation.report.results import PREDICTED, title_of, values_of
from evaluation.table import Table

_MISSING = {
    PRODUCT: "not compared: decode.policies lacks it",
    HEADS: "not compared: no trained heads (acceptance-heads export)",
    PERFECT: "not in the trace: decode.perfect_head is false",
}
"""Stage -> why it may have no figures."""


def stages_of(contest: Contest) -> list[dict[str, Any]]:
    """Every stage of a contest in order, as rows of stages.csv whose gains are not flat yet; one that did not compete
    has no figures, and the first one adds nothing.
    """
    results, leaders = contest.results, contest.leaders
    free, head = leaders[TRAINING_FREE].family, leaders[HEADS].family if HEADS in leaders else HEADS
    whole = results[ORACLE].tokens_per_s - contest.baseline.tokens_per_s
    known = {
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
    for name, knows in known.items():
        pending.append(knows)
        stage = {"stage": "best head" if name == HEADS else family(name).label, "family": name, "setting": ""}
        result = results.get(name)
        if result is None:
            stages.append({**stage, "knows": knows, "missing": _MISSING[name]})
            continue
        stage["setting"] = " at ".join(filter(None, (result.competitor.head, values_of(result.setting))))
        gain, share = contest.gain(name), None
        base = result.tokens_per_s / (1 + gain.value)
        speed, low, high = (base * (1 + part) for part in gain[:3])
        figures: dict[str, Any] = {"tokens_per_s": Gain(speed, low, high, base * gain.standard_error), "gain": gain}
        if before:
            figures["added"] = contest.gain(name, before.family)
            share = 100 * (result.tokens_per_s - before.tokens_per_s) / whole if whole > 0 else None
        figures["percent_of_oracle_gain"] = share
        stages.append({**stage, "knows": "; ".join(pending), "missing": "", **figures})
        before, pending = result, []
    return stages


def stage_table(contest: Contest) -> Table:
    """The stages below the target alone; the note has what else decides."""
    alone = {"stage": family(ALONE).label, "what it knows": "no draft", "setting": ""}
    stages, rows = stages_of(contest), [alone | {"tokens/s": speed_text(1 / contest.times.t_target_s[0])}]
    for stage in stages:
        row = {name: stage[name] for name in ("stage", "setting")} | {
            "what it knows": stage["missing"] or stage["knows"]
        }
        if "gain" in stage:
            speed, low, high = map(speed_text, stage["tokens_per_s"][:3])
            row["tokens/s"] = speed
        if "added" in stage:
            row |= {"tokens/s": f"{speed} ({low}, {high})", "gain": stage["gain"].words, "adds": stage["added"].words}
        rows.append(row)
    slower = " and ".join(stage["stage"] for stage in stages if "added" in stage and stage["added"].value < 0)
    lost = f". {slower}: slower than the row above" if slower else ""
    names = [stage["family"] for stage in stages]
    beside = [name for name in deciding_families(contest) if name not in names]
    settings = {name: values_of(contest.results[name].setting) for name in beside}
    gains = [
        f"{' at '.join(filter(None, (family(name).label, setting)))}: {contest.gain(name).words}"
        for name, setting in settings.items()
    ]
    listed = f". Beside them, over the best fixed length: {'; '.join(gains)}" if gains else ""
    note = (
        f"{PREDICTED}. gain: tokens/s over the best fixed length's, with its 95 % interval: paired bootstrap "
        "of test prompts, at the settings that dev chose. tokens/s has the same interval, times the best fixed "
        f"length's. adds: over the row above. Bold: the best on dev of what can be run{lost}{listed}"
    )
    marks = {number: "best" for number, name in enumerate(names, 1) if name == contest.best.family}
    columns = ("stage", "what it knows", "setting", "tokens/s", "gain", "adds")
    return Table(title_of(contest), rows, note, names=3, headings=columns, marks=marks)


def console_table(contest: Contest) -> Table:
    """The same for a console of 100 columns: what a stage knows is below its name, and its setting in the note."""
    table = stage_table(contest)
    rows = [
        {"stage": f"{row['stage']}\n{fill(row['what it knows'], 34)}"}
        | {heading: row.get(heading, "") for heading in table.columns[3:]}
        for row in table.rows
    ]
    settings = "; ".join(f"{row['stage']} {row['setting']}" for row in table.rows if row["setting"])
    more = len(contest.results) + 1 - sum("tokens/s" in row for row in table.rows)
    note = f"{table.note}. Chosen on dev: {settings}. --all: {more} more rows"
    return Table(table.title, rows, note, marks=table.marks)


def deciding_families(contest: Contest) -> list[str]:
    """The families whose rows decide, in the order of the table: the best fixed length, the best on dev of each kind of
    policy, every custom policy, the perfect head and the oracle.
    """
    results, kinds = contest.results, {name: family(name).kind for name in contest.results}
    shown = {BASELINE, PERFECT, ORACLE, *(result.family for result in contest.leaders.values())}
    for kind in set(kinds.values()) - {LENGTHS, BOUND}:
        shown.add(fastest(result for name, result in results.items() if kinds[name] == kind).family)
    return [name for name, kind in kinds.items() if name in shown or kind in (CUSTOM, ENGINES)]


def speed_text(tokens_per_s: float) -> str:
    """Tokens per second, in whole numbers from 100 on."""
    return f"{tokens_per_s:.{0 if tokens_per_s >= 100 else 1}f}"

"""Where the oracle's gain goes: one table and one picture of an evaluation, in tokens per second.

    best fixed length -> product of token probabilities -> best head -> perfect head -> oracle

Each stage knows more than the one before it. What it adds says what is missing below it: training, what the draft
cannot see, or the random draw. In greedy decoding nothing is drawn, and the oracle is ahead of the perfect head by the
rejected tokens that it does not draft. If dev prefers another policy without training to the product, that policy has
its own stage. A stage that did not compete keeps its row, which says why.

The interval of a speed is the best fixed length's speed times 1 + the ends of its gain's interval: it says how sure the
difference is on the same prompts, not how fast they are. What a stage adds has its own interval, paired with the stage
before it over the same prompts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Any

import numpy as np

from evaluation.contest import Contest, Result
from evaluation.families import ALONE, BASELINE, HEADS, ORACLE, PERFECT, PRODUCT, TRAINING_FREE, family, styles_of
from evaluation.figure import GREY, Plot, figure_of, plot_of
from evaluation.gain import Gain
from evaluation.report.results import PREDICTED, title_of, values_of
from evaluation.table import Table, flat

_MISSING = {
    PRODUCT: "not compared: decode.policies lacks it",
    HEADS: "not compared: no trained heads (acceptance-heads export)",
    PERFECT: "not in the trace: decode.perfect_head is false",
}
"""Stage -> why it may have no figures."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One step on the way from the best fixed length to the oracle."""

    family: str
    """Family of the stage; HEADS where no heads compete."""
    knows: str
    """Knowledge that it adds to the stage before, in words."""
    result: Result | None = None
    """None: it did not compete, and `missing` says why."""
    gain: Gain | None = None
    """Over the best fixed length."""
    added: Gain | None = None
    """Over the stage before it; None for the first stage."""
    percent_of_gain: float | None = None
    """What it adds in per cent of the oracle's gain in tokens/s; None for the first stage, and if the oracle gains
    nothing.
    """

    @property
    def name(self) -> str:
        """Name in tables and in the picture."""
        return "best head" if self.family == HEADS else family(self.family).label

    @property
    def setting(self) -> str:
        """Head and value that dev chose."""
        if self.result is None:
            return ""
        return " at ".join(filter(None, (self.result.competitor.head, values_of(self.result.setting))))

    @property
    def missing(self) -> str:
        """Why it has no figures; empty where it has."""
        return "" if self.result else _MISSING[self.family]

    @property
    def speeds(self) -> Gain:
        """Tokens per second with their interval: the best fixed length's times 1 + the parts of the gain."""
        assert self.result is not None
        assert self.gain is not None
        base = self.result.tokens_per_s / (1 + self.gain.value)
        value, low, high = (base * (1 + part) for part in self.gain[:3])
        return Gain(value, low, high, base * self.gain.standard_error)

    def as_dict(self) -> dict[str, Any]:
        """The stage as a row of stages.csv and of JSON."""
        row = {"stage": self.name, "family": self.family, "setting": self.setting, "knows": self.knows}
        if self.result is None:
            return {**row, "missing": self.missing}
        figures = {"tokens_per_s": self.speeds, "gain": self.gain} | ({"added": self.added} if self.added else {})
        return {**row, "missing": "", **flat(figures), "percent_of_oracle_gain": self.percent_of_gain}


def stages_of(contest: Contest) -> list[Stage]:
    """Every stage of a contest, in their order."""
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
    stages: list[Stage] = []
    pending: list[str] = []  # knowledge of missing stages, which the next one that has figures adds too
    before: Result | None = None
    for name, knows in known.items():
        pending.append(knows)
        result = results.get(name)
        if result is None:
            stages.append(Stage(family=name, knows=knows))
            continue
        figures: dict[str, Any] = {"gain": contest.gain(name)}
        if before:
            share = 100 * (result.tokens_per_s - before.tokens_per_s) / whole if whole > 0 else None
            figures |= {"added": contest.gain(name, before.family), "percent_of_gain": share}
        stages.append(Stage(family=name, knows="; ".join(pending), result=result, **figures))
        before, pending = result, []
    return stages


def stage_table(stages: Sequence[Stage], contest: Contest, *, beside: Sequence[str] = ()) -> Table:
    """The stages below the target alone; `beside`: what else decides, each a policy with its gain."""
    alone = {"stage": family(ALONE).label, "what it knows": "no draft", "setting": ""}
    rows = [alone | {"tokens/s": _speed(1 / contest.times.t_target_s[0])}]
    for stage in stages:
        row = {"stage": stage.name, "what it knows": stage.missing or stage.knows, "setting": stage.setting}
        if stage.result:
            speed, low, high, _ = stage.speeds
            row["tokens/s"] = _speed(speed)
        if stage.gain and stage.added:
            row["tokens/s"] = f"{_speed(speed)} ({_speed(low)}, {_speed(high)})"
            row |= {"gain": stage.gain.words, "adds": stage.added.words}
        rows.append(row)
    slower = " and ".join(stage.name for stage in stages if stage.added and stage.added.value < 0)
    lost = f". {slower}: slower than the row above" if slower else ""
    listed = f". Beside them, over the best fixed length: {'; '.join(beside)}" if beside else ""
    note = (
        f"{PREDICTED}. gain: tokens/s over the best fixed length's, with its 95 % interval: paired bootstrap "
        "of test prompts, at the settings that dev chose. tokens/s has the same interval, times the best fixed "
        f"length's. adds: over the row above. Bold: the best on dev of what can be run{lost}{listed}"
    )
    columns = ("stage", "what it knows", "setting", "tokens/s", "gain", "adds")
    return Table(title_of(contest), rows, note, names=3, headings=columns)


def console_table(table: Table, *, best: str, more: int) -> Table:
    """The same for a console of 100 columns: what a stage knows below its name, its setting in the note, the stage
    called `best` in bold; `more`: rows of policies that are not stages.
    """
    rows = []
    for row in table.rows:
        name = f"[bold]{row['stage']}[/bold]" if row["stage"] == best else row["stage"]
        numbers = {heading: row.get(heading, "") for heading in table.columns[3:]}
        rows.append({"stage": f"{name}\n{fill(row['what it knows'], 34)}", **numbers})
    settings = "; ".join(f"{row['stage']} {row['setting']}" for row in table.rows if row["setting"])
    return Table(table.title, rows, f"{table.note}. Chosen on dev: {settings}. --all: {more} more rows")


def _speed(tokens_per_s: float) -> str:
    return f"{tokens_per_s:.{0 if tokens_per_s >= 100 else 1}f}"


def stage_plot(stages: Sequence[Stage], contest: Contest) -> Plot:
    """Tokens per second of each stage, in full colour from where the one before it ends."""
    figure, axes = figure_of(0.72 * len(stages) + 1.2)
    styles = styles_of(stage.family for stage in stages)
    base = before = stages[0].speeds.value
    for row, stage in enumerate(stages):
        text, end, colour = stage.missing.partition(":")[0], base, styles[stage.family].colour
        if stage.result:
            value, low, end, _ = stage.speeds
            text = _speed(value)
            axes.barh(row, min(before, value) - base, left=base, color=colour, alpha=0.35, height=0.62)
            axes.barh(row, max(value - before, 0), left=before, color=colour, height=0.62)
            if row:
                axes.errorbar(value, row, xerr=[[value - low], [end - value]], color=GREY, capsize=3, linewidth=1.2)
            before = value
        axes.annotate(text, (max(end, base), row), xytext=(5, 0), textcoords="offset points", va="center", fontsize=9)
    axes.set_yticks(range(len(stages)), [f"{stage.name}\n{fill(stage.knows, 26)}" for stage in stages])
    axes.invert_yaxis()
    axes.axvline(base, color=GREY, linewidth=1)
    axes.margins(x=0.3)
    axes.set_xlabel("predicted tokens per second")
    percent = (lambda speed: 100 * (np.asarray(speed) / base - 1), lambda gain: base * (1 + np.asarray(gain) / 100))
    gains = axes.secondary_xaxis("top", functions=percent)
    gains.set_xlabel("gain over the best fixed length, %")
    gains.tick_params(labelsize=9)
    return plot_of(
        f"gain-{contest.times.slug}",
        f"Where the oracle's gain goes at {contest.times.title}: {contest.dataset}. Full colour is what a stage adds "
        "to the one above it; whiskers are 95 % intervals, paired with the best fixed length. No policy that can be "
        "run reaches the perfect head or the oracle.",
        figure,
    )

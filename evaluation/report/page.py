"""What an evaluation writes: report.html, a page that works offline, and tables, plots and counts beside it. Everything
on the page is computed here; its slider switches between tables that are already there, one for each ratio of times.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import pandas as pd

from decode.experiment import Experiment
from evaluation.clock import ClockReport
from evaluation.competitor import Competitor
from evaluation.contest import Arm, Contest, Replays
from evaluation.families import HEADS, family
from evaluation.figure import Plot
from evaluation.report.batches import batch_tables
from evaluation.report.plots import stage_plot
from evaluation.report.tables import result_table, stage_table, stages_of
from evaluation.report.verdict import explained, sentence_of
from evaluation.table import Table, flat, say
from store.shards import write_atomic

RATIOS = (1.5, 2.0, 3.0, 4.0, 5.0, 8.0, 12.0, 20.0, 30.0, 40.0)
"""t_target / t_draft of the slider's steps, beside that of the evaluation."""


@dataclass(frozen=True, kw_only=True)
class Page:
    """What an evaluation found, by dataset, for the page and the files beside it."""

    about: str
    """One line under the title."""
    directory: Path
    """Folder of all files."""
    replays: dict[str, Replays] = field(default_factory=dict)
    contests: dict[str, list[Contest]] = field(default_factory=dict)
    """The contest at each of the evaluation's times, the first of this machine or as given."""
    rankings: dict[str, list[Contest]] = field(default_factory=dict)
    """Contests by ratio of times; every dataset has the same ratios."""
    records: list[dict[str, Any]] = field(default_factory=list)
    """The rows of results.csv."""
    plots: list[Plot] = field(default_factory=list)
    """All but those of stages and clocks."""
    clocks: list[ClockReport] = field(default_factory=list)
    batches: list[dict[str, Any]] = field(default_factory=list)
    """The rows of batches.csv."""

    @property
    def stages(self) -> list[dict[str, Any]]:
        """The rows of stages.csv."""
        return [
            {"dataset": contest.dataset, "costs": contest.times.title, **flat(stage)}
            for contests in self.contests.values()
            for contest in contests
            for stage in stages_of(contest)
        ]


def folder_of(experiment: Experiment, competitors: Sequence[Competitor]) -> Path:
    """Folder of everything that is written: decode.dir, or a folder in it if no heads compete now and the report there
    has some, which is kept. Prints why no heads compete, and how they are made.
    """
    directory = experiment.directory
    if any(competitor.head for competitor in competitors):
        return directory
    lacking = "decode.policies names no head" if experiment.heads else f"No trained heads in {experiment.exported}"
    say(
        f"{lacking}: only policies that need no training are compared. `acceptance-heads export --config …` makes "
        "heads of a training run (`acceptance-heads train` before it); decode.heads names others."
    )
    results = directory / "results.csv"
    if not (results.exists() and any(family(name).needs_training for name in pd.read_csv(results)["family"])):
        return directory
    without = directory / "no-heads"
    say(f"{directory / 'report.html'} compares heads and is kept; this report goes to {without / 'report.html'}.")
    return without


def write_files(page: Page) -> list[Path]:
    """Write tables and the counts of each dataset's replays; the paths, after those that `write_report` writes to."""
    directory = page.directory
    written = [write_csv(directory / "results.csv", page.records), write_csv(directory / "stages.csv", page.stages)]
    written += [_write_counts(directory / f"counts-{name}.parquet", of.arms) for name, of in page.replays.items()]
    return [directory / "report.html", directory / "plots", *written]


def write_csv(path: Path, records: Sequence[Mapping[str, Any]]) -> Path:
    """Write a table; its path."""
    write_atomic(path, pd.DataFrame(records).to_csv(index=False).encode())
    return path


def _write_counts(path: Path, arms: Sequence[Arm]) -> Path:
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
    return path


def write_report(page: Page) -> None:
    """Write report.html, and every plot as a file."""
    pictures = {name: list(map(stage_plot, contests)) for name, contests in page.contests.items()}
    is_one = len(pictures) == 1
    plots = [picture if is_one else picture.of(name) for name, of_set in pictures.items() for picture in of_set]
    clocks = [(report, report.plot) for report in page.clocks]
    for plot in [*plots, *page.plots, *(plot for _, plot in clocks)]:
        write_atomic(page.directory / "plots" / f"{plot.name}.svg", plot.svg.encode())
    steps = next(iter(page.rankings.values()), [])
    first = [contests[0].times for contests in page.contests.values()]
    current = next((number for number, step in enumerate(steps) if step.times in first), 0)
    labels = [
        f"{step.times.ratio:.3g} draft forwards{', as in this evaluation' * (number == current)}"
        for number, step in enumerate(steps)
    ]
    parts = {
        "about": escape(page.about),
        "answers": "".join(_answers(name, page.contests[name], pictures[name], is_one=is_one) for name in pictures),
        "rankings": "".join(
            f'<div data-step="{step}"{"" if step == current else " hidden"}>'
            f"{_table(result_table(contest)._replace(note=''))}</div>"
            for contests in page.rankings.values()
            for step, contest in enumerate(contests)
        ),
        "last": max(0, len(steps) - 1),
        "here": current,
        "labels": json.dumps(labels or [""]),
        "batches": _batches(page.batches),
        "clocks": _clocks(clocks),
        "plots": "".join(map(_figure, page.plots)),
    }
    template = Template((Path(__file__).parent / "page.html").read_text(encoding="utf-8"))
    write_atomic(page.directory / "report.html", template.substitute(parts).encode())


def _answers(dataset: str, contests: Sequence[Contest], pictures: Sequence[Plot], *, is_one: bool) -> str:
    first, *others = map(_answer, contests, pictures)
    folded = (
        f"<details><summary>at {escape(contest.times.title)}</summary>{other}</details>"
        for contest, other in zip(contests[1:], others, strict=True)
    )
    return f"<h2>{escape(dataset)}</h2>" * (not is_one) + first + "".join(folded)


def _answer(contest: Contest, picture: Plot) -> str:
    verdict, best = escape(sentence_of(contest)).replace(" %", "&nbsp;%"), contest.leaders.get(HEADS)
    about = f"{best.competitor.head}: {explained(best.competitor.policy.heads[0])}." if best else ""
    return f'<p class="verdict">{verdict}</p>{_note(about)}{_figure(picture)}{_table(stage_table(contest))}'


def _batches(rows: Sequence[Mapping[str, Any]]) -> str:
    setups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        share = "as measured" if row["verify_share"] is None else f"{row['verify_share']:g} t_draft"
        title = f"a target forward costs {row['ratio']:.2f} draft forwards, {row['costs']}; a verified token {share}"
        setups.setdefault((row["dataset"], title), []).append(row)
    tables = [table for (_, title), of_setup in setups.items() for table in batch_tables(of_setup, title)]
    parts = "".join(_table(table._replace(note="")) for table in tables)
    return f"<h2>In batches</h2>{_note(tables[0].note)}{parts}" if tables else ""


def _clocks(reports: Sequence[tuple[ClockReport, Plot]]) -> str:
    parts = (
        f"{_table(report.table._replace(title=f'{report.dataset}: {report.about}'))}"
        f"{_note(report.verdict)}{_figure(plot)}"
        for report, plot in reports
    )
    return f"<h2>On a clock</h2>{''.join(parts)}" if reports else ""


def _figure(plot: Plot) -> str:
    return f"<figure>{plot.svg}<figcaption>{escape(plot.caption)}</figcaption></figure>"


def _note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>' if text else ""


def _table(table: Table) -> str:
    kinds = [' class="name"' * (number < table.names) for number in range(len(table.columns))]
    head = "".join(f"<th{kind}>{escape(column)}</th>" for kind, column in zip(kinds, table.columns, strict=True))
    body = ""
    for number, cells in enumerate(table.cells):
        row = "".join(f"<td{kind}>{escape(cell)}</td>" for kind, cell in zip(kinds, cells, strict=True))
        body += f'<tr class="{table.marks.get(number, "")}">{row}</tr>'
    return (
        f'<h3>{escape(table.title)}</h3><div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>{_note(table.note)}"
    )

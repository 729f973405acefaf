"""report.html: the evaluation as one page that works offline. Everything on it is computed here; its slider switches
between tables that are already there, one for each ratio of times.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from evaluation.clock import ClockReport
from evaluation.contest import Contest
from evaluation.families import ALONE, BOUNDS, families
from evaluation.figure import Plot
from evaluation.report.batches import batch_tables
from evaluation.report.results import result_table
from evaluation.report.verdict import Answer
from evaluation.table import Table
from store.shards import write_atomic

RATIOS = (1.5, 2.0, 3.0, 4.0, 5.0, 8.0, 12.0, 20.0, 30.0, 40.0)
"""t_target / t_draft of the slider's steps, beside that of the evaluation."""


@dataclass(frozen=True, kw_only=True)
class Page:
    """Contents of the page."""

    about: str
    """One line under the title."""
    directory: Path
    """Folder that report.html and all files beside it are written to."""
    answers: dict[str, list[Answer]] = field(default_factory=dict)
    """Dataset -> what its contest at each of the evaluation's times says, the first of this machine or as given."""
    rankings: dict[str, list[Contest]] = field(default_factory=dict)
    """Dataset -> its contests by ratio of times; every dataset has the same ratios."""
    plots: list[Plot] = field(default_factory=list)
    clocks: list[ClockReport] = field(default_factory=list)
    """Report of each dataset's clock, where there was one."""
    batches: list[dict[str, Any]] = field(default_factory=list)
    """The rows of batches.csv, where there were batches."""


def write_report(page: Page) -> None:
    """Write the evaluation as one page, report.html, into the page's directory."""
    steps = next(iter(page.rankings.values()), [])
    first = [answers[0].contest.times for answers in page.answers.values()]
    current = next((number for number, step in enumerate(steps) if step.times in first), 0)
    labels = [
        f"{step.times.ratio:.3g} draft forwards{', as in this evaluation' * (number == current)}"
        for number, step in enumerate(steps)
    ]
    parts = {
        "about": escape(page.about),
        "answers": "".join(_answers(name, page) for name in page.answers),
        "rankings": "".join(_rankings(contests, current) for contests in page.rankings.values()),
        "last": max(0, len(steps) - 1),
        "here": current,
        "labels": json.dumps(labels or [""]),
        "batches": _batches(page.batches),
        "clocks": _clocks(page.clocks),
        "plots": "".join(map(_figure, page.plots)),
    }
    template = Template((Path(__file__).parent / "page.html").read_text(encoding="utf-8"))
    write_atomic(page.directory / "report.html", template.substitute(parts).encode())


def has_heads(report: Path) -> bool:
    """Whether a written page compares heads."""
    text = report.read_text(encoding="utf-8")
    return any(f'data-family="{name}"' in text for name, family in families().items() if family.needs_training)


def _answers(dataset: str, page: Page) -> str:
    first, *others = page.answers[dataset]
    heading = f"<h2>{escape(dataset)}</h2>" if len(page.answers) > 1 else ""
    folded = (
        f"<details><summary>at {escape(other.contest.times.title)}</summary>{_answer(other)}</details>"
        for other in others
    )
    return heading + _answer(first) + "".join(folded)


def _answer(answer: Answer) -> str:
    rows = answer.table.rows
    verdict = escape(answer.verdict).replace(" %", "&nbsp;%")
    explained = f'<p class="note">{escape(answer.explained)}.</p>' if answer.explained else ""
    table = _table(answer.table, classes=["best" * (row["stage"] == answer.best) for row in rows])
    return f'<p class="verdict">{verdict}</p>{explained}{_figure(answer.picture)}{table}'


def _rankings(contests: Sequence[Contest], current: int) -> str:
    return "".join(
        f'<div data-step="{step}"{"" if step == current else " hidden"}>{_ranking(contest)}</div>'
        for step, contest in enumerate(contests)
    )


def _ranking(contest: Contest) -> str:
    kinds, names = dict.fromkeys(BOUNDS, "bound") | {contest.best.family: "best"}, [ALONE, *contest.results]
    table = result_table(contest)._replace(note="")
    return _table(table, classes=[kinds.get(name, "") for name in names], families=names)


def _batches(rows: Sequence[Mapping[str, Any]]) -> str:
    setups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        share = "as measured" if row["verify_share"] is None else f"{row['verify_share']:g} t_draft"
        title = f"a target forward costs {row['ratio']:.2f} draft forwards, {row['costs']}; a verified token {share}"
        setups.setdefault((row["dataset"], title), []).append(row)
    tables = [table for (_, title), of_setup in setups.items() for table in batch_tables(of_setup, title)]
    note = f'<p class="note">{escape(tables[0].note)}</p>' if tables else ""
    return f"<h2>In batches</h2>{note}{''.join(_table(table._replace(note='')) for table in tables)}" if tables else ""


def _clocks(reports: Sequence[ClockReport]) -> str:
    parts = (
        f"{_table(report.table._replace(title=f'{report.dataset}: {report.about}'))}"
        f'<p class="note">{escape(report.verdict)}</p>{_figure(report.plot)}'
        for report in reports
    )
    return f"<h2>On a clock</h2>{''.join(parts)}" if reports else ""


def _figure(plot: Plot) -> str:
    return f"<figure>{plot.svg}<figcaption>{escape(plot.caption)}</figcaption></figure>"


def _table(sheet: Table, *, classes: Iterable[str] = (), families: Iterable[str] = ()) -> str:
    of_rows = zip(sheet.rows, _padded(classes), _padded(families), strict=False)
    named = {column: ' class="name"' * (number < sheet.names) for number, column in enumerate(sheet.columns)}
    body = "".join(
        f'<tr class="{name}" data-family="{escape(family)}">'
        + "".join(f"<td{css}>{escape(str(row.get(column, '')))}</td>" for column, css in named.items())
        + "</tr>"
        for row, name, family in of_rows
    )
    head = "".join(f"<th{css}>{escape(column)}</th>" for column, css in named.items())
    note = f'<p class="note">{escape(sheet.note)}</p>' if sheet.note else ""
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<h3>{escape(sheet.title)}</h3><div class="scroll">{table}</div>{note}'


def _padded(values: Iterable[str]) -> Iterable[str]:
    yield from values
    while True:
        yield ""

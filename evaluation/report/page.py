"""report.html: the evaluation as one page that works offline. Everything on it is computed here; its slider switches
between tables that are already there, one for each ratio of times.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

from evaluation.clock.results import ClockReport
from evaluation.contest.arms import Pick
from evaluation.families import BOUNDS, families, family
from evaluation.figure import Plot
from evaluation.report.verdict import Answer
from evaluation.table import Table, crossed
from evaluation.times import Times
from store.shards import write_atomic

RATIOS = (1.5, 2.0, 3.0, 4.0, 5.0, 8.0, 12.0, 20.0, 30.0, 40.0)
"""t_target / t_draft of the slider's steps, beside that of the evaluation."""


class Ranking(NamedTuple):
    """Every policy of one dataset at one ratio of times."""

    ratio: float
    sheet: Table
    families: Sequence[str]
    """Family of each row."""
    best: str
    """The family that dev chooses of those that can be run."""
    is_here: bool = False
    """Whether these are the times of the evaluation."""


@dataclass(frozen=True, kw_only=True)
class Page:
    """Contents of the page."""

    about: str
    """One line under the title."""
    directory: Path
    """Folder that report.html and all files beside it are written to."""
    cost: Times
    """Times of the evaluation."""
    answers: dict[str, list[Answer]] = field(default_factory=dict)
    """Those of each dataset, a cost each; the first is that of `cost`."""
    rankings: dict[str, list[Ranking]] = field(default_factory=dict)
    """Those of each dataset, by ratio; every dataset has the same ratios."""
    picks: dict[str, Mapping[str, Pick]] = field(default_factory=dict)
    """Family -> what dev chose at `cost`, of each."""
    plots: list[Plot] = field(default_factory=list)
    clocks: list[ClockReport] = field(default_factory=list)
    """Report of each dataset's clock, where there was one."""
    batches: list[dict[str, Any]] = field(default_factory=list)
    """The rows of batches.csv, where there were batches."""


def write_report(page: Page) -> None:
    """Write the evaluation as one page, report.html, into the page's directory."""
    steps = next(iter(page.rankings.values()), [])
    labels = [f"{step.ratio:.3g}{' (here)' * step.is_here}" for step in steps]
    parts = {
        "about": escape(page.about),
        "answers": "".join(_answers(name, page) for name in page.answers),
        "rankings": "".join(_rankings(name, of_dataset, page) for name, of_dataset in page.rankings.items()),
        "last": max(0, len(steps) - 1),
        "here": next((place for place, step in enumerate(steps) if step.is_here), 0),
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
    here, *elsewhere = page.answers[dataset]
    heading = f"<h2>{escape(dataset)}</h2>" if len(page.answers) > 1 else ""
    folded = (f"<details><summary>at {escape(other.costs)}</summary>{_answer(other)}</details>" for other in elsewhere)
    return heading + _answer(here) + "".join(folded)


def _answer(answer: Answer) -> str:
    rows = answer.table.rows
    verdict = escape(answer.verdict).replace(" %", "&nbsp;%")
    explained = f'<p class="note">{escape(answer.explained)}.</p>' if answer.explained else ""
    table = _table(answer.table, classes=["best" * (row["stage"] == family(answer.best).label) for row in rows])
    return f'<p class="verdict">{verdict}</p>{explained}{_figure(answer.picture)}{table}'


def _rankings(dataset: str, rankings: Sequence[Ranking], page: Page) -> str:
    heading = f"<h3>{escape(dataset)}</h3>" if len(page.rankings) > 1 else ""
    return heading + "".join(
        f'<div data-step="{step}"{"" if ranking.is_here else " hidden"}>{_ranking(ranking)}</div>'
        for step, ranking in enumerate(rankings)
    )


def _ranking(ranking: Ranking) -> str:
    kinds = dict.fromkeys(BOUNDS, "bound") | {ranking.best: "best"}
    classes = [kinds.get(family, "") for family in ranking.families]
    return _table(ranking.sheet, classes=classes, families=ranking.families)


def _batches(rows: Sequence[Mapping[str, Any]]) -> str:
    tables: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        share = "as measured" if row["verify_share"] is None else f"{row['verify_share']:g} t_draft"
        title = f"{row['dataset']}: a target forward costs {row['ratio']:.2f} draft forwards ({row['costs']}), "
        tables.setdefault(f"{title}a verified token {share}", []).append(row)
    sheets = (Table(title, crossed("policy", map(_cell, members))) for title, members in tables.items())
    note = (
        "Tokens/s of the whole batch at the setting that dev chose for its size, gain over the best fixed length, and "
        "seconds of a request; predicted (law 4.13)."
    )
    return f'<h2>In batches</h2><p class="note">{note}</p>{"".join(map(_table, sheets))}' if tables else ""


def _cell(row: Mapping[str, Any]) -> tuple[str, str, str]:
    figures = f"{row['tokens_per_s']:.1f}, {row['gain']:+.1%}, {row['request_s']:.3g} s"
    return family(row["family"]).label, f"batch {row['batch_size']}", figures


def _clocks(reports: Sequence[ClockReport]) -> str:
    parts = (
        f"{_table(report.sheet._replace(title=f'{report.dataset}: {report.about}'))}"
        f'<p class="note">{escape(report.verdict)}</p>{_figure(report.plot)}'
        for report in reports
    )
    return f"<h2>On a clock</h2>{''.join(parts)}" if reports else ""


def _figure(plot: Plot) -> str:
    return f"<figure>{plot.svg}<figcaption>{escape(plot.caption)}</figcaption></figure>"


def _table(sheet: Table, *, classes: Iterable[str] = (), families: Iterable[str] = ()) -> str:
    """A sheet; `classes` and `families` of its rows, where they have some."""
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

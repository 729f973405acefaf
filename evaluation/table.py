"""Tables for terminal, JSON, CSV and page; sentences, and the names of written files."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from json import dumps
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from evaluation.gain import Gain

Columns = Mapping[str, tuple[str, str]]
"""Heading -> which value of a record is below it, and its format."""


class Table(NamedTuple):
    """Rows of cells with a title and a note."""

    title: str
    rows: Sequence[Mapping[str, Any]]
    """Column -> cell."""
    note: str = ""
    """Below the table."""
    names: int = 1
    """How many columns, from the left, hold names; all others hold numbers."""
    marks: Mapping[int, str] = {}
    """Number of a row -> `best`, which is bold, or `bound`, which is pale on the page."""

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(column for row in self.rows for column in row))

    @property
    def cells(self) -> list[list[str]]:
        """The cells of each row, in the order of the columns."""
        return [[str(row.get(column, "")) for column in self.columns] for row in self.rows]

    def table(self) -> RichTable:
        """The table as it prints; cells that are too wide fold."""
        table = RichTable(title=escape(self.title), caption=escape(self.note) or None, caption_justify="left")
        for index, heading in enumerate(self.columns):
            table.add_column(escape(heading), justify="left" if index < self.names else "right", overflow="fold")
        for number, cells in enumerate(self.cells):
            table.add_row(*map(escape, cells), style="bold" if self.marks.get(number) == "best" else None)
        return table

    def print(self, width: int = 190) -> None:
        """To the terminal; `width` is that of a pipe or a file."""
        _wide_console(width).print(self.table())

    def as_dict(self) -> dict[str, Any]:
        return {"title": self.title, "rows": list(self.rows), "note": self.note}


def shown(records: Iterable[Mapping[str, Any]], columns: Columns) -> list[dict[str, str]]:
    """Rows of a table: the values of records, in the form of their columns; None shows as nothing."""

    def cell(value: Any, form: str) -> str:
        return "" if value is None else format(value, form)

    return [{heading: cell(record[name], form) for heading, (name, form) in columns.items()} for record in records]


def crossed(name: str, cells: Iterable[tuple[str, str, str]]) -> list[dict[str, str]]:
    """Rows of (row, column, cell), in order of first appearance; `name` heads the rows' own column."""
    rows: dict[str, dict[str, str]] = {}
    for row, column, cell in cells:
        rows.setdefault(row, {name: row})[column] = cell
    return list(rows.values())


def flat(record: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a record as columns of a CSV; a gain makes three, its value and the ends of its interval."""
    columns: dict[str, Any] = {}
    for name, value in record.items():
        is_gain = isinstance(value, Gain)
        columns |= (
            {name: value.value, f"{name}_low": value.low, f"{name}_high": value.high} if is_gain else {name: value}
        )
    return columns


def _wide_console(width: int) -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=width)


def say(text: str) -> None:
    """Print sentences, broken between words where the terminal ends; in a pipe or a file at 120."""
    _wide_console(120).print(text, markup=False, highlight=False)


@contextmanager
def printing(json: bool) -> Iterator[Callable[[Any], None]]:
    """Print as ever, or with `json` only the document that is published, and everything else on stderr."""
    documents: list[Any] = []
    with redirect_stdout(sys.stderr) if json else nullcontext():
        yield documents.append
    if json:
        print(*(dumps(document, allow_nan=False) for document in documents))


def announce(paths: Iterable[Path]) -> list[str]:
    """Print which files were written, in a line for each folder, or for all folders of the same files; their paths."""
    files: dict[Path, list[str]] = {}
    paths = list(paths)
    for path in paths:
        files.setdefault(path.parent, []).append(path.name)
    folders: dict[str, list[Path]] = {}
    for folder, names in files.items():
        folders.setdefault(", ".join(names), []).append(folder)
    for files_text, (first, *others) in folders.items():
        more = f" and {len(others)} more folders" if others else ""
        print(f"wrote {files_text} in {first}{more}")
    return [str(path) for path in paths]

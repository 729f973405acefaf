"""A table of a paper: as rows of cells for JSON, and as it prints."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich.table import Table


class Sheet(NamedTuple):
    """One table."""

    title: str
    """Which table of which paper, and whether its figures are replayed or clocked."""
    rows: Sequence[Mapping[str, Any]]
    """Column -> cell; a cell may be in rich's markup, for bold."""
    note: str = ""
    """Below the table: what it says, in words."""

    def table(self) -> Table:
        """To print; the first column is a name, the others are numbers. What is too wide folds: a figure that is cut says nothing."""
        table = Table(title=self.title, caption=self.note or None, caption_justify="left")
        for index, column in enumerate(self._columns()):
            table.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
        for row in self.rows:
            table.add_row(*(str(row.get(column, "")) for column in self._columns()))
        return table

    def _columns(self) -> list[str]:
        return list(dict.fromkeys(column for row in self.rows for column in row))

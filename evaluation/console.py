"""Where tables, and the names of written files, are printed."""

from collections.abc import Iterable
from pathlib import Path

from rich.console import Console


def wide_console(width: int = 190) -> Console:
    """A console as wide as the terminal; in a pipe or a file `width`, so that no column folds."""
    console = Console()
    return console if console.is_terminal else Console(width=width)


def announce(paths: Iterable[Path]) -> list[str]:
    """Say which files were written; returns their names."""
    names = [str(path) for path in paths]
    print("\n".join(["wrote", *(f"  {name}" for name in names)]))
    return names

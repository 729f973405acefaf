"""Where tables are printed."""

from rich.console import Console


def wide_console() -> Console:
    """As wide as the terminal; in a pipe or a file, wide enough that no column folds."""
    console = Console()
    return console if console.is_terminal else Console(width=190)

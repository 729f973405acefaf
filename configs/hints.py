"""How a mistyped name is reported, and which command comes next."""

import shlex
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

from configs.schema import Config

_FIRST = 3
"""Names that `first_of` lists."""


class NothingToExportError(ValueError):
    """No head of a sweep beats the draft's own signal; `all` continues without heads."""


def meant(name: str, known: Iterable[str]) -> str:
    """The end of an error message: the known name most similar to a mistyped one, or all names if none is similar."""
    names = list(known)
    near = get_close_matches(name, names, n=1)
    return f"did you mean {near[0]}?" if near else f"it must be one of {', '.join(names)}"


def first_of(names: Sequence[str]) -> str:
    """The first names of a list, and how many more there are: a, b, c and 37 more."""
    more = len(names) - _FIRST
    listed = ", ".join(names[:_FIRST])
    return f"{listed} and {more} more" if more > 0 else listed


def say_next(config: Config, name: str, closing: str = "") -> None:
    """Print the command that follows, with the arguments that set the experiment. Nothing is printed for an experiment
    that was made in Python, which no command can name, or within `all`.
    """
    if config.arguments and not config.is_step:
        print(f"next: {shlex.join(['acceptance-heads', name, *config.arguments])}{closing}")

"""What somebody meant who mistyped a name."""

from collections.abc import Iterable
from difflib import get_close_matches


def meant(name: str, known: Iterable[str]) -> str:
    """The end of an error: the known name that is most like a mistyped one, or all of them where none is.

    Args:
        name: what was typed.
        known: every name that there is.
    """
    names = list(known)
    near = get_close_matches(name, names, n=1)
    return f"did you mean {near[0]}?" if near else f"one of {', '.join(names)}"

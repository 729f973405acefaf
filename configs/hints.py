"""How a mistyped name is reported."""

from collections.abc import Iterable
from difflib import get_close_matches


def meant(name: str, known: Iterable[str]) -> str:
    """The end of an error message: the known name most similar to a mistyped one, or all names if none is similar."""
    names = list(known)
    near = get_close_matches(name, names, n=1)
    return f"did you mean {near[0]}?" if near else f"it must be one of {', '.join(names)}"

"""JSON that the project wrote itself: a file that was truncated, or broken by hand, is named with line and remedy."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any


def read_json(path: Path, *, remedy: str, keys: Collection[str] = ()) -> dict[str, Any]:
    """The object in a file.

    Args:
        path: the path of the file.
        remedy: a clause that says what the user can do about a broken file, the end of the message.
        keys: the keys that the object must have.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it holds no whole JSON object, or one without these keys.
    """
    return parse_json(path.read_bytes(), place=str(path), remedy=remedy, keys=keys)


def parse_json(text: bytes, *, place: str, remedy: str, keys: Collection[str] = ()) -> dict[str, Any]:
    """The object in some text; `place` is what messages call it, the other arguments are those of `read_json`."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        where = place if error.lineno == 1 else f"{place}:{error.lineno}"
        raise ValueError(f"{where}: no whole JSON ({error.msg} at column {error.colno}); {remedy}") from error
    except (UnicodeDecodeError, RecursionError) as error:
        cause = "its bytes are no text" if isinstance(error, UnicodeDecodeError) else "it is nested too deeply"
        raise ValueError(f"{place}: no JSON, {cause}; {remedy}") from error
    return checked_object(value, place=place, remedy=remedy, keys=keys)


def checked_object(value: Any, *, place: str, remedy: str, keys: Collection[str] = ()) -> dict[str, Any]:
    """The value, which is a JSON object with these keys; else ValueError, as for `read_json`."""
    if not isinstance(value, dict):
        raise ValueError(f"{place}: expected a JSON object, got {type(value).__name__}; {remedy}")
    if missing := [key for key in keys if key not in value]:
        raise ValueError(f"{place}: no {missing[0]!r} in it; {remedy}")
    return value

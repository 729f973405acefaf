"""JSON objects in files; an error in a truncated or hand-edited file names the line and a remedy."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any


def read_json(path: Path, *, remedy: str, keys: Collection[str] = ()) -> dict[str, Any]:
    """The object in a JSON file.

    Args:
        path: the file.
        remedy: end of error messages: how the user can repair a broken file.
        keys: keys that the object must have.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not a complete JSON object, or a key is missing.
    """
    return parse_json(path.read_bytes(), source=str(path), remedy=remedy, keys=keys)


def parse_json(text: bytes, *, source: str, remedy: str, keys: Collection[str] = ()) -> dict[str, Any]:
    """The object in a JSON text; error messages begin with `source`. Other arguments as for `read_json`."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        location = source if error.lineno == 1 else f"{source}:{error.lineno}"
        raise ValueError(f"{location}: invalid JSON ({error.msg} at column {error.colno}); {remedy}") from error
    except (UnicodeDecodeError, RecursionError) as error:
        cause = "not UTF-8 text" if isinstance(error, UnicodeDecodeError) else "nested too deeply"
        raise ValueError(f"{source}: invalid JSON ({cause}); {remedy}") from error
    return checked_object(value, source=source, remedy=remedy, keys=keys)


def checked_object(value: Any, *, source: str, remedy: str, keys: Collection[str] = ()) -> dict[str, Any]:
    """`value` if it is an object with these keys; else ValueError, as for `parse_json`."""
    if not isinstance(value, dict):
        raise ValueError(f"{source}: expected a JSON object, got {type(value).__name__}; {remedy}")
    if missing := [key for key in keys if key not in value]:
        raise ValueError(f"{source}: missing key {missing[0]!r}; {remedy}")
    return value

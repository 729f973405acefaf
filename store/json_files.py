"""JSON objects in files and in lines of files; errors in a truncated or hand-edited file name the line and a remedy."""

import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from store.lock import only_writer

_WAIT_S = 60.0
Json = dict[str, Any]
"""A JSON object. The types of its values depend on the file."""
Key = Mapping[str, object]


def read_json(path: Path, *, remedy: str, keys: Collection[str] = ()) -> Json:
    """The object in a JSON file; ValueError, ended by `remedy`, if it is no complete object or lacks one of `keys`."""
    return _checked(path.read_bytes(), str(path), remedy, keys)


def _checked(value: object, source: str, remedy: str, keys: Collection[str] = ()) -> Json:
    """`value`, or the value that is encoded in these bytes, if it is an object with these keys."""
    try:
        value = json.loads(value) if isinstance(value, bytes) else value
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{source}: invalid JSON ({error}); {remedy}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{source}: expected a JSON object, got {type(value).__name__}; {remedy}")
    if missing := [key for key in keys if key not in value]:
        raise ValueError(f"{source}: missing key {missing[0]!r}; {remedy}")
    return value


class KeyedStore:
    """A key-value store for results: a file of JSON lines, in which the last entry of a key counts.

        {"key": {"kind": "cell", "ratio": 5}, "value": {...}}

    A key has everything that its value depends on; the order of its entries does not matter. Each write is one
    append under a lock, so concurrent processes lose nothing. A killed process leaves at most an incomplete last
    line, which readers ignore and the next writer removes.
    """

    def __init__(self, path: Path, *, remedy: str, fields: Collection[str] = ()) -> None:
        """`path` need not exist yet; `remedy` ends messages about a broken line; every value must have `fields`."""
        self.path = path
        self._remedy = remedy
        self._fields = fields

    def entries(self) -> list[tuple[Json, Json]]:
        """(key, value) of every key, in the order in which keys were first added; ValueError for a broken line."""
        entries = {}
        for number, line in enumerate(self._complete_lines().splitlines(), start=1):
            source = f"{self.path}:{number}"
            entry = _checked(line, source, self._remedy, ("key", "value"))
            key = _checked(entry["key"], source, self._remedy)
            entries[_canonical(key)] = key, _checked(entry["value"], source, self._remedy, self._fields)
        return list(entries.values())

    def get(self, key: Key) -> Json | None:
        """The value of a key; None if it has none."""
        return next((value for other, value in self.entries() if _canonical(other) == _canonical(key)), None)

    def keep(self, entries: Iterable[tuple[Key, Mapping[str, object]]]) -> None:
        """Add entries; a new value replaces the key's earlier one."""
        lines = "".join(json.dumps({"key": key, "value": value}) + "\n" for key, value in entries)
        lock = only_writer(self.path.parent, setting="directory", name=f".{self.path.name}.lock", wait_s=_WAIT_S)
        with lock, self.path.open("ab") as file:
            file.truncate(len(self._complete_lines()))
            file.write(lines.encode())

    def _complete_lines(self) -> bytes:
        content = self.path.read_bytes() if self.path.is_file() else b""
        return content[: content.rfind(b"\n") + 1]


def _canonical(key: Key) -> str:
    return json.dumps(key, sort_keys=True)

"""A key-value store for results: a file of JSON lines, in which the last entry of a key counts.

    {"key": {"kind": "cell", "ratio": 5}, "value": {...}}

A key has everything that its value depends on; the order of its entries does not matter. Each write is one append under
a lock, so concurrent processes lose nothing. A killed process leaves at most an incomplete last line, which readers
ignore and the next writer removes.
"""

import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from store.json_files import checked_object, parse_json
from store.lock import only_writer

_WAIT_S = 60.0
Key = Mapping[str, Any]


class KeyedStore:
    """The entries of one file, which need not exist yet.

    Attributes:
        path: the file.
    """

    def __init__(self, path: Path, *, remedy: str, fields: Collection[str] = ()) -> None:
        """`remedy` ends error messages about a broken line; `fields` are keys that every value must have."""
        self.path, self._remedy, self._fields = path, remedy, fields

    def entries(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """(key, value) of every key, in the order in which keys were first added; ValueError for a broken line."""
        entries = {}
        for number, line in enumerate(self._complete_lines().splitlines(), start=1):
            about: dict[str, Any] = {"source": f"{self.path}:{number}", "remedy": self._remedy}
            entry = parse_json(line, keys=("key", "value"), **about)
            key = checked_object(entry["key"], **about)
            entries[_canonical(key)] = key, checked_object(entry["value"], keys=self._fields, **about)
        return list(entries.values())

    def get(self, key: Key) -> dict[str, Any] | None:
        """The value of a key; None if it has none."""
        return next((value for other, value in self.entries() if _canonical(other) == _canonical(key)), None)

    def keep(self, entries: Iterable[tuple[Key, Mapping[str, Any]]]) -> None:
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

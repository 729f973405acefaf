"""Values that are kept between runs, each under its key: one JSON line per entry, of which the last of a key counts.

    {"key": {"kind": "cell", "ratio": 5}, "value": {...}}

Both are JSON objects, and a key is all that its value depends on; two that hold the same are one key, in whatever
order. Entries are added in one write under a lock, so two processes lose nothing of each other's, and a process that is
killed leaves at most a last line without an end, which no reader takes and the next writer cuts off.
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
    """One file of entries."""

    def __init__(self, path: Path, *, remedy: str, fields: Collection[str] = ()) -> None:
        """Args:
        path: the path of the file, which need not be there.
        remedy: a clause that says what a user can do about a broken line, the end of the message.
        fields: the keys that every value, a JSON object, must have.
        """
        self.path, self._remedy, self._fields = path, remedy, fields

    def entries(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """(key, value) of every key, in the order in which the keys were first kept.

        Raises:
            ValueError: a line that is no entry, which is named.
        """
        kept = {}
        for number, line in enumerate(self._finished().splitlines(), start=1):
            about: dict[str, Any] = {"place": f"{self.path}:{number}", "remedy": self._remedy}
            entry = parse_json(line, keys=("key", "value"), **about)
            key, value = (checked_object(entry[name], **about) for name in ("key", "value"))
            kept[_name_of(key)] = key, checked_object(value, keys=self._fields, **about)
        return list(kept.values())

    def get(self, key: Key) -> dict[str, Any] | None:
        """The value of a key; None where nothing is kept under it."""
        return next((value for other, value in self.entries() if _name_of(other) == _name_of(key)), None)

    def keep(self, entries: Iterable[tuple[Key, Mapping[str, Any]]]) -> None:
        """Add entries; those of a key that is there take the place of its former value."""
        lines = [json.dumps({"key": key, "value": value}) + "\n" for key, value in entries]
        lock = only_writer(self.path.parent, setting="directory", name=f".{self.path.name}.lock", wait_s=_WAIT_S)
        with lock, self.path.open("ab") as file:
            file.truncate(len(self._finished()))
            file.write("".join(lines).encode())

    def _finished(self) -> bytes:
        whole = self.path.read_bytes() if self.path.is_file() else b""
        return whole[: whole.rfind(b"\n") + 1]


def _name_of(key: Key) -> str:
    """A text that is the same for equal keys."""
    return json.dumps(key, sort_keys=True)

"""Facts of large files that cost a pass over them, remembered between processes: a sum, or that every number is finite.

A file is recognised by device and inode, and read again when its size or the time of its last change differs.
`acceptance-heads check` remembers nothing and reads every file.
"""

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_LARGE_BYTES = 2**22
"""Minimum size of a file whose facts are remembered: smaller ones are read in milliseconds."""
_SETTLED_NS = 2 * 10**9
"""A file that changed later than this before it was read is not remembered: it may change again within one tick
of the file system's clock, which its times do not show.
"""
_MAX_FILES = 20_000


class FileFacts:
    """Facts of files, kept in ~/.cache/acceptance-heads, or $XDG_CACHE_HOME; if nothing can be written there,
    the next process reads the files again.
    """

    def __init__(self) -> None:
        # expanduser returns "~" as it is where no home directory is known, as in some containers: then nothing is kept
        home = os.path.expanduser("~")
        self._path = Path(os.environ.get("XDG_CACHE_HOME") or Path(home, ".cache"), "acceptance-heads", "files.json")
        self._known = self._stored()
        self._new: dict[str, dict[str, str]] = {}

    def fact(self, path: Path, name: str, read: Callable[[Path], str]) -> str:
        """What `read` returns for a file; of a large file that did not change since, what it returned before.
        Nothing is remembered if it raises.
        """
        inode, state = _identity(path)
        facts = self._facts(inode, state)
        if name in facts:
            return facts[name]
        start_ns = time.time_ns()
        value = read(path)
        stat = path.stat()
        is_settled = max(stat.st_mtime_ns, stat.st_ctime_ns) < start_ns - _SETTLED_NS
        if stat.st_size >= _LARGE_BYTES and is_settled and _identity(path) == (inode, state):
            self._known[inode] = facts | {name: value}
            self._new[inode] = self._known[inode]
        return value

    def has(self, path: Path, name: str) -> bool:
        """Whether a fact of a file is known, and the file did not change since."""
        return name in self._facts(*_identity(path))

    def _facts(self, inode: str, state: str) -> dict[str, str]:
        """What is known of a file that did not change since; its state alone if nothing is."""
        facts = self._known.get(inode, {})
        return facts if facts.get("state") == state else {"state": state}

    def save(self) -> None:
        """Write new facts for later processes."""
        if not self._new or not self._path.is_absolute():
            return
        stored = self._stored()  # with what other processes wrote in the meantime
        for inode in self._new:
            stored.pop(inode, None)  # the newest come last
        newest = list((stored | self._new).items())[-_MAX_FILES:]
        partial = self._path.with_name(f".{self._path.name}.{os.getpid()}.partial")
        with suppress(OSError):
            partial.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(dict(newest), indent=0), encoding="utf-8")
            partial.replace(self._path)

    def _stored(self) -> dict[str, dict[str, str]]:
        with suppress(OSError, ValueError, RecursionError):  # missing or unreadable: read the files again
            stored = json.loads(self._path.read_text(encoding="utf-8"))
            if isinstance(stored, dict):
                return {inode: facts for inode, facts in stored.items() if isinstance(facts, dict)}
        return {}


def _identity(path: Path) -> tuple[str, str]:
    """Device and inode of a file; and its size and the times of its last changes."""
    stat = path.stat()
    return f"{stat.st_dev} {stat.st_ino}", f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}"

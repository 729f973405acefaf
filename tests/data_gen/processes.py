"""Processes by their parents: a test may kill only those that it started."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_DEADLINE_S = 30.0


def parents() -> dict[int, int]:
    """pid -> parent pid of every process."""
    parent_of = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent_of[int(folder.name)] = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except (FileNotFoundError, ProcessLookupError):  # it has ended since the folder was listed
            continue
    return parent_of


def descendants(ancestor: int) -> list[int]:
    """Processes that `ancestor` started, or one of those did."""
    tree = parents()

    def descends(pid: int) -> bool:
        while pid > 1:
            pid = tree.get(pid, 0)
            if pid == ancestor:
                return True
        return False

    return [pid for pid in tree if descends(pid)]


def ray_actors(ancestor: int | None = None) -> list[int]:
    """Ray's workers among the descendants of a process (default: this one)."""
    actors = []
    for pid in descendants(os.getpid() if ancestor is None else ancestor):
        try:
            name = Path(f"/proc/{pid}/cmdline").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if name.startswith("ray::_Actor"):
            actors.append(pid)
    return actors


@contextmanager
def meanwhile(work: Callable[[], None], *, until: Callable[[], bool]) -> Iterator[int]:
    """While the block runs, a forked child does `work`; the block begins when `until` is true, and ends the child."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(1)
    try:
        deadline = time.monotonic() + _DEADLINE_S
        while not until():
            assert time.monotonic() < deadline, f"not within {_DEADLINE_S} s"
            time.sleep(0.005)
        yield child
    finally:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)

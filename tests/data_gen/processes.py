"""Processes by their parents: a test may kill only those that it started."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_DEADLINE_S = 30.0
_ENDED = (FileNotFoundError, ProcessLookupError)
"""Errors where a process has ended since /proc was listed."""


def started(work: Callable[[], object]) -> int:
    """The id of a forked child that does `work`; its exit code is 1 after an exception."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return child


def ended(*children: int) -> list[int]:
    """The exit codes of the children; below 0 the signal that killed one."""
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def at_once(*works: Callable[[], object]) -> list[int]:
    """The exit codes of forked children that do these works at the same time."""
    return ended(*map(started, works))


def descendants(ancestor: int) -> list[int]:
    """Processes that `ancestor` started, or one of those did."""
    parent_of = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(*_ENDED):
            parent_of[int(folder.name)] = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])

    def descends(pid: int) -> bool:
        while pid > 1:
            pid = parent_of.get(pid, 0)
            if pid == ancestor:
                return True
        return False

    return [pid for pid in parent_of if descends(pid)]


def ray_actors() -> list[int]:
    """Ray's workers among the descendants of this process."""
    actors = []
    for pid in descendants(os.getpid()):
        with suppress(*_ENDED):
            actors += [pid] * Path(f"/proc/{pid}/cmdline").read_text().startswith("ray::_Actor")
    return actors


@contextmanager
def meanwhile(work: Callable[[], None], *, until: Callable[[], bool]) -> Iterator[int]:
    """While the block runs, a forked child does `work`; the block begins when `until` is true, and ends the child."""
    child = started(work)
    try:
        deadline = time.monotonic() + _DEADLINE_S
        while not until():
            assert time.monotonic() < deadline, f"not within {_DEADLINE_S} s"
            time.sleep(0.005)
        yield child
    finally:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        ended(child)

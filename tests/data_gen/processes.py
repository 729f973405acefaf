"""Processes by their parents: a test may kill only those that it started."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import psutil
import torch

_DEADLINE_S = 30.0


def started(work: Callable[[], object]) -> int:
    """The id of a forked child that does `work`; its exit code is 1 after an exception."""
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)  # makes torch's pool anew; threads that did it at once would find none
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
    return [child.pid for child in psutil.Process(ancestor).children(recursive=True)]


def ray_actors() -> list[int]:
    """Ray's workers among the descendants of this process."""
    actors = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has ended since
            actors += [child.pid] * " ".join(child.cmdline()).startswith("ray::_Actor")
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

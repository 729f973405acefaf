"""One writer per directory: a lock that ends with its process, however that ends, and that names the process which
holds it.

The lock is `filelock`'s, and so the kernel's (`flock`), which takes it back when the process is gone. Beyond that this
file names the holder in the lock file and leaves neither file nor empty folder behind. A filesystem without `flock` is
refused: the mere existence of a file, `filelock`'s way out there, outlives a process that is killed.
"""

import errno
import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from configs.paths import local_path

LOCK = ".lock"
_ATTEMPTS = 100
_HANDOVER_S = 0.1
"""So long a holder that ends just now is waited for."""
_POLL_S = 0.005
_SILENT_S = 1.0
"""A longer wait is told of."""
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP}


@contextmanager
def only_writer(
    directory: str | Path, *, setting: str, name: str = LOCK, wait_s: float = _HANDOVER_S
) -> Iterator[None]:
    """While the block runs no other process enters it with this directory; nothing of the lock is left afterwards.

    Args:
        directory: the folder, which is made if it is not there, and removed again if the block leaves it empty.
        setting: the key of the config that names the directory, for the message.
        name: the lock; processes that share the directory by a rule of their own take different ones.
        wait_s: seconds for which a holder is waited for; beyond the first, stderr says so.

    Raises:
        ValueError: another process writes there, or it is a URL or a file, or cannot be written to, or its filesystem
            knows no locks.
    """
    path = local_path(directory, setting) / name
    lock = _locked(path, setting, wait_s)
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    try:
        with suppress(OSError):  # a full disk is for those to name who have something to write
            path.write_text(json.dumps(holder))
        yield
    finally:
        # while it is held: whoever has the file open and gets its lock next sees that it has lost its name
        _remove(path)
        lock.release()


def state(path: Path, **facts: str) -> None:
    """Write facts into the file of a lock that this process holds, beside who holds it, for others to read."""
    path.write_text(json.dumps(_facts(path) | facts))


def holder_of(path: Path) -> dict[str, Any] | None:
    """What the holder of a lock says of itself; None where nobody holds it, and the file, left by a process that was
    killed, is gone then.
    """
    try:
        with FileLock(path, timeout=0, fallback_to_soft=False):
            _remove(path)
            return None
    except Timeout:
        return _facts(path)


def in_words(holder: Mapping[str, Any]) -> str:
    """The process that says this of itself."""
    names = ("pid", "host", "since")
    if not all(name in holder for name in names):  # it has not said yet, or has just ended
        return "another process"
    return "process {} on {} since {}".format(*(holder[name] for name in names))


def _locked(path: Path, setting: str, wait_s: float) -> FileLock:
    lock = FileLock(path, poll_interval=_POLL_S, fallback_to_soft=False)
    waits = iter([min(wait_s, _SILENT_S), wait_s - _SILENT_S])
    wait = next(waits)
    for attempt in range(_ATTEMPTS):
        try:
            lock.acquire(timeout=wait)
        except Timeout as error:
            if (wait := next(waits, 0)) > 0:
                print(f"{path.parent} is in use by {in_words(_facts(path))}; waiting for its turn", file=sys.stderr)
                continue
            who = in_words(_facts(path))
            raise ValueError(
                f"{path.parent} is in use by {who}; wait until it ends, stop it, or choose another {setting}"
            ) from error
        except OSError as error:
            if isinstance(error, FileNotFoundError | FileExistsError) and attempt + 1 < _ATTEMPTS:
                continue  # the folder was empty, and whoever held the lock has just removed it
            raise _refusal(path, error, setting) from error
        break
    return lock


def _refusal(path: Path, error: OSError, setting: str) -> ValueError:
    if error.errno not in _NO_LOCKS:
        return ValueError(
            f"{setting} is {path.parent}, where nothing can be written ({error.strerror}); choose another {setting}"
        )
    _remove(path)
    return ValueError(
        f"{setting} is {path.parent}, on a filesystem without file locks (flock: {error.strerror}), so that two runs "
        "there could destroy each other's files; mount it with locks (NFS: a running lockd, or local_lock=flock; "
        f"Lustre: flock), or choose a {setting} on another disk"
    )


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink(missing_ok=True)
        path.parent.rmdir()


def _facts(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):  # it has not said yet, or has just ended
        return {}

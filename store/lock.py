"""One writer per directory: a lock that names its holder and that the kernel releases when the process ends.

The lock is `filelock`'s, based on `flock`; its file is removed afterwards. Filesystems without `flock` are
refused: `filelock`'s fallback, the existence of a file, outlives a killed process.
"""

import errno
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from configs.paths import local_path

LOCK = ".lock"
_ATTEMPTS = 100
HANDOVER_S = 0.1  # wait for a holder that is just ending
_POLL_S = 0.005
_SILENT_S = 1.0  # a longer wait is reported on stderr
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP}


@contextmanager
def only_writer(directory: str | Path, *, setting: str, name: str = LOCK, wait_s: float = HANDOVER_S) -> Iterator[None]:
    """Run the block as the only process that holds this lock of a directory, which is created if needed, and
    removed again if the block leaves it empty. Messages call it `setting`, its config key; locks of different
    names do not exclude each other; `wait_s`: how long to wait for another holder. ValueError if another process
    holds the lock, or the directory is a URL or a file, cannot be written to, or is on a filesystem without
    locks.
    """
    path = local_path(directory, setting) / name
    lock = _locked(path, setting, wait_s)
    try:
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        with suppress(OSError):  # on a full disk, the writer of the actual data reports the error
            path.write_text(json.dumps(holder), encoding="utf-8")
        yield
    finally:
        # removed while locked, so that a process that has the file open notices that it was unlinked
        _remove(path)
        lock.release()


def holder_of(path: Path) -> str | None:
    """A phrase that names the process that holds a lock; None if nobody does, and a stale lock file is then removed."""
    try:
        with FileLock(path, timeout=0, fallback_to_soft=False):
            _remove(path)
            return None
    except Timeout:
        return _named(path)


def _locked(path: Path, setting: str, wait_s: float) -> FileLock:
    lock = FileLock(path, poll_interval=_POLL_S, fallback_to_soft=False)
    waits = iter([min(wait_s, _SILENT_S), wait_s - _SILENT_S])
    wait = next(waits)
    for attempt in range(_ATTEMPTS):
        try:
            lock.acquire(timeout=wait)
            break
        except Timeout as error:
            in_use = f"{path.parent} is in use by {_named(path)}"
            if (wait := next(waits, 0)) <= 0:
                raise ValueError(f"{in_use}; wait until it ends, stop it, or choose another {setting}") from error
            print(f"{in_use}; waiting for it to finish", file=sys.stderr)
        except OSError as error:  # the previous holder may have just removed the empty folder
            if not isinstance(error, FileNotFoundError | FileExistsError) or attempt + 1 == _ATTEMPTS:
                raise _refusal(path, error, setting) from error
    return lock


def _refusal(path: Path, error: OSError, setting: str) -> ValueError:
    if error.errno not in _NO_LOCKS:
        return ValueError(
            f"{setting} is {path.parent}, which cannot be written to ({error.strerror}); choose another {setting}"
        )
    _remove(path)
    return ValueError(
        f"{setting} is {path.parent}, on a filesystem without file locks (flock: {error.strerror}), where two runs "
        "could overwrite each other's files; mount it with locks (NFS: a running lockd, or local_lock=flock; "
        f"Lustre: flock), or choose a {setting} on another disk"
    )


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink(missing_ok=True)
        path.parent.rmdir()


def _named(path: Path) -> str:
    with suppress(OSError, ValueError, TypeError, KeyError):  # the holder has just started or just ended
        return "process {pid} on {host} since {since}".format(**json.loads(path.read_text(encoding="utf-8")))
    return "another process"

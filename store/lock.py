"""One writer per directory: a lock that ends with its process, however that ends, and that names the process which holds it."""

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

LOCK = ".lock"
_ATTEMPTS = 100


@contextmanager
def only_writer(directory: str | Path, *, setting: str) -> Iterator[None]:
    """While the block runs no other process enters it with this directory; nothing of the lock is left afterwards.

    Args:
        directory: made if it is not there; removed again if the block leaves it empty.
        setting: the key of the config that names the directory, for the message.

    Raises:
        ValueError: another process writes there, or it is a file, or cannot be written to.
    """
    path = Path(directory) / LOCK
    file = _locked(path, setting)
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    try:
        with suppress(OSError):  # a full disk is for those to name who have something to write
            file.truncate(0)
            os.write(file.fileno(), json.dumps(holder).encode())
        yield
    finally:
        path.unlink(missing_ok=True)
        file.close()
        with suppress(OSError):  # it holds something
            path.parent.rmdir()


def _locked(path: Path, setting: str) -> IO[str]:
    """The lock file, open and locked (`flock`, which the kernel takes back when the process is gone)."""
    for attempt in range(_ATTEMPTS):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("a+")
        except OSError as error:
            if isinstance(error, FileNotFoundError | FileExistsError) and attempt + 1 < _ATTEMPTS:
                continue  # the folder was empty, and whoever held the lock has just removed it
            raise ValueError(
                f"{setting} is {path.parent}, where nothing can be written ({error.strerror}); choose another {setting}"
            ) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise ValueError(
                f"{path.parent} is in use by {_holder(file.read())}; wait until it ends, stop it, or choose another {setting}"
            ) from error
        if _is_still(path, file):
            return file
        file.close()  # whoever held the lock has just removed it
    raise ValueError(f"{path.parent} is in use by other processes; choose another {setting}")


def _is_still(path: Path, file: IO[str]) -> bool:
    """Whether the path leads to this open file."""
    try:
        return path.samefile(f"/dev/fd/{file.fileno()}")
    except FileNotFoundError:
        return False


def _holder(text: str) -> str:
    try:
        holder = json.loads(text)
        return f"process {holder['pid']} on {holder['host']} since {holder['since']}"
    except (json.JSONDecodeError, KeyError, TypeError):  # it has not said yet
        return "another process"

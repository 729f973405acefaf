"""A process that is killed while it writes."""

import os
import signal
from pathlib import Path

from store import shards


def die_in_write(number: int) -> None:
    """From now on, this process gets a SIGKILL in the middle of its `number`-th file."""
    write_atomic, count = shards.write_atomic, [0]

    def write_or_die(path: Path, content: bytes) -> None:
        count[0] += 1
        if count[0] == number:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_name(f".{path.name}.{os.getpid()}.partial").write_bytes(content[:7])
            os.kill(os.getpid(), signal.SIGKILL)
        write_atomic(path, content)

    shards.write_atomic = write_or_die

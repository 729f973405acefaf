"""What a run leaves in its folder, and runs that end badly in a process of their own."""

import os
from pathlib import Path


def files_of(directory: str | Path) -> dict[str, bytes]:
    """Every shard, sidecar and errors.jsonl."""
    paths = [path for path in Path(directory).rglob("*") if path.is_file() and path.name != "manifest.json"]
    return {str(path.relative_to(directory)): path.read_bytes() for path in paths}


def in_a_child(work) -> int:
    """The wait status of a forked child that does `work` (forked, because importing torch anew takes seconds)."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        except SystemExit as end:
            status = int(end.code)  # type: ignore[arg-type]
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1]

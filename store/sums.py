"""Checks of shards before a command reads them, so that a corrupted shard is reported at the start, not hours later.

Every command that reads shards first compares each with the sha256 of its sidecar, in threads.
"""

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from store.progress import Bar
from store.shards import SHARD_FOLDERS, is_whole, sidecar_path, verify_shard

_NAME = re.compile(r"(train|dev|test)-\d{5,}\.(parquet|safetensors|responses)(\.json)?")
_MOST_THREADS = 8
_MIN_BAR_BYTES = 2**27
"""Total size from which a progress bar is shown; smaller checks take a tenth of a second."""
ShardCheck = Callable[[Path], None]
"""A function that raises ValueError for an invalid shard."""


def check_sums(paths: Iterable[Path], *, command: str = "data", check: ShardCheck | None = None) -> None:
    """Raise ValueError for the first shard that differs from its sidecar or fails `check`.

    Args:
        paths: the shards.
        command: the command of `acceptance-heads` that makes them, for messages.
        check: a further check of each shard.
    """
    for _, problem in problems_of(list(paths), command=command, check=check):
        raise ValueError(problem)


def problems_of(
    paths: Sequence[Path], *, command: str = "data", check: ShardCheck | None = None, is_thorough: bool = False
) -> Iterator[tuple[Path, str]]:
    """Each shard that fails a check, in order, with its error message; `is_thorough`: always show a progress bar."""
    checks: list[ShardCheck] = [partial(verify_shard, command=command), *([] if check is None else [check])]
    sizes = [path.stat().st_size if path.is_file() else 0 for path in paths]
    is_hidden = not is_thorough and sum(sizes) < _MIN_BAR_BYTES
    pool = ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1), thread_name_prefix="sums")
    try:
        with Bar(
            total=sum(sizes), unit="B", unit_scale=True, desc="checking sums", disable=is_hidden, leave=is_thorough
        ) as bar:
            problems = pool.map(partial(_problem, checks=checks, command=command), paths)
            for path, size, problem in zip(paths, sizes, problems, strict=True):
                bar.update(size)
                if problem:
                    yield path, problem
    finally:
        pool.shutdown(cancel_futures=True)


def forget_broken(paths: Iterable[Path]) -> None:
    """Delete the sidecars of corrupted shards, with a warning each, so that the shards are made again.

    The caller holds the directory's lock.
    """
    for path, _ in problems_of([path for path in paths if is_whole(path)]):
        print(f"warning: {path} is corrupted (its sha256 differs from its sidecar's); making it again", file=sys.stderr)
        sidecar_path(path).unlink()


def shards_in(directory: str | Path) -> list[Path]:
    """Every shard of data.dir of which the file or its sidecar exists, folder by folder."""
    names = (
        path
        for folder in SHARD_FOLDERS
        for path in sorted(Path(directory).glob(f"{folder}/*-*"))
        if _NAME.fullmatch(path.name)
    )
    return list(dict.fromkeys(path.with_suffix("") if path.suffix == ".json" else path for path in names))


def _problem(path: Path, checks: Sequence[ShardCheck], *, command: str) -> str | None:
    try:
        for check in checks:
            check(path)
    except ValueError as error:
        return str(error)
    except OSError as error:
        return (
            f"{path} cannot be read ({error.strerror}); repair the disk, or delete the file and run `acceptance-heads "
            f"{command}` again"
        )
    return None

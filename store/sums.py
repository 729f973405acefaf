"""Whether shards are what was written, byte for byte: one look at all of them before the first is read.

A size says nothing of a byte that has flipped. Every command that reads shards begins by comparing each with the sha256
of its sidecar, in threads and with a bar where it takes a moment, so that what is broken is named at the start and not
hours later.
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
_SHOWN_BYTES = 2**27
"""Size from which on the check has a bar: below, it takes a tenth of a second."""
Look = Callable[[Path], None]
"""A function of a shard's path that raises ValueError for what is wrong there, beside its sum."""


def check_sums(paths: Iterable[Path], *, command: str = "data", look: Look | None = None) -> None:
    """Compare shards with their sidecars before any is read.

    Args:
        paths: the paths of the shards.
        command: the command of `acceptance-heads` that makes them, for the message.
        look: what else is to be looked at in each.

    Raises:
        ValueError: names the first shard that is not what was written, or in which the look found something.
    """
    for _, problem in problems_of(list(paths), command=command, look=look):
        raise ValueError(problem)


def problems_of(
    paths: Sequence[Path], *, command: str = "data", look: Look | None = None, is_thorough: bool = False
) -> Iterator[tuple[Path, str]]:
    """Each shard that is not what was written, in order, with what is wrong; `is_thorough`: show the progress however
    little there is.
    """
    looks: list[Look] = [partial(verify_shard, command=command), *([] if look is None else [look])]
    sizes = [path.stat().st_size if path.is_file() else 0 for path in paths]
    is_hidden = not is_thorough and sum(sizes) < _SHOWN_BYTES
    pool = ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1), thread_name_prefix="sums")
    try:
        with Bar(
            total=sum(sizes), unit="B", unit_scale=True, desc="checking sums", disable=is_hidden, leave=is_thorough
        ) as bar:
            problems = pool.map(partial(_problem, looks=looks, command=command), paths)
            for path, size, problem in zip(paths, sizes, problems, strict=True):
                bar.update(size)
                if problem:
                    yield path, problem
    finally:
        pool.shutdown(cancel_futures=True)


def forget_broken(paths: Iterable[Path]) -> None:
    """Take the sidecars of shards that are not what was written, so that they count as missing and are made again.

    The caller holds the lock of the directory. Every such shard is named on stderr.
    """
    for path, _ in problems_of([path for path in paths if is_whole(path)]):
        print(
            f"{path} does not hold the bytes that were written (its sha256 is another): it is made again",
            file=sys.stderr,
        )
        sidecar_path(path).unlink()


def shards_in(directory: str | Path) -> list[Path]:
    """Every shard of data.dir, folder by folder, as far as there is the file or its sidecar."""
    names = (
        path
        for folder in SHARD_FOLDERS
        for path in sorted(Path(directory).glob(f"{folder}/*-*"))
        if _NAME.fullmatch(path.name)
    )
    return list(dict.fromkeys(path.with_suffix("") if path.suffix == ".json" else path for path in names))


def _problem(path: Path, looks: Sequence[Look], *, command: str) -> str | None:
    try:
        for look in looks:
            look(path)
    except ValueError as error:
        return str(error)
    except OSError as error:
        return (
            f"{path} cannot be read ({error.strerror}); mend the disk, or delete the file and run `acceptance-heads "
            f"{command}` again"
        )
    return None

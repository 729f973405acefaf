"""Whether shards are what was written, byte for byte: one look at all of them before the first is read.

A size says nothing of a byte that has flipped. Every command that reads shards begins by comparing each with the sha256
of its sidecar, in threads and with a bar where it takes a moment, so that what is broken is named at the start and not
hours later.

What was found sound is written down beside the shards, and not looked at again, by this process or another, as long as
it is the same file: same inode, size, time of writing, and time of change, which no program can set, so that a copy and
a file that was written over count as others. What a disk forgets by itself changes none of these; `data check` reads
everything, whatever is written down.

    FOLDER/checked.json   {"train-00000.safetensors": {"file": [inode, bytes, mtime, ctime], "looks": ["sha256", …],
                           "when": "2026-11-24 09:30:00"}, …}
"""

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from store.json_files import checked_object, read_json
from store.progress import Bar
from store.shards import SHARD_FOLDERS, is_whole, sidecar_path, verify_shard, write_atomic

CHECKED = "checked.json"
_NAME = re.compile(r"(train|dev|test)-\d{5,}\.(parquet|safetensors|responses)(\.json)?")
_MOST_THREADS = 8
_SHOWN_BYTES = 2**27
"""Size from which on the check has a bar, and what it found is written down: below, it takes a tenth of a second."""
_REMEDY = "delete it, and every shard beside it is checked again"


class Look(NamedTuple):
    """A look at shards, beside the one at their bytes."""

    name: str
    """What it looks at: its findings are written down under this name."""
    at: Callable[[Path], None]
    """A function of a shard's path that raises ValueError for what is wrong there."""


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
    """Each shard that is not what was written, in order, with what is wrong; `is_thorough`: also look at those that are
    written down as sound, and show the progress however little there is.
    """
    looks = [Look("sha256", partial(verify_shard, command=command)), *([] if look is None else [look])]
    sizes = [path.stat().st_size if path.is_file() else 0 for path in paths]
    is_small = sum(sizes) < _SHOWN_BYTES
    identities = [_identity(path) for path in paths]
    folders = set() if is_small or is_thorough else {path.parent for path in paths}
    known = {folder: _found(folder) for folder in folders}
    to_do = [
        [look for look in looks if known.get(path.parent, {}).get(path.name, {}).get(look.name) != identity]
        for path, identity in zip(paths, identities, strict=True)
    ]
    sizes = [size if left else 0 for size, left in zip(sizes, to_do, strict=True)]
    is_hidden = not is_thorough and sum(sizes) < _SHOWN_BYTES
    found: dict[Path, dict[str, str]] = {}
    pool = ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1), thread_name_prefix="sums")
    try:
        with Bar(
            total=sum(sizes), unit="B", unit_scale=True, desc="checking sums", disable=is_hidden, leave=is_thorough
        ) as bar:
            problems = pool.map(partial(_problem, command=command), paths, to_do)
            for path, size, identity, left, problem in zip(paths, sizes, identities, to_do, problems, strict=True):
                bar.update(size)
                if left:
                    found[path] = {} if problem else {look.name: identity for look in left}
                if problem:
                    yield path, problem
    finally:
        pool.shutdown(cancel_futures=True)
        if not is_small:
            _write_down(found)


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
            look.at(path)
    except ValueError as error:
        return str(error)
    except OSError as error:
        return (
            f"{path} cannot be read ({error.strerror}); mend the disk, or delete the file and run `acceptance-heads "
            f"{command}` again"
        )
    return None


def _identity(path: Path) -> str:
    """A text that is another as soon as the file, or its sidecar, is another or was written to."""
    files = [file.stat() for file in (path, sidecar_path(path)) if file.is_file()]
    return " ".join(f"{file.st_ino}-{file.st_size}-{file.st_mtime_ns}-{file.st_ctime_ns}" for file in files)


def _found(folder: Path) -> dict[str, dict[str, str]]:
    """What is written down about the shards of a folder: name -> look -> the `_identity` of what was found sound."""
    path = folder / CHECKED
    if not path.is_file():
        return {}
    found = read_json(path, remedy=_REMEDY)
    return {name: checked_object(looks, place=str(path), remedy=_REMEDY) for name, looks in found.items()}


def _write_down(found: Mapping[Path, Mapping[str, str]]) -> None:
    """Add what was found sound to its folder's file; a shard with nothing sound is taken out."""
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    for folder in {path.parent for path in found}:
        of_folder = {path.name: dict(looks) for path, looks in found.items() if path.parent == folder}
        kept = _found(folder)  # read just now: another process may have written it meanwhile
        kept |= {name: kept.get(name, {}) | looks | {"when": now} for name, looks in of_folder.items()}
        sound = {name: looks for name, looks in sorted(kept.items()) if of_folder.get(name) != {}}
        try:
            write_atomic(folder / CHECKED, json.dumps(sound, indent=1).encode())
        except (OSError, ValueError) as error:  # a folder that others own, or a full disk
            print(f"{folder} is checked again next time, as nothing can be written there ({error})", file=sys.stderr)

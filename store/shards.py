"""Shards on disk, each with a sidecar that has its size and sha256.

    DIR/rows/{split}-{index:05d}.parquet
    DIR/labels/{split}-{index:05d}.safetensors
    DIR/states/{timing}/{split}-{index:05d}.safetensors
    <shard>.json                                              sidecar: at least rows, tokens, bytes, sha256

Files are written to a temporary name, fsynced and renamed; the sidecar comes last, so a shard that has one is
complete. A command first compares its shards with their sidecars (`check_sums`), to report corruption at the
start. Large shards are read only if they changed since an earlier process read them (`store.facts`).
"""

import errno
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import IO, Any

from configs.paths import check_local
from store.facts import FileFacts
from store.json_files import read_json
from store.lock import only_writer
from store.progress import Bar

DATA_FOLDERS = ("rows", "labels", "stages/*")
STATE_FOLDERS = ("states/*",)
"""The cache of hidden states, which `train` fills."""
SIDECAR_REMEDY = "delete it and run the same command again, which makes the shard again"
_COUNTS = {"bytes", "rows", "tokens", "input", "ok"}  # integer facts of a sidecar
_DIRECTORY_WAIT_S = 600.0
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NAME = re.compile(r"(train|dev|test)-\d{5,}\.(parquet|safetensors)(\.json)?")
_MAX_THREADS = 8
_MIN_BAR_BYTES = 2**27  # total size from which a progress bar is shown; smaller checks take a tenth of a second


def shard_path(directory: str | Path, folder: str, split: str, index: int) -> Path:
    """Path of a shard in a folder of data.dir: rows, labels, or states/TIMING."""
    suffix = "parquet" if folder == "rows" else "safetensors"
    return Path(directory, folder, f"{split}-{index:05d}.{suffix}")


def sidecar_path(path: Path) -> Path:
    """A shard without one is incomplete."""
    return path.with_name(path.name + ".json")


def write_shard(path: Path, content: bytes | memoryview, **facts: Any) -> None:
    """Write `content` and then its sidecar {**facts, bytes, sha256}, each as `write_atomic` does."""
    sidecar_path(path).unlink(missing_ok=True)
    write_atomic(path, content)
    facts = {"shard": path.stem, **facts, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    write_atomic(sidecar_path(path), json.dumps(facts, indent=1).encode())


def write_atomic(path: Path, content: bytes | memoryview) -> None:
    """Write a file completely or not at all, even if the machine loses power; ValueError if the disk is full."""
    with atomic_file(path) as file:
        file.write(content)


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """A file that replaces `path` unless the block raises; ValueError if the disk is full or the path is a URL."""
    check_local(path, "the file to write")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        if error.errno in _FULL:
            free = shutil.disk_usage(path.parent).free
            raise ValueError(
                f"no space for {path}: {free:,} bytes are free on the disk, or a file-size limit is set; free some "
                "space and run the same command again, which continues with the files that are complete"
            ) from error
        raise
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # so that the new name survives a power failure
    finally:
        os.close(folder)


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """A folder that replaces `path` when the block ends; if the block raises, `path` is unchanged. Other writers wait.

    The old directory is renamed before the new one takes its name; if the process is killed in between, the next
    writer restores it. ValueError if the parent folder cannot be written to, or another process writes for ten
    minutes.
    """
    partial, previous = (path.with_name(f".{path.name}.{suffix}") for suffix in ("partial", "previous"))
    with only_writer(path.parent, setting="directory", name=f".{path.name}.lock", wait_s=_DIRECTORY_WAIT_S):
        if previous.exists() and not path.exists():
            previous.rename(path)
        for stale in (partial, previous):
            shutil.rmtree(stale, ignore_errors=True)
        partial.mkdir()
        try:
            yield partial
            for inside in partial.rglob("*"):
                inside.chmod(0o755 if inside.is_dir() else 0o644)
            if path.exists():
                path.rename(previous)
            partial.rename(path)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(previous, ignore_errors=True)


def read_sidecar(path: Path, keys: Sequence[str] = ()) -> dict[str, Any]:
    """The facts in a shard's sidecar; ValueError if bytes, sha256 or one of `keys` is missing."""
    facts = read_json(sidecar_path(path), remedy=SIDECAR_REMEDY, keys=("bytes", "sha256", *keys))
    for name in _COUNTS & facts.keys():
        if type(facts[name]) is not int or facts[name] < 0:
            raise ValueError(
                f"{sidecar_path(path)}: {name} is {facts[name]!r:.80}, expected an integer of at least 0; "
                f"{SIDECAR_REMEDY}"
            )
    return facts


def is_whole(path: Path) -> bool:
    """Whether a shard has a sidecar and the size in it; `check_sums` compares the sha256."""
    return path.is_file() and sidecar_path(path).is_file() and path.stat().st_size == read_sidecar(path)["bytes"]


def verify_shard(path: Path, *, command: str = "data", known: FileFacts | None = None) -> None:
    """Raise ValueError unless a shard matches its sidecar; `command` of `acceptance-heads` makes it, for
    messages. The sum of a file that has not changed since it was read is taken from `known`.
    """
    again = f"run `acceptance-heads {command}` again"
    if not path.is_file():
        raise ValueError(f"{path} is missing; {again}")
    if not sidecar_path(path).is_file():
        raise ValueError(f"{path} has no sidecar {sidecar_path(path).name}, so it is incomplete; {again}")
    facts = read_sidecar(path)
    if (size := path.stat().st_size) != facts["bytes"]:
        raise ValueError(f"{path} is truncated: it has {size:,} bytes instead of {facts['bytes']:,}; {again}")
    sha256 = known.fact(path, "sha256", sha256_of) if known else _read_sha256(path)
    if sha256 != facts["sha256"]:
        raise ValueError(f"{path} is corrupted: its sha256 differs from its sidecar's; delete it and that, and {again}")
    if facts.get("shard", path.stem) != path.stem:
        raise ValueError(f"{path} was written as {facts['shard']} and renamed; delete both and {again}")


def sha256_of(path: Path) -> str:
    """sha256 of a file, cached until its inode, size or modification time changes."""
    stat = path.stat()
    return _sha256(path, stat.st_ino, stat.st_size, stat.st_mtime_ns)


@cache
def _sha256(path: Path, *_stat: int) -> str:
    return _read_sha256(path)


def _read_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def list_shards(directory: str | Path, split: str, folder: str = "rows") -> list[Path]:
    """A split's shards in a folder, sorted; FileNotFoundError for none, ValueError if one is missing or incomplete."""
    first = shard_path(directory, folder, split, 0)
    paths = sorted(first.parent.glob(f"{split}-*{first.suffix}"))
    if not paths:
        raise FileNotFoundError(f"no {split} shards in {first.parent}; run `acceptance-heads data` with this config")
    for index, path in enumerate(paths):
        if path != (expected := shard_path(directory, folder, split, index)) or not is_whole(path):
            raise ValueError(f"{expected} is missing or incomplete; run `acceptance-heads data` to finish the data")
    return paths


def clean_partial(directory: str | Path, *folders: str, names: Container[str] | None = None) -> None:
    """Remove the temporary files of killed writers in a directory, whose lock the caller holds, and in
    subfolders of these patterns. `names`: stems of the files whose temporary files may be removed; None: all.
    """
    for path in (path for folder in (".", *folders) for path in Path(directory).glob(f"{folder}/.*.partial")):
        name, _, pid = path.name.removeprefix(".").removesuffix(".partial").rpartition(".")
        if pid.isdigit() and (names is None or name.split(".")[0] in names):
            path.unlink(missing_ok=True)


def check_sums(paths: Sequence[Path], **settings: Any) -> None:
    """Raise ValueError for the first of these shards that is broken, with the settings of `broken_shards`."""
    for _, problem in broken_shards(paths, **settings):
        raise ValueError(problem)


def broken_shards(
    paths: Sequence[Path],
    *,
    command: str = "data",
    check: Callable[[Path], None] | None = None,
    fact: str | None = None,
    reads_all: bool = False,
) -> Iterator[tuple[Path, str]]:
    """Each shard that `verify_shard` or `check` refuses by a ValueError, in order, with the message.

    Large shards that passed in an earlier process and did not change since are not read, unless `reads_all`;
    that they passed `check` is remembered under the name `fact`, if it has one.
    """
    known = None if reads_all else FileFacts()
    problem_of = partial(_problem_of, command=command, check=check, known=known, fact=fact)
    sizes = [path.stat().st_size if path.is_file() else 0 for path in paths]
    is_quick = sum(sizes) < _MIN_BAR_BYTES
    pool = ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1), thread_name_prefix="sums")
    try:
        with Bar(
            total=sum(sizes), desc="checking sums", unit="B", unit_scale=True, disable=is_quick, leave=False
        ) as bar:
            for path, size, problem in zip(paths, sizes, pool.map(problem_of, paths), strict=True):
                bar.update(size)
                if problem:
                    yield path, problem
    finally:
        pool.shutdown(cancel_futures=True)
        if known is not None:
            known.save()


def _problem_of(
    path: Path, *, command: str, check: Callable[[Path], None] | None, known: FileFacts | None, fact: str | None
) -> str | None:
    """The message about a shard that `broken_shards` yields; None for one that passes."""

    def passed(path: Path) -> str:
        if check is not None:
            check(path)
        return "passed"

    try:
        verify_shard(path, command=command, known=known)
        if known is not None and fact is not None:
            known.fact(path, fact, passed)
        else:
            passed(path)
    except ValueError as error:
        return str(error)
    except OSError as error:
        return (
            f"{path} cannot be read ({error.strerror}); repair the disk, or delete the file and run `acceptance-heads "
            f"{command}` again"
        )
    return None


def forget_broken(paths: Iterable[Path]) -> None:
    """Delete the sidecars of corrupted shards, so that they are made again; the caller holds the directory's lock."""
    for path, _ in broken_shards([path for path in paths if is_whole(path)]):
        print(f"warning: {path} is corrupted (its sha256 differs from its sidecar's); making it again", file=sys.stderr)
        sidecar_path(path).unlink()


def shards_in(directory: str | Path, folders: Iterable[str]) -> list[Path]:
    """Every shard in folders of data.dir of which the file or its sidecar exists, folder by folder."""
    paths = [path for folder in folders for path in sorted(Path(directory).glob(f"{folder}/*-*"))]
    names = [path for path in paths if _NAME.fullmatch(path.name)]
    return list(dict.fromkeys(path.with_suffix("") if path.suffix == ".json" else path for path in names))

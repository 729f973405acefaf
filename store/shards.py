"""Shards on disk, each with a sidecar that has its size and sha256.

    DIR/rows/{split}-{index:05d}.parquet
    DIR/features/{timing}/{split}-{index:05d}.safetensors
    <shard>.json                                              sidecar: at least rows, tokens, bytes, sha256

Both are written to a temporary name, fsynced and renamed; the sidecar comes last, so a shard that has one is complete.
A process that is killed leaves a complete shard or one that the next run makes again.
"""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import IO, Any

from configs.paths import check_local
from store.json_files import read_json
from store.lock import only_writer

SHARD_FOLDERS = ("rows", "features/*", "stages/*")
SIDECAR_REMEDY = "delete it and run the same command again, which makes the shard again"
_COUNTS = {"bytes", "rows", "tokens", "input", "ok"}
"""Integer facts of a sidecar."""
_DIRECTORY_WAIT_S = 600.0
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def rows_path(directory: str | Path, split: str, index: int) -> Path:
    """Path of a shard's rows."""
    return Path(directory) / "rows" / f"{split}-{index:05d}.parquet"


def features_path(directory: str | Path, timing: str, split: str, index: int) -> Path:
    """Path of a shard's features of one timing (fed, drawn)."""
    return Path(directory) / "features" / timing / f"{split}-{index:05d}.safetensors"


def sidecar_path(path: Path) -> Path:
    """Path of a shard's sidecar; a shard without one is incomplete."""
    return path.with_name(path.name + ".json")


def write_shard(path: Path, content: bytes | memoryview, **facts: Any) -> None:
    """Write `content` and then its sidecar {**facts, bytes, sha256}, each atomically; removes an old sidecar first.

    Raises:
        ValueError: the disk is full; no incomplete file remains.
    """
    sidecar_path(path).unlink(missing_ok=True)
    write_atomic(path, content)
    _write_sidecar(path, facts, num_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())


def complete_shard(unfinished: Path, path: Path, contents: Mapping[int, bytes], **facts: Any) -> None:
    """Fill the missing bytes of a shard in place and rename it to `path`, without copying the rest.

    Both sidecars are removed first, so if the process is killed the unfinished shard must be made again.

    Args:
        unfinished: path of the incomplete shard.
        path: path of the complete shard, in the same file system.
        contents: offset in the file -> missing bytes.
        **facts: facts for the sidecar.
    """
    for shard in (path, unfinished):
        sidecar_path(shard).unlink(missing_ok=True)
    with unfinished.open("r+b") as file:
        for offset, content in contents.items():
            file.seek(offset)
            file.write(content)
        file.flush()
        os.fsync(file.fileno())
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished.replace(path)
    _sync_folder(path.parent)
    _write_sidecar(path, facts, num_bytes=path.stat().st_size, sha256=sha256_of(path))


def _write_sidecar(path: Path, facts: Mapping[str, Any], *, num_bytes: int, sha256: str) -> None:
    content = {"shard": path.stem, **facts, "bytes": num_bytes, "sha256": sha256}
    write_atomic(sidecar_path(path), json.dumps(content, indent=1).encode())


def write_atomic(path: Path, content: bytes | memoryview) -> None:
    """Write a file completely or not at all, even if the machine loses power; ValueError if the disk is full."""
    with atomic_file(path) as file:
        file.write(content)


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """A file that replaces `path` when the block ends; if the block raises, `path` is unchanged.

    Raises:
        ValueError: the disk is full, or the path is a URL.
    """
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
    _sync_folder(path.parent)


def _sync_folder(path: Path) -> None:
    """Flush a folder, so that a new name in it survives a power failure."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """A folder that replaces `path` when the block ends; if the block raises, `path` is unchanged. Other writers wait.

    The old directory is renamed before the new one takes its name. If the process is killed between the two renames,
    the next writer restores the old directory.

    Raises:
        ValueError: the parent folder cannot be written to, or another process has been writing for ten minutes.
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
    """Whether a shard has a sidecar and the size in it; `store.sums` compares the sha256."""
    return path.is_file() and sidecar_path(path).is_file() and path.stat().st_size == read_sidecar(path)["bytes"]


def verify_shard(path: Path, *, command: str = "data") -> None:
    """Raise ValueError unless a shard matches its sidecar. Readers call `store.sums.check_sums`, which caches results.

    Args:
        path: the shard.
        command: the command of `acceptance-heads` that makes it, for messages.
    """
    again = f"run `acceptance-heads {command}` again"
    if not path.is_file():
        raise ValueError(f"{path} is missing; {again}")
    if not sidecar_path(path).is_file():
        raise ValueError(f"{path} has no sidecar {sidecar_path(path).name}, so it is incomplete; {again}")
    facts = read_sidecar(path)
    if path.stat().st_size != facts["bytes"]:
        raise ValueError(
            f"{path} is truncated: it has {path.stat().st_size:,} bytes instead of {facts['bytes']:,}; {again}"
        )
    if sha256_of(path) != facts["sha256"]:
        raise ValueError(
            f"{path} is corrupted: its sha256 differs from its sidecar's; delete it and the sidecar, and {again}"
        )
    if facts.get("shard", path.stem) != path.stem:
        raise ValueError(f"{path} was written as {facts['shard']} and renamed; delete both and {again}")


def sha256_of(path: Path) -> str:
    """sha256 of a file, cached until its inode, size or modification time changes."""
    facts = path.stat()
    return _sha256(path, facts.st_ino, facts.st_size, facts.st_mtime_ns)


@cache
def _sha256(path: Path, *_facts: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def list_shards(directory: str | Path, split: str, timing: str | None = None) -> list[Path]:
    """The shards of one split in order: rows, or features of `timing`.

    Raises:
        FileNotFoundError: there are none.
        ValueError: one is missing or incomplete.
    """
    folder = Path(directory) / "rows" if timing is None else Path(directory) / "features" / timing
    suffix = "parquet" if timing is None else "safetensors"
    paths = sorted(folder.glob(f"{split}-*.{suffix}"))
    if not paths:
        raise FileNotFoundError(f"no {split} shards in {folder}; run `acceptance-heads data` with this config first")
    for index, path in enumerate(paths):
        if path.stem != f"{split}-{index:05d}" or not is_whole(path):
            missing = folder / f"{split}-{index:05d}.{suffix}"
            raise ValueError(f"{missing} is missing or incomplete; run `acceptance-heads data` to finish the data")
    return paths


def clean_partial(directory: str | Path, *folders: str, names: Container[str] | None = None) -> None:
    """Remove the temporary files of killed writers; the caller holds the directory's lock (`store.lock`).

    Args:
        directory: the folder.
        folders: patterns of its subfolders that have shards.
        names: stems of the files whose temporary files may be removed; None: all.
    """
    for path in (path for folder in (".", *folders) for path in Path(directory).glob(f"{folder}/.*.partial")):
        name, _, pid = path.name.removeprefix(".").removesuffix(".partial").rpartition(".")
        if pid.isdigit() and (names is None or name.split(".")[0] in names):
            path.unlink(missing_ok=True)

"""Shards on disk: written under a temporary name, fsynced and renamed; then the same for a sidecar that states size and
sha256.

`DIR/rows/{split}-{index:05d}.parquet`, `DIR/features/{timing}/{split}-{index:05d}.safetensors`; beside each, `<same
name>.json` with at least rows, tokens, bytes, sha256. The sidecar comes last, so a shard that has one is whole. A
process that dies at any moment leaves either a whole shard or one that the next run makes again.
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
SIDECAR_REMEDY = "delete it and run the same command again: it makes the shard anew"
_COUNTS = {"bytes", "rows", "tokens", "input", "ok"}
"""Facts that are whole numbers."""
_DIRECTORY_WAIT_S = 600.0
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def rows_path(directory: str | Path, split: str, index: int) -> Path:
    """Path of a shard's rows."""
    return Path(directory) / "rows" / f"{split}-{index:05d}.parquet"


def features_path(directory: str | Path, timing: str, split: str, index: int) -> Path:
    """Path of a shard's features of one timing (fed, drawn)."""
    return Path(directory) / "features" / timing / f"{split}-{index:05d}.safetensors"


def sidecar_path(path: Path) -> Path:
    """The file with the size and sha256 of `path`; a shard without it is not whole."""
    return path.with_name(path.name + ".json")


def write_shard(path: Path, content: bytes | memoryview, **facts: Any) -> None:
    """Write `content` and then its sidecar {**facts, bytes, sha256}, each atomically; an older content's sidecar goes
    first.

    Raises:
        ValueError: the disk is full; no incomplete file is left.
    """
    sidecar_path(path).unlink(missing_ok=True)
    write_atomic(path, content)
    _write_sidecar(path, facts, num_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())


def complete_shard(unfinished: Path, path: Path, contents: Mapping[int, bytes], **facts: Any) -> None:
    """Make a shard that lacks some bytes the whole shard `path`, in its own place on the disk.

    Both sidecars go first. A process that is killed before the new one is written has to make the unfinished shard
    again; the rest of it is not copied, which is the purpose.

    Args:
        unfinished: the path of the shard as it was written before.
        path: its path when it is whole, in the same file system.
        contents: place in the file -> the bytes that belong there.
        **facts: those of `path`'s sidecar.
    """
    for shard in (path, unfinished):
        sidecar_path(shard).unlink(missing_ok=True)
    with unfinished.open("r+b") as file:
        for place, content in contents.items():
            file.seek(place)
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
    """Write the whole file or nothing, even if the machine loses power.

    Raises:
        ValueError: the disk is full.
    """
    with atomic_file(path) as file:
        file.write(content)


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """A file to write to, which takes the place of `path` once the block has ended, whole; if it raises, `path` stays
    as it was.

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
                f"no space for {path}: {free:,} bytes are free on the disk (or a file-size limit is set); free some "
                "space and run the same command again: it keeps what is whole"
            ) from error
        raise
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)


def _sync_folder(path: Path) -> None:
    """A new name is in its folder, and is on disk only once that is."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """A new folder to write to, which takes the place of `path` once the block has ended; if it raises, `path` stays as
    it was. Other processes that write the same directory wait.

    A directory of files cannot be replaced in one step: the old one is renamed first. If the process is killed between
    the two renames, the next writer puts the old directory back.

    Raises:
        ValueError: nothing can be written beside `path`, or another process has been writing it for ten minutes.
    """
    partial, previous = (path.with_name(f".{path.name}.{suffix}") for suffix in ("partial", "previous"))
    with only_writer(path.parent, setting="directory", name=f".{path.name}.lock", wait_s=_DIRECTORY_WAIT_S):
        if previous.exists() and not path.exists():
            previous.rename(path)
        for left_over in (partial, previous):
            shutil.rmtree(left_over, ignore_errors=True)
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
    """The facts about a shard; `keys`: those that the caller reads, beside size and sha256."""
    facts = read_json(sidecar_path(path), remedy=SIDECAR_REMEDY, keys=("bytes", "sha256", *keys))
    for name in _COUNTS & facts.keys():
        if type(facts[name]) is not int or facts[name] < 0:
            raise ValueError(
                f"{sidecar_path(path)}: {name} is {facts[name]!r:.80}, and a whole number is expected; {SIDECAR_REMEDY}"
            )
    return facts


def is_whole(path: Path) -> bool:
    """Whether a shard has a sidecar, and the size that it states; its sha256 is compared by `store.sums`, before it is
    read.
    """
    return path.is_file() and sidecar_path(path).is_file() and path.stat().st_size == read_sidecar(path)["bytes"]


def verify_shard(path: Path, *, command: str = "data") -> None:
    """Raise ValueError unless the shard's content is what was written; readers call `store.sums.check_sums` first.

    Args:
        path: the path of the shard.
        command: the command of `acceptance-heads` that makes it, for the message.
    """
    again = f"run `acceptance-heads {command}` again"
    if not path.is_file():
        raise ValueError(f"{path} is missing; {again}")
    if not sidecar_path(path).is_file():
        raise ValueError(f"{path} has no sidecar {sidecar_path(path).name}: its writing was interrupted; {again}")
    facts = read_sidecar(path)
    if path.stat().st_size != facts["bytes"]:
        raise ValueError(f"{path} has {path.stat().st_size:,} bytes instead of {facts['bytes']:,}: truncated; {again}")
    if sha256_of(path) != facts["sha256"]:
        raise ValueError(
            f"{path} does not have the sha256 of its sidecar: corrupted; delete it and its sidecar and {again}, which "
            "makes it again"
        )
    if facts.get("shard", path.stem) != path.stem:
        raise ValueError(f"{path} was written as {facts['shard']} and has another's name: delete both and {again}")


def sha256_of(path: Path) -> str:
    """sha256 of a file, read once in this process as long as it stays the same file of the same size and time of
    change.
    """
    facts = path.stat()
    return _sha256(path, facts.st_ino, facts.st_size, facts.st_mtime_ns)


@cache
def _sha256(path: Path, *_facts: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def list_shards(directory: str | Path, split: str, timing: str | None = None) -> list[Path]:
    """Every shard of one split in order, all of them whole: rows, or with `timing` features.

    Raises:
        FileNotFoundError: there is none.
        ValueError: one is missing in the middle, or not whole.
    """
    folder = Path(directory) / "rows" if timing is None else Path(directory) / "features" / timing
    suffix = "parquet" if timing is None else "safetensors"
    paths = sorted(folder.glob(f"{split}-*.{suffix}"))
    if not paths:
        raise FileNotFoundError(f"no {split} shards in {folder}; run `acceptance-heads data` with this config first")
    for index, path in enumerate(paths):
        if path.stem != f"{split}-{index:05d}" or not is_whole(path):
            absent = folder / f"{split}-{index:05d}.{suffix}"
            raise ValueError(
                f"{absent} is missing or not whole, so the data is not finished; run `acceptance-heads data` to go on"
            )
    return paths


def clean_partial(directory: str | Path, *folders: str, names: Container[str] | None = None) -> None:
    """Remove the temporary files of writers that were killed; the caller holds the lock of the directory
    (`store.lock`).

    Args:
        directory: the folder, to which this process alone writes.
        folders: patterns of the folders in it that hold shards; others may belong to another process, or to the user.
        names: names without endings of the files whose partial ones are this process's to remove; None: all.
    """
    for path in (path for folder in (".", *folders) for path in Path(directory).glob(f"{folder}/.*.partial")):
        name, _, pid = path.name.removeprefix(".").removesuffix(".partial").rpartition(".")
        if pid.isdigit() and (names is None or name.split(".")[0] in names):
            path.unlink(missing_ok=True)

"""Sums of large files are computed once per file and change, and damage is found however it came about."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from store import facts
from store.facts import FileFacts
from store.shards import broken_shards, check_sums, write_shard


@pytest.fixture
def cache(tmp_path: Path, monkeypatch) -> Path:
    """The file of facts, of files of any size that may have changed a moment ago."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(facts, "_LARGE_BYTES", 1)
    monkeypatch.setattr(facts, "_SETTLED_NS", 0)
    return tmp_path / "cache" / "acceptance-heads" / "files.json"


def rewrite(path: Path) -> None:
    """Change a byte in the middle, and restore the time of the change, as a copy that keeps times does."""
    before = path.stat()
    path.write_bytes(path.read_bytes().replace(b"5", b"6"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes().replace(b"5", b"6"))
    other.replace(path)


@pytest.mark.parametrize(
    ("change", "is_read"),
    [
        (lambda path: None, False),
        (lambda path: path.write_bytes(b"longer than it was"), True),
        (rewrite, True),
        (replace, True),
    ],
)
def test_a_file_is_read_again_by_another_process_only_if_it_changed(
    change: Callable[[Path], None], is_read: bool, tmp_path: Path, cache: Path
):
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    reads = []

    def read(path: Path) -> str:
        reads.append(path)
        return path.read_text()

    for _ in range(2):
        known = FileFacts()
        assert known.fact(path, "text", read) == path.read_text()
        known.save()
    assert len(reads) == 1
    change(path)
    assert FileFacts().fact(path, "text", read) == path.read_text()
    assert len(reads) == 1 + is_read
    assert FileFacts().fact(path, "another fact", lambda path: "another") == "another"


@pytest.mark.parametrize(("name", "value"), [("_LARGE_BYTES", 2**22), ("_SETTLED_NS", 2 * 10**9)])
def test_small_files_and_those_that_changed_a_moment_ago_are_not_remembered(name, value, tmp_path, cache, monkeypatch):
    monkeypatch.setattr(facts, name, value)
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    for text in ("first", "second"):
        known = FileFacts()
        assert known.fact(path, "text", lambda path, text=text: text) == text
        known.save()


@pytest.mark.parametrize("content", ["{", "[1]", '{"1 2": 3}', "\0"])
def test_a_broken_file_of_facts_is_ignored_and_replaced(content: str, tmp_path: Path, cache: Path):
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    cache.parent.mkdir(parents=True)
    cache.write_text(content)
    known = FileFacts()
    assert known.fact(path, "text", Path.read_text) == "0123456789"
    known.save()
    assert FileFacts().has(path, "text")


def test_facts_of_two_processes_are_both_kept(tmp_path: Path, cache: Path):
    first, second = FileFacts(), FileFacts()
    for known, name in ((first, "a"), (second, "b")):
        (tmp_path / name).write_bytes(b"0123456789")
        known.fact(tmp_path / name, "text", Path.read_text)
    first.save()
    second.save()
    assert all(FileFacts().has(tmp_path / name, "text") for name in "ab")


def test_a_shard_whose_disk_changes_it_in_silence_is_found_by_reading_all(tmp_path: Path, cache: Path):
    path = tmp_path / "train-00000.safetensors"
    write_shard(path, b"0123456789")
    check_sums([path])
    rewrite(path)
    stored = json.loads(cache.read_text())
    [of_file] = stored.values()
    stat = path.stat()
    of_file["state"] = f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}"  # as if the file had not been written
    cache.write_text(json.dumps(stored))
    assert list(broken_shards([path])) == []
    [(_, problem)] = broken_shards([path], reads_all=True)
    assert "is corrupted: its sha256 differs" in problem


def test_a_check_of_numbers_runs_once_under_its_name_and_not_before_it_passes(tmp_path: Path, cache: Path):
    path = tmp_path / "train-00000.safetensors"
    write_shard(path, b"0123456789")
    checked = []

    def refuse(path: Path) -> None:
        checked.append("refused")
        raise ValueError("hidden of token 3 is NaN or infinite")

    def accept(path: Path) -> None:
        checked.append("accepted")

    for check in (refuse, refuse):
        with pytest.raises(ValueError, match="token 3"):
            check_sums([path], check=check, fact="finite")
    for fact in ("finite", "finite", "finite and narrow", None, None):
        check_sums([path], check=accept, fact=fact)
    assert checked == ["refused"] * 2 + ["accepted"] * 4

"""Directories are replaced at once; a broken JSON file is named, with its line and the remedy, by every reader; in a
keyed store the last value of a key counts, and an incomplete line is ignored.
"""

import json
import os
from pathlib import Path

import pytest

from data_gen.store.manifest import read_manifest
from store.json_files import KeyedStore, read_json
from store.shards import atomic_directory, is_whole, sidecar_path, verify_shard, write_atomic, write_shard
from tests.data_gen.processes import at_once

WHOLE = json.dumps({"rows": 1, "problems": [1, 2, 3]}, indent=1)


def write(path: Path, content: str, times: int = 1) -> None:
    for _ in range(times):
        with atomic_directory(path) as folder:
            (folder / "file").write_text(content)


@pytest.mark.parametrize("num_renames", range(3))
def test_a_writer_that_dies_between_two_renames_leaves_a_version_that_the_next_one_finds(tmp_path, num_renames):
    path = tmp_path / "head"
    write(path, "old")

    def die() -> None:
        rename, renamed = Path.rename, []
        Path.rename = lambda *paths: (  # type: ignore[method-assign]
            os._exit(1) if len(renamed) == num_renames else (renamed.append(paths), rename(*paths))
        )
        write(path, "new")

    assert at_once(die) == [int(num_renames < 2)]
    with pytest.raises(KeyError), atomic_directory(path):  # a writer that fails changes nothing
        raise KeyError
    assert (path / "file").read_text() == ("old" if num_renames < 2 else "new")
    assert [entry.name for entry in tmp_path.iterdir()] == ["head"]


def test_two_processes_that_write_a_directory_take_turns(tmp_path):
    assert at_once(*(lambda writer=writer: write(tmp_path / "head", writer, times=20) for writer in "ab")) == [0, 0]
    assert (tmp_path / "head" / "file").read_text() in "ab"


def test_what_is_no_whole_object_of_its_keys_is_refused_with_its_file_and_line_and_the_remedy(tmp_path):
    path = tmp_path / "facts.json"
    wrong = [(b"[1]", "got list"), (b"\xff\xfe\x00", "can't decode"), (b"{}", "missing key 'rows'")]
    wrong += [(b'{\n"rows": 1,\n"problems": oops}', r"invalid JSON \(Expecting value: line 3 column 13")]
    for content, why in wrong + [(WHOLE[:cut].encode(), "") for cut in range(len(WHOLE))]:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"facts\.json.*{why}.*; make it again$"):
            read_json(path, remedy="make it again", keys=("rows",))
    path.write_text(WHOLE)
    assert read_json(path, remedy="", keys=("rows",)) == json.loads(WHOLE)


def test_a_broken_sidecar_and_a_broken_manifest_are_named(tmp_path):
    shard = tmp_path / "dev-00000.parquet"
    write_shard(shard, b"rows")
    for content in ('{"rows": 3', '{"rows": 3}', "[]"):
        sidecar_path(shard).write_text(content)
        for read in (is_whole, verify_shard):
            with pytest.raises(ValueError, match=r"dev-00000\.parquet\.json.*run the same command again"):
                read(shard)
    (tmp_path / "manifest.json").write_text('{"rows"')
    with pytest.raises(ValueError, match=r"manifest\.json.*start over"):
        read_manifest(tmp_path)


@pytest.fixture
def store(tmp_path):
    return KeyedStore(tmp_path / "folder" / "kept.jsonl", remedy="delete the line", fields=("x",))


def test_what_is_kept_is_found_under_an_equal_key_and_the_last_counts(store):
    assert store.entries() == []
    store.keep([({"a": 1, "b": (2, 3)}, {"x": 1.5}), ({"a": 2}, {"x": 0})])
    assert store.get({"b": [2, 3], "a": 1}) == {"x": 1.5}
    assert store.get({"a": 3}) is None
    store.keep([({"b": [2, 3], "a": 1}, {"x": 2})])
    assert KeyedStore(store.path, remedy="").get({"a": 1, "b": [2, 3]}) == {"x": 2}
    assert len(store.entries()) == 2


def test_a_line_that_a_killed_writer_left_is_no_entry_and_the_next_writer_cuts_it_off(store):
    for cut in range(1, 30):
        store.path.unlink(missing_ok=True)
        store.keep([({"a": 1}, {"x": 1})])
        with store.path.open("a") as file:
            file.write(json.dumps({"key": {"a": 2}, "value": {"x": 2}})[:cut])
        assert store.entries() == [({"a": 1}, {"x": 1})]
        store.keep([({"a": 3}, {"x": 3})])
        assert [json.loads(line)["value"]["x"] for line in store.path.read_text().splitlines()] == [1, 3]


@pytest.mark.parametrize(
    "broken", ['{"key": {"a"', '{"key": {}}', '{"key": {}, "value": {}}', '{"key": 1, "value": {"x": 1}}', "[]", ""]
)
def test_a_line_that_was_broken_by_hand_is_named_with_the_remedy(store, broken):
    store.keep([({"a": 1}, {"x": 1})])
    with store.path.open("a") as file:
        file.write(f"{broken}\n")
    with pytest.raises(ValueError, match=r"kept\.jsonl:2: .*; delete the line"):
        store.entries()


def test_two_processes_that_keep_at_once_lose_no_entry(store):
    def keep(writer: int) -> None:
        for number in range(50):
            store.keep([({"writer": writer, "number": number}, {"x": number})])

    assert at_once(lambda: keep(0), lambda: keep(1)) == [0, 0]
    assert len(store.entries()) == 100


def test_a_write_that_ends_half_way_leaves_no_file_that_is_taken_for_whole(tmp_path, monkeypatch):
    path = tmp_path / "rows" / "train-00000.parquet"
    write_shard(path, b"first")

    def ended(*_: object) -> None:
        raise KeyboardInterrupt

    for name in ("os.fsync", "pathlib.Path.replace"):
        with monkeypatch.context() as patch:
            patch.setattr(name, ended)
            with pytest.raises(KeyboardInterrupt):
                write_atomic(path, b"other")
            assert path.read_bytes() == b"first"
            assert is_whole(path)
            with pytest.raises(KeyboardInterrupt):
                write_shard(path, b"other")
        assert not is_whole(path)
        write_shard(path, b"first")

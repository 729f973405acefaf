"""A JSON file that was truncated or broken by hand is named, with its line and the remedy, by every reader; in a keyed
store the last value of a key counts, and an incomplete line is ignored.
"""

import json
import os

import pytest

from data_gen.store.manifest import read_manifest
from store.json_files import KeyedStore, read_json
from store.shards import is_whole, sidecar_path, verify_shard, write_shard

WHOLE = json.dumps({"rows": 1, "problems": [1, 2, 3]}, indent=1)


@pytest.mark.parametrize("cut", range(len(WHOLE)))
def test_every_truncation_is_refused_with_the_name_of_the_file_and_the_remedy(tmp_path, cut):
    path = tmp_path / "facts.json"
    path.write_text(WHOLE[:cut])
    with pytest.raises(ValueError, match=r"facts\.json.*; make it again$"):
        read_json(path, remedy="make it again")


def test_the_line_is_named_and_a_whole_file_is_read(tmp_path):
    path = tmp_path / "facts.json"
    path.write_text('{\n"rows": 1,\n"problems": oops}')
    with pytest.raises(ValueError, match=r"facts\.json:3: invalid JSON \(Expecting value at column 13\)"):
        read_json(path, remedy="")
    path.write_text(WHOLE)
    assert read_json(path, remedy="") == json.loads(WHOLE)


@pytest.mark.parametrize(
    ("content", "why"), [(b"[1]", "got list"), (b"\xff\xfe\x00", "not UTF-8"), (b"{}", "missing key 'rows'")]
)
def test_what_is_no_object_of_the_keys_is_refused(tmp_path, content, why):
    path = tmp_path / "facts.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{why}.*; make it again"):
        read_json(path, remedy="make it again", keys=("rows",))


@pytest.mark.parametrize("content", ['{"rows": 3', '{"rows": 3}', "[]"])
def test_a_broken_sidecar_is_named(tmp_path, content):
    shard = tmp_path / "dev-00000.parquet"
    write_shard(shard, b"rows")
    sidecar_path(shard).write_text(content)
    for read in (is_whole, verify_shard):
        with pytest.raises(ValueError, match=r"dev-00000\.parquet\.json.*run the same command again"):
            read(shard)


def test_a_broken_manifest_is_named(tmp_path):
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


@pytest.mark.parametrize("cut", range(1, 30))
def test_a_line_that_a_killed_writer_left_is_no_entry_and_the_next_writer_cuts_it_off(store, cut):
    store.keep([({"a": 1}, {"x": 1})])
    whole = store.path.read_bytes()
    store.path.write_bytes(whole + json.dumps({"key": {"a": 2}, "value": {"x": 2}}).encode()[:cut])
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
    children = []
    for writer in range(2):
        if (pid := os.fork()) == 0:
            for number in range(50):
                store.keep([({"writer": writer, "number": number}, {"x": number})])
            os._exit(0)
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0]
    assert len(store.entries()) == 100

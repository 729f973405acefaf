"""What is kept is found again under an equal key; the last of a key counts; a torn line is no entry, a broken one is
named.
"""

import json
import os

import pytest

from store.keyed import KeyedStore


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

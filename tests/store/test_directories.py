"""A directory that is replaced at once: whoever dies at any moment, one of the two versions is there afterwards."""

import os
from pathlib import Path

import pytest

from store.shards import atomic_directory


def write(path: Path, content: str) -> None:
    with atomic_directory(path) as folder:
        (folder / "file").write_text(content)


@pytest.mark.parametrize("num_renames", range(3))
def test_a_writer_that_dies_between_two_renames_leaves_a_version_that_the_next_one_finds(tmp_path, num_renames):
    path = tmp_path / "head"
    write(path, "old")
    if (pid := os.fork()) == 0:
        rename, renamed = Path.rename, []
        Path.rename = lambda *paths: (  # type: ignore[method-assign]
            os._exit(1) if len(renamed) == num_renames else (renamed.append(paths), rename(*paths))
        )
        write(path, "new")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == (num_renames < 2)
    with pytest.raises(KeyError), atomic_directory(path):  # a writer that fails changes nothing
        raise KeyError
    assert (path / "file").read_text() == ("old" if num_renames < 2 else "new")
    assert [entry.name for entry in tmp_path.iterdir()] == ["head"]


def test_two_processes_that_write_a_directory_take_turns(tmp_path):
    children = []
    for writer in "ab":
        if (pid := os.fork()) == 0:
            for _ in range(20):
                write(tmp_path / "head", writer)
            os._exit(0)
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0]
    assert (tmp_path / "head" / "file").read_text() in "ab"

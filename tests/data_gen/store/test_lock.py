"""One writer per directory: a second is refused by name, a dead one is no obstacle, and nothing that is not ours is
deleted.
"""

import errno
import fcntl
import os
import signal
import time

import pytest

from data_gen.pipeline.command import make
from store.lock import LOCK, only_writer
from store.shards import clean_partial
from tests.data_gen.on_disk import with_data
from tests.data_gen.processes import at_once, meanwhile


def test_a_second_process_is_told_who_writes(toy_config, tmp_path):
    folder = tmp_path / "d"
    lock = folder / LOCK

    def hold() -> None:
        with only_writer(folder, setting="data.dir"):
            signal.pause()

    with meanwhile(hold, until=lambda: lock.is_file() and lock.read_text() != "") as pid:
        says = rf"d is in use by process {pid} on \S+ since 20.*choose another data\.dir"
        with pytest.raises(ValueError, match=says):
            make(with_data(toy_config, dir=str(folder)))
        assert [path.name for path in folder.iterdir()] == [LOCK]


def test_the_lock_of_a_dead_process_is_no_obstacle_and_none_is_left_over(tmp_path):
    def die() -> None:
        with only_writer(tmp_path, setting="data.dir"):
            os.kill(os.getpid(), signal.SIGKILL)

    assert at_once(die) == [-signal.SIGKILL]
    assert (tmp_path / LOCK).is_file()
    (tmp_path / "kept").touch()
    with only_writer(tmp_path, setting="data.dir"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


@pytest.mark.slow
def test_a_thousand_handovers_never_let_two_in(tmp_path):
    """Four processes take turns as fast as they can; each adds one to a number, which two at once would lose."""
    total = tmp_path / "total"
    total.write_text("0")

    def add() -> None:
        done = 0
        while done < 250:
            try:
                with only_writer(tmp_path / "d", setting="data.dir"):
                    total.write_text(str(int(total.read_text()) + 1))
                    done += 1
            except ValueError:
                time.sleep(0)

    assert at_once(*[add] * 4) == [0] * 4
    assert total.read_text() == "1000"


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_directory_that_is_a_file_is_refused(tmp_path, place):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"data\.dir is .*file"), only_writer(tmp_path / place, setting="data.dir"):
        pass


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_filesystem_without_locks_is_named_with_the_remedy_and_nothing_is_left_there(tmp_path, monkeypatch, number):
    def no_flock(*_args: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", no_flock)
    says = rf"heads\.dir is .*run, on a filesystem without file locks \(flock: {os.strerror(number)}\)"
    says += r".*mount it with locks.*another disk"
    with pytest.raises(ValueError, match=says), only_writer(tmp_path / "run", setting="heads.dir"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_only_the_partial_files_of_writers_are_removed(tmp_path):
    ours = {"rows/.a.parquet.12.partial", ".manifest.json.7.partial"}
    theirs = {"rows/.a.partial", "decode/.b.json.9.partial", "mine.partial"}
    for name in ours | theirs:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    clean_partial(tmp_path, "rows")
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} == theirs

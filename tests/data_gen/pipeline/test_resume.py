"""A run that is started again, after any end, comes to the bytes of an uninterrupted one, and never adds to another
run's folder.
"""

import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from configs.schema import Config
from data_gen.pipeline.command import make
from data_gen.store import manifest
from store import shards
from store.shards import features_path, rows_path, verify_shard
from tests.data_gen.on_disk import assert_as_at_once, files_of, with_data
from tests.data_gen.processes import at_once


def test_a_finished_run_writes_nothing_again(made, capsys):
    before = {path: path.stat().st_mtime_ns for path in Path(made.data.dir).rglob("*-0*")}
    make(made)
    assert before == {path: path.stat().st_mtime_ns for path in before}
    assert "(0 made in this run)" in capsys.readouterr().out


def test_a_lost_or_truncated_shard_is_made_again_byte_for_byte(made):
    whole = files_of(made.data.dir)
    rows_path(made.data.dir, "train", 1).unlink()
    fed = features_path(made.data.dir, "fed", "train", 2)
    fed.write_bytes(fed.read_bytes()[:-5])
    with pytest.raises(ValueError, match="truncated"):
        verify_shard(fed)
    make(made)
    assert files_of(made.data.dir) == whole


def make_and_die(config: Config, write: int, **flags: int) -> None:
    """`make`, with a SIGKILL in the middle of its `write`-th file."""
    write_atomic, count = shards.write_atomic, [0]

    def write_or_die(path: Path, content: bytes) -> None:
        count[0] += 1
        if count[0] == write:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_name(f".{path.name}.{os.getpid()}.partial").write_bytes(content[:7])
            os.kill(os.getpid(), signal.SIGKILL)
        write_atomic(path, content)

    shards.write_atomic = manifest.write_atomic = write_or_die
    make(config, **flags)


@pytest.mark.parametrize("mode", ["together", pytest.param("sequential", marks=pytest.mark.slow)])
def test_a_run_killed_at_any_write_resumes_to_the_same_bytes(toy_config, mode):
    """SIGKILL in the middle of the 2nd, 5th, … write."""
    config = with_data(toy_config, mode=mode)
    for write in (2, 5, 6, 3, 7):
        assert at_once(lambda write=write: make_and_die(config, write)) == [-signal.SIGKILL]
    make(config)
    assert_as_at_once(config)


def test_moved_models_are_the_same_models_and_trained_ones_are_not(made, tmp_path):
    moved = tmp_path / "elsewhere" / "draft"
    shutil.copytree(made.pair.draft.path, moved)
    config = replace(made, pair=replace(made.pair, draft=replace(made.pair.draft, path=str(moved))))
    make(config)
    weights = bytearray((moved / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (moved / "model.safetensors").write_bytes(weights)
    with pytest.raises(ValueError, match=r"draft\.weights"):
        make(config)

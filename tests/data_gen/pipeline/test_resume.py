"""A run that is started again, after any end, comes to the bytes of an uninterrupted one, and never adds to another
run's folder.
"""

import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from configs.schema import Config
from data_gen.pipeline.command import make
from data_gen.store import manifest
from store import shards
from store.shards import features_path, list_shards, rows_path, verify_shard
from tests.data_gen.on_disk import files_of, in_a_child


def test_a_finished_run_writes_nothing_again(toy_config, capsys):
    make(toy_config)
    before = {path: path.stat().st_mtime_ns for path in Path(toy_config.data.dir).rglob("*-0*")}
    make(toy_config)
    assert before == {path: path.stat().st_mtime_ns for path in before}
    assert "(0 made in this run)" in capsys.readouterr().out


def test_a_lost_or_truncated_shard_is_made_again_byte_for_byte(toy_config):
    make(toy_config)
    whole = files_of(toy_config.data.dir)
    rows_path(toy_config.data.dir, "train", 1).unlink()
    fed = features_path(toy_config.data.dir, "fed", "train", 2)
    fed.write_bytes(fed.read_bytes()[:-5])
    with pytest.raises(ValueError, match="truncated"):
        verify_shard(fed)
    make(toy_config)
    assert files_of(toy_config.data.dir) == whole


def test_hidden_states_are_written_once(toy_config, with_data):
    """One model at a time, in separate runs: the stage target moves the files of the stage draft."""
    config = with_data(toy_config, mode="sequential", features=("fed", "drawn"))

    def files(*place: str) -> dict[str, int]:
        paths = sorted(Path(config.data.dir, *place).glob("*.safetensors"))
        assert paths
        return {path.name: path.stat().st_ino for path in paths}

    make(config, stages="respond")
    make(config, stages="draft")
    written = {timing: files("stages", timing) for timing in ("fed", "drawn")}
    make(config, stages="target")
    assert {timing: files("features", timing) for timing in ("fed", "drawn")} == written
    assert not Path(config.data.dir, "stages").exists()
    together = with_data(config, mode="together", dir=f"{config.data.dir}-together")
    make(together)
    for folder in ("features/fed", "features/drawn", "labels"):
        pairs = zip(*(list_shards(one.data.dir, "train", folder) for one in (config, together)), strict=True)
        for alone, both in pairs:
            found, expected = load_file(alone), load_file(both)
            assert set(expected) - set(found) <= {"acceptance_rate", "cross_entropy"}
            for name, values in found.items():
                torch.testing.assert_close(values, expected[name], rtol=1e-4, atol=1e-4)


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
def test_a_run_killed_at_any_write_resumes_to_the_same_bytes(toy_config, with_data, tmp_path, mode):
    """SIGKILL in the middle of the 2nd, 5th, … write: the next run ends with exactly the files of an uninterrupted
    one.
    """
    make(with_data(toy_config, mode=mode))
    whole = files_of(toy_config.data.dir)
    directory = tmp_path / "killed"
    config = with_data(toy_config, mode=mode, dir=str(directory))
    for write in (2, 5, 6, 3, 7):
        assert os.WTERMSIG(in_a_child(lambda write=write: make_and_die(config, write))) == signal.SIGKILL
    make(config)
    assert files_of(directory) == whole


def test_moved_models_are_the_same_models_and_trained_ones_are_not(toy_config, tmp_path):
    make(toy_config)
    moved = tmp_path / "elsewhere" / "draft"
    shutil.copytree(toy_config.pair.draft.path, moved)
    config = replace(toy_config, pair=replace(toy_config.pair, draft=replace(toy_config.pair.draft, path=str(moved))))
    make(config)
    weights = bytearray((moved / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (moved / "model.safetensors").write_bytes(weights)
    with pytest.raises(ValueError, match=r"draft\.weights"):
        make(config)

"""A run that is started again, after any end, comes to the bytes of an uninterrupted one, and never adds to another
run's folder. So do stages as runs of their own, in order, and none before its predecessor.
"""

import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from configs.schema import Config
from data_gen.pipeline.command import make
from data_gen.pipeline.worker import Worker
from data_gen.store import manifest, rows
from store import shards
from store.shards import features_path, rows_path, verify_shard
from tests.data_gen.on_disk import files_of, with_data
from tests.data_gen.processes import at_once


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
def test_a_run_killed_at_any_write_resumes_to_the_same_bytes(toy_config, toy_run, apart_run, mode):
    """SIGKILL in the middle of the 2nd, 5th, … write."""
    config = with_data(toy_config, mode=mode)
    for write in (2, 5, 6, 3, 7):
        assert at_once(lambda write=write: make_and_die(config, write)) == [-signal.SIGKILL]
    make(config)
    assert files_of(config.data.dir) == files_of(toy_run if mode == "together" else apart_run)


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


@pytest.fixture
def staged(toy_config):
    return with_data(toy_config, mode="sequential", features=("fed", "drawn"))


def test_stage_by_stage_gives_the_bytes_of_one_run_and_no_stage_is_made_twice(staged, apart_run, monkeypatch):
    loaded, init = [], Worker.__init__

    def noted(self, job):
        init(self, job)
        loaded.append((job.stage, tuple(self._models)))

    def inodes() -> dict[str, int]:
        paths = Path(staged.data.dir, "features").rglob("*.safetensors")
        return {f"{path.parent.name}/{path.name}": path.stat().st_ino for path in paths}

    monkeypatch.setattr(Worker, "__init__", noted)
    for stage in ("respond", "draft", "draft"):
        make(staged, stages=stage)
    written = inodes()
    make(staged)
    assert inodes() == written, "the stage target does not write the hidden states again"
    assert {name.split("/")[0] for name in written} == {"fed", "drawn"}
    assert loaded == [("respond", ("target",)), ("draft", ("draft",)), ("target", ("target",))]
    assert not Path(staged.data.dir, "stages").exists()
    assert files_of(staged.data.dir) == files_of(apart_run)


def test_a_run_that_is_killed_before_it_writes_rows_needs_no_earlier_stage(staged, apart_run, monkeypatch):
    for stage in ("respond", "draft"):
        make(staged, stages=stage)
    with monkeypatch.context() as patch:
        patch.setattr(rows, "to_parquet", lambda *arguments, **named: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            make(staged, stages="target")
    make(staged, stages="target")
    assert files_of(staged.data.dir) == files_of(apart_run)


def test_a_stage_whose_predecessor_is_missing_or_that_is_none_is_refused(toy_config, staged):
    for done, stage, lacking in ((None, "draft", "respond"), (None, "target", "draft"), ("respond", "target", "draft")):
        if done:
            make(staged, stages=done)
        complaint = rf"needs stage {lacking}, .* train-00000.*run --stages {lacking} to completion"
        with pytest.raises(ValueError, match=complaint):
            make(staged, stages=stage)
        assert not list(Path(staged.data.dir).rglob("*.parquet"))
    for path in Path(staged.data.dir, "stages", "respond").glob("test-00001*"):
        path.unlink()
    with pytest.raises(ValueError, match=r"stage draft needs stage respond, .* for 1 shards .*test-00001"):
        make(staged, stages="draft")
    with pytest.raises(ValueError, match=r"--stages is draft, .* data\.mode: together the stages are together"):
        make(toy_config, stages="draft")
    with pytest.raises(ValueError, match="--retry_errors runs all stages, but --stages is draft"):
        make(staged, stages="draft", retry_errors=True)

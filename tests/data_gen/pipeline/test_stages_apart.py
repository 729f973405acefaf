"""Stages as runs of their own: the bytes of one run, in order, and none before its predecessor."""

from pathlib import Path

import pytest

from data_gen.pipeline import stages
from data_gen.pipeline.command import make
from data_gen.pipeline.worker import Worker
from tests.data_gen.on_disk import files_of


def test_stage_by_stage_gives_the_bytes_of_one_run(toy_config, with_data, monkeypatch):
    whole = with_data(toy_config, mode="sequential", dir=toy_config.data.dir + "-whole")
    staged = with_data(toy_config, mode="sequential")
    make(whole)
    loaded = []
    init = Worker.__init__

    def noted(self, job):
        init(self, job)
        loaded.append((job.stage, tuple(self._models)))

    monkeypatch.setattr(Worker, "__init__", noted)
    for stage in ("respond", "draft", "target"):
        make(staged, stages=stage)
    assert loaded == [("respond", ("target",)), ("draft", ("draft",)), ("target", ("target",))]
    assert files_of(staged.data.dir) == files_of(whole.data.dir)
    assert not (Path(staged.data.dir) / "stages").exists()


def test_a_stage_that_is_there_is_not_made_again_and_the_rest_of_a_run_goes_on_from_it(
    toy_config, with_data, monkeypatch
):
    staged = with_data(toy_config, mode="sequential")
    make(staged, stages="respond")
    left = files_of(staged.data.dir)
    made = []
    monkeypatch.setattr(Worker, "make", lambda self, spec, *more: made.append(spec))
    make(staged, stages="respond")
    assert made == []
    assert files_of(staged.data.dir) == left
    monkeypatch.undo()
    make(staged)
    whole = with_data(staged, dir=staged.data.dir + "-whole")
    make(whole)
    assert files_of(staged.data.dir) == files_of(whole.data.dir)


@pytest.mark.parametrize("num_written", [0, 1])
def test_a_run_that_is_killed_before_it_writes_rows_needs_no_earlier_stage(
    toy_config, with_data, monkeypatch, num_written
):
    """Hidden states of all timings, or of the first alone, have been moved when the process dies."""
    staged = with_data(toy_config, mode="sequential", features=("fed", "drawn"))
    for stage in ("respond", "draft"):
        make(staged, stages=stage)

    def die(*arguments, **named):
        raise KeyboardInterrupt

    name, complete = ("move_shard", stages.move_shard) if num_written else ("write_rows", None)
    calls = iter([complete] * num_written)
    monkeypatch.setattr(stages, name, lambda *arguments, **named: next(calls, die)(*arguments, **named))
    with pytest.raises(KeyboardInterrupt):
        make(staged, stages="target")
    monkeypatch.undo()
    make(staged, stages="target")
    whole = with_data(staged, dir=staged.data.dir + "-whole")
    make(whole)
    assert files_of(staged.data.dir) == files_of(whole.data.dir)


@pytest.mark.parametrize(
    ("before", "stage", "lacking"),
    [((), "draft", "respond"), ((), "target", "draft"), (("respond",), "target", "draft")],
)
def test_a_stage_whose_predecessor_is_missing_is_refused(toy_config, with_data, before, stage, lacking):
    staged = with_data(toy_config, mode="sequential")
    for name in before:
        make(staged, stages=name)
    with pytest.raises(
        ValueError, match=rf"needs stage {lacking}, .* train-00000.*run --stages {lacking} to completion"
    ):
        make(staged, stages=stage)
    assert not list(Path(staged.data.dir).rglob("*.parquet"))


def test_a_predecessor_that_is_not_there_for_every_shard_is_missing(toy_config, with_data):
    staged = with_data(toy_config, mode="sequential")
    make(staged, stages="respond")
    for path in (Path(staged.data.dir) / "stages" / "respond").glob("test-00001*"):
        path.unlink()
    with pytest.raises(ValueError, match=r"stage draft needs stage respond, .* for 1 shards .*test-00001"):
        make(staged, stages="draft")


def test_there_are_no_stages_where_both_models_are_loaded_and_none_are_left_out_of_a_retry(toy_config, with_data):
    with pytest.raises(ValueError, match=r"--stages is draft, but data\.mode is together"):
        make(toy_config, stages="draft")
    with pytest.raises(ValueError, match="--retry_errors runs all stages, but --stages is draft"):
        make(with_data(toy_config, mode="sequential"), stages="draft", retry_errors=True)

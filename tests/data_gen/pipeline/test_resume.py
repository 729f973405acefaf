"""A run that is started again, after any end, comes to the bytes of an uninterrupted one; data grows, batches change
and memory runs out without losing a shard; what decides rows is refused when it differs; and responses that one run
paid for are labelled by another as if it had made them.
"""

import json
import shutil
import signal
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from configs.schema import Config, ModelSource
from data_gen.labels.labeller import Labeller
from data_gen.pipeline.command import make
from data_gen.pipeline.inspect import check, responses
from data_gen.pipeline.worker import Worker
from data_gen.store import manifest, rows
from store import shards
from store.shards import read_sidecar, shard_path, verify_shard
from tests.data_gen.on_disk import assert_same_rows, errors_of, files_of, rows_of, with_data
from tests.data_gen.processes import at_once
from tests.toys.killed import die_in_write
from tests.toys.saved_pair import save_toy

CPU_ALLOCATOR = (
    "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."
)


def test_a_larger_run_is_the_run_at_once_and_keeps_whole_shards(toy_config, toy_run, capsys):
    few = with_data(toy_config, num_train=4, num_test=2)
    make(few)
    kept = shard_path(few.data.dir, "rows", "train", 0).stat().st_mtime_ns
    make(toy_config)
    after = files_of(few.data.dir)
    assert shard_path(few.data.dir, "rows", "train", 0).stat().st_mtime_ns == kept
    assert after == files_of(toy_run), "the short last shard is made again"
    capsys.readouterr()
    make(few)
    assert "2 shards of a larger earlier run stay" in capsys.readouterr().out
    assert files_of(few.data.dir) == after
    check(few)
    last = shard_path(few.data.dir, "rows", "train", 2)
    last.unlink()
    make(few)
    assert not last.exists(), "a smaller run makes no more than it asks for"


def test_responses_of_a_short_shard_are_made_again_too(toy_config, apart_run):
    config = with_data(toy_config, mode="sequential")
    make(with_data(config, num_train=4, num_test=2), stages="respond")
    make(config)
    assert files_of(config.data.dir) == files_of(apart_run)


def test_other_prompts_do_not_join_the_data(toy_config, tmp_path):
    path = Path(shutil.copy(toy_config.data.prompts, tmp_path))
    config = with_data(toy_config, prompts=str(path), num_train=4)
    make(config)
    path.write_text(path.read_text().replace("Say it", "Write it"))
    with pytest.raises(ValueError, match=r"train-00000 of .* was made from other prompts than .* restore the earlier"):
        make(config)


OF_GENERATOR = "differs in generator: {} there, 'PCG64DXSM' in this run;.*delete"
MANIFESTS = (
    ("recorded.pyarrow", "1.0", None),
    ("versions.transformers", lambda version: f"{version}.post1", None),
    ("versions.torch", lambda version: f"{version.split('.')[0]}.99", r"differs in versions\.torch"),
    ("generator", "MT19937", OF_GENERATOR.format("'MT19937'")),
    ("generator", None, OF_GENERATOR.format("None")),  # as in folders made by torch's generator
    ("seed", 1, "seed: 1 there, 0 in"),
    ("features", ["fed", "drawn"], None),  # as in folders that have hidden states
    ("feature_dtype", "bfloat16", None),
    ("mixes", 1, None),  # as in folders made before the setting was removed
    ("mixes", 2, "differs in mixes: 2 there, 1 in this run; choose another data.dir"),
    ("mixing_ratio", 0.2, "differs in mixing_ratio"),
    ("rows_per_shard", 2, "differs in rows_per_shard"),
    ("sampling.temperature", 0.5, r"sampling\.temperature: 0\.5 there, 1\.0 in"),
    ("server", {"extra": {"add_special_tokens": False}}, r"differs in server: \{'extra': .* there, None in"),
)
BROKEN_MANIFESTS = (
    ("null", "expected a JSON object, got NoneType"),
    ("{}", "differs in format: None there, 3 in this run"),
    ('{"format": 1, "target": null}', "target is 'None', but must be an object; restore the original"),
    ('{"format": 1', "invalid JSON"),
)


def test_data_of_a_broken_manifest_or_one_that_decides_other_rows_is_not_grown(made):
    path = Path(made.data.dir, "manifest.json")
    whole, before = path.read_text(), files_of(made.data.dir)
    manifests = list(BROKEN_MANIFESTS)
    for entry, value, complaint in MANIFESTS:
        manifest = json.loads(whole)
        *sections, name = entry.split(".")
        section = manifest[sections[0]] if sections else manifest
        section[name] = value(section[name]) if callable(value) else value
        manifests.append((json.dumps(manifest), complaint))
    for text, complaint in manifests:
        path.write_text(text)
        with pytest.raises(ValueError, match=complaint) if complaint else nullcontext():
            make(made)
        assert path.read_text() == text
        assert files_of(made.data.dir) == before


def fail_above(size: int, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Labelling of larger batches fails."""
    label = Labeller.label

    def label_or_fail(self, *arguments, **named):
        if self.batch_size > size:
            raise error
        return label(self, *arguments, **named)

    monkeypatch.setattr(Labeller, "label", label_or_fail)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError(CPU_ALLOCATOR), MemoryError()]
)
def test_out_of_memory_halves_the_batch_and_the_rows_stay_the_same(made, tmp_path, monkeypatch, capsys, error):
    fail_above(1, error, monkeypatch)
    config = with_data(made, dir=str(tmp_path / "poor"), batch_size=64)
    make(config)
    assert "out of memory at train-00000 with data.batch_size 64; continuing with 1" in capsys.readouterr().err
    assert_same_rows(rows_of(config), rows_of(made))
    assert read_sidecar(shard_path(config.data.dir, "rows", "test", 0))["batch_size"] == 1
    one_line = r"with data\.batch_size 1; set data\.batch_size to 1, or lower data\.chunk_mb"
    for cause, kind, message in ((error, ValueError, one_line), (RuntimeError("another"), RuntimeError, "another")):
        fail_above(0, cause, monkeypatch)
        with pytest.raises(kind, match=message):
            make(with_data(config, dir=str(tmp_path / kind.__name__)))


def test_a_broken_sidecar_is_named_and_its_shard_made_again_without_it(made):
    sidecar = Path(made.data.dir) / "rows" / "train-00000.parquet.json"
    whole = sidecar.read_text()
    for changes in ({"problems": None}, {"ok": "many"}, {"problems": [5]}, {"input": 9}, {"bytes": None}):
        sidecar.write_text(json.dumps(json.loads(whole) | changes))
        with pytest.raises(ValueError, match=r"train-00000\.parquet\.json: .*; delete it and run the same command"):
            make(made)
        sidecar.unlink()
        make(made)
        assert sidecar.read_text() == whole


@pytest.fixture
def relabelled(made, tmp_path):
    """relabelled(name, config): `config` over the responses of the toy run, in a folder of its own."""
    path = tmp_path / "responses.jsonl"
    responses(made, out=str(path))
    return lambda name, config: with_data(config, source="file", responses=str(path), dir=str(tmp_path / name))


def test_the_same_settings_give_the_same_rows_and_responses_to_other_prompts_are_errors_that_say_so(made, relabelled):
    again = relabelled("again", made)
    make(again)
    assert_same_rows(rows_of(again), rows_of(made))
    plain = with_data(relabelled("plain", made), template="plain")
    with pytest.raises(ValueError, match="12 of 12 prompts ended in an error"):
        make(plain)
    assert all("check data.prompts and data.template" in error["reason"] for error in errors_of(plain))


def test_another_draft_and_mixing_ratio_are_labelled_as_if_the_target_had_written_for_them(made, relabelled, tmp_path):
    save_toy(tmp_path / "other", hidden_size=12, seed=7, scale=0.3)
    pair = replace(made.pair, draft=ModelSource(path=str(tmp_path / "other")))
    other = with_data(replace(made, pair=pair), mixing_ratio=0.5, dir=str(tmp_path / "afresh"))
    again = relabelled("again", other)
    make(other)
    make(again)
    assert_same_rows(rows_of(again), rows_of(other))
    assert [row["draft_ids"] for row in rows_of(again)] != [row["draft_ids"] for row in rows_of(made)]


def test_a_file_grows_with_its_rows_and_what_was_labelled_from_it_goes_on(toy_config, tmp_path):
    path = tmp_path / "responses.jsonl"
    few = with_data(toy_config, num_train=4, num_test=2)
    again = with_data(few, source="file", responses=str(path), dir=str(tmp_path / "again"))
    make(few)
    responses(few, out=str(path))
    make(again)
    lines = path.read_bytes()
    make(toy_config)
    responses(toy_config, out=str(path))
    assert path.read_bytes().startswith(lines)
    assert len(path.read_text().splitlines()) == 12
    again = with_data(again, num_train=8, num_test=4)
    make(again)
    assert_same_rows(rows_of(again), rows_of(toy_config))
    path.write_text(path.read_text().replace('"response_ids": [', '"response_ids": [9, ', 1))
    with pytest.raises(ValueError, match=r"does not begin with the responses .* restore that file"):
        make(again)


def test_a_file_that_holds_something_else_stays_as_it_is(made, tmp_path):
    row = rows_of(made)[0]
    name = row["id"]
    path = tmp_path / "responses.jsonl"
    for content, message in (
        ('{"id": "p1", "response": "mine"}\n', "responses.jsonl:1 was not written by this command"),
        (
            f'{{"id": "{name}", "prompt_ids": {row["prompt_ids"]}, "response_ids": [5]}}\n',
            f"have different responses to {name}",
        ),
    ):
        path.write_text(content)
        with pytest.raises(ValueError, match=message):
            responses(made, out=str(path))
        assert path.read_text() == content


def test_what_the_stage_respond_left_is_written_as_it_is_once_the_rows_are_there(toy_config, tmp_path):
    config = with_data(toy_config, mode="sequential")
    files = []
    for stage in ("respond", "all"):
        make(config, stages=stage)
        responses(config, out=str(tmp_path / f"{stage}.jsonl"))
        files.append(Path(tmp_path, f"{stage}.jsonl").read_bytes())
    assert files[0] == files[1] != b""


def test_a_lost_or_truncated_shard_is_made_again_byte_for_byte(made):
    whole = files_of(made.data.dir)
    shard_path(made.data.dir, "rows", "train", 1).unlink()
    labels = shard_path(made.data.dir, "labels", "train", 2)
    labels.write_bytes(labels.read_bytes()[:-5])
    with pytest.raises(ValueError, match="truncated"):
        verify_shard(labels)
    make(made)
    assert files_of(made.data.dir) == whole


def make_and_die(config: Config, write: int, **flags: int) -> None:
    die_in_write(write)
    manifest.write_atomic = shards.write_atomic
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
    return with_data(toy_config, mode="sequential")


def test_stage_by_stage_gives_the_bytes_of_one_run_and_no_stage_is_made_twice(staged, apart_run, monkeypatch):
    loaded, init = [], Worker.__init__

    def noted(self, job):
        init(self, job)
        loaded.append((job.stage, tuple(self._models)))

    monkeypatch.setattr(Worker, "__init__", noted)
    for stage in ("respond", "draft", "draft"):
        make(staged, stages=stage)
    make(staged)
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

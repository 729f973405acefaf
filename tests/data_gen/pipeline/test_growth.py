"""Data grows, batches change and memory runs out without losing a shard; what decides rows is still refused when it
differs.
"""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from data_gen.labels.labeller import Labeller
from data_gen.pipeline.command import make
from data_gen.pipeline.inspect import check
from data_gen.pipeline.worker import Worker
from store.shards import list_shards, read_sidecar, rows_path
from tests.data_gen.on_disk import assert_same_rows, files_of, rows_of

CPU_ALLOCATOR = (
    "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."
)


def test_a_larger_run_is_the_run_at_once_and_keeps_whole_shards(toy_config, with_data, tmp_path, capsys):
    few = with_data(toy_config, num_train=4, num_test=2)
    make(few)
    kept = rows_path(few.data.dir, "train", 0).stat().st_mtime_ns
    make(toy_config)
    after = files_of(few.data.dir)
    assert rows_path(few.data.dir, "train", 0).stat().st_mtime_ns == kept
    whole = with_data(toy_config, dir=str(tmp_path / "at once"))
    make(whole)
    assert after == files_of(whole.data.dir), "the short last shard is made again"

    capsys.readouterr()
    make(few)
    assert "2 shards of a larger earlier run stay" in capsys.readouterr().out
    assert files_of(few.data.dir) == after
    check(few)


def test_responses_of_a_short_shard_are_made_again_too(toy_config, with_data, tmp_path):
    config = with_data(toy_config, mode="sequential")
    make(with_data(config, num_train=4, num_test=2), stages="respond")
    make(config)
    whole = with_data(config, dir=str(tmp_path / "at once"))
    make(whole)
    assert files_of(config.data.dir) == files_of(whole.data.dir)


def test_a_smaller_run_makes_no_more_than_it_asks_for(toy_config, with_data):
    make(toy_config)
    for index in range(3):
        rows_path(toy_config.data.dir, "train", index).unlink()
    make(with_data(toy_config, num_train=2))
    assert [rows_path(toy_config.data.dir, "train", index).is_file() for index in range(3)] == [True, False, False]


def test_other_prompts_do_not_join_the_data(toy_config, with_data, prompts_file):
    make(with_data(toy_config, num_train=4))
    prompts_file.write_text(prompts_file.read_text().replace("Say it", "Write it"))
    with pytest.raises(ValueError, match=r"train-00000 of .* was made from other prompts than .* restore the earlier"):
        make(toy_config)


OF_GENERATOR = "differs in generator: {} there, 'PCG64DXSM' in this run;.*delete"
MANIFESTS = (
    ("recorded.pyarrow", "1.0", None),
    ("versions.transformers", lambda version: f"{version}.post1", None),
    ("versions.torch", lambda version: f"{version.split('.')[0]}.99", r"differs in versions\.torch"),
    ("generator", "MT19937", OF_GENERATOR.format("'MT19937'")),
    ("generator", None, OF_GENERATOR.format("None")),  # as in folders made by torch's generator
    ("seed", 1, "seed: 1 there, 0 in"),
    ("mixing_ratio", 0.2, "differs in mixing_ratio"),
    ("rows_per_shard", 2, "differs in rows_per_shard"),
    ("sampling.temperature", 0.5, r"sampling\.temperature: 0\.5 there, 1\.0 in"),
    ("server", {"extra": {"add_special_tokens": False}}, r"differs in server: \{'extra': .* there, None in"),
)


def test_data_made_with_what_decides_other_rows_is_not_grown(toy_config, with_data):
    make(with_data(toy_config, num_train=2))
    path = Path(toy_config.data.dir, "manifest.json")
    whole, before = path.read_text(), files_of(toy_config.data.dir)
    for entry, value, complaint in MANIFESTS:
        manifest = json.loads(whole)
        *sections, name = entry.split(".")
        section = manifest[sections[0]] if sections else manifest
        section[name] = value(section[name]) if callable(value) else value
        path.write_text(json.dumps(manifest))
        with pytest.raises(ValueError, match=complaint) if complaint else nullcontext():
            make(with_data(toy_config, num_train=2))
        assert files_of(toy_config.data.dir) == before


def test_check_finds_what_an_unfinished_run_lacks(toy_config, monkeypatch):
    """The run ends after its first shard."""
    monkeypatch.setattr(Worker, "_make", once(Worker._make))
    with pytest.raises(KeyboardInterrupt):
        make(toy_config)
    with pytest.raises(ValueError, match=r"^16 shards in .* are damaged or missing"):
        check(toy_config)


def once(function):
    """The function, which is interrupted from its second call on."""
    calls = iter([function])

    def called(*arguments):
        for first in calls:
            return first(*arguments)
        raise KeyboardInterrupt

    return called


def test_a_shard_made_in_other_batches_has_the_same_rows(toy_config, with_data):
    make(toy_config)
    before = rows_of(toy_config)
    rows_path(toy_config.data.dir, "train", 1).unlink()
    make(with_data(toy_config, batch_size=3, chunk_mb=1))
    assert_same_rows(rows_of(toy_config), before)
    assert [read_sidecar(path)["batch_size"] for path in list_shards(toy_config.data.dir, "train")] == [2, 3, 2]


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError(CPU_ALLOCATOR), MemoryError()]
)
def test_out_of_memory_halves_the_batch_and_the_rows_stay_the_same(
    toy_config, with_data, tmp_path, monkeypatch, capsys, error
):
    make(toy_config)
    label = Labeller.label

    def label_or_fail(self, *arguments, **named):
        if self.batch_size > 1:
            raise error
        return label(self, *arguments, **named)

    monkeypatch.setattr(Labeller, "label", label_or_fail)
    config = with_data(toy_config, dir=str(tmp_path / "poor"), batch_size=64)
    make(config)
    assert "out of memory at train-00000 with data.batch_size 64; continuing with 1" in capsys.readouterr().err
    assert_same_rows(rows_of(config), rows_of(toy_config))
    assert read_sidecar(rows_path(config.data.dir, "test", 0))["batch_size"] == 1


def test_too_little_memory_for_one_sequence_ends_in_one_line_and_other_errors_are_not_caught(toy_config, monkeypatch):
    expectations = [
        (MemoryError(), ValueError, "one sequence at a time; lower data.chunk_mb"),
        (RuntimeError("x"), RuntimeError, "x"),
    ]
    for error, kind, message in expectations:
        monkeypatch.setattr(Labeller, "label", lambda *arguments, error=error, **named: (_ for _ in ()).throw(error))
        with pytest.raises(kind, match=message):
            make(toy_config)


def test_another_file_of_responses_is_refused_and_a_longer_one_goes_on(toy_config, with_data, tmp_path):
    path = tmp_path / "responses.jsonl"
    lines = [json.dumps({"id": f"p{index}", "response_ids": [5 + index, 1]}) + "\n" for index in range(12)]
    path.write_text("".join(lines))
    config = with_data(toy_config, source="file", responses=str(path), num_train=4)
    make(config)
    path.write_text("".join(lines) + '{"id": "later", "response": "x"}\n')
    make(with_data(config, num_train=8))
    assert len(rows_of(config)) == 8
    path.write_text("".join(lines).replace("[5, 1]", "[6, 1]") + '{"id": "later", "response": "x"}\n')
    with pytest.raises(ValueError, match=r"does not begin with the responses .* restore that file"):
        make(config)


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        ("null", "expected a JSON object, got NoneType"),
        ("{}", "differs in format: None there, 3 in this run"),
        ('{"format": 1, "target": null}', "target is 'None', but must be an object; restore the original"),
        ('{"format": 1', "invalid JSON"),
    ],
)
def test_a_broken_manifest_is_refused_in_one_line(toy_config, broken, complaint):
    path = Path(toy_config.data.dir) / "manifest.json"
    path.parent.mkdir()
    path.write_text(broken)
    with pytest.raises(ValueError, match=complaint):
        make(toy_config)
    assert path.read_text() == broken


@pytest.mark.parametrize(
    "changes", [{"problems": None}, {"ok": "many"}, {"problems": [5]}, {"input": 9}, {"bytes": None}]
)
def test_a_broken_sidecar_is_named_and_its_shard_made_again_without_it(toy_config, with_data, changes):
    config = with_data(toy_config, num_train=3, num_test=0)
    make(config)
    sidecar = Path(config.data.dir) / "rows" / "train-00000.parquet.json"
    whole = sidecar.read_text()
    sidecar.write_text(json.dumps(json.loads(whole) | changes))
    with pytest.raises(ValueError, match=r"train-00000\.parquet\.json: .*; delete it and run the same command again"):
        make(config)
    sidecar.unlink()
    make(config)
    assert sidecar.read_text() == whole

"""A byte that has flipped is found at the start of whatever reads it, once, and named; and data_gen makes its shard
again.
"""

from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from data_gen.__main__ import main
from data_gen.pipeline import command
from data_gen.pipeline.command import make
from data_gen.pipeline.inspect import check, responses
from store import shards
from store.shards import check_sums, features_path, problems_of, rows_path, sidecar_path, write_shard
from tests.data_gen.on_disk import files_of


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def broken_shards(config) -> list[Path]:
    """Shards of rows and of features, of which a byte flips."""
    found = [rows_path(config.data.dir, "train", 1), features_path(config.data.dir, "drawn", "test", 0)]
    for path in found:
        flip(path)
    return found


@pytest.mark.parametrize("mode", ["together", pytest.param("sequential", marks=pytest.mark.slow)])
def test_a_flipped_byte_is_named_and_its_shard_made_again_byte_for_byte(toy_config, with_data, capsys, mode):
    config = with_data(toy_config, mode=mode)
    make(config)
    whole = files_of(config.data.dir)
    broken = broken_shards(config)
    capsys.readouterr()
    make(config)
    said = capsys.readouterr()
    assert all(f"{path} is corrupted" in said.err for path in broken)
    assert "(2 made in this run)" in said.out
    assert files_of(config.data.dir) == whole


def test_a_broken_result_of_an_earlier_stage_is_made_again(toy_config, with_data, monkeypatch, capsys):
    config = with_data(toy_config, mode="sequential")
    make(config)
    whole = files_of(config.data.dir)
    for path in Path(config.data.dir).rglob("*-0*"):
        path.unlink()
    (run, calls) = (command._run, [])
    monkeypatch.setattr(
        command, "_run", lambda job, specs: calls.append(job.stage) or (run(job, specs) if len(calls) < 3 else 1 / 0)
    )
    with pytest.raises(ZeroDivisionError):
        make(config)
    monkeypatch.undo()
    flip(Path(config.data.dir) / "stages" / "draft" / "train-00001.safetensors")
    make(config)
    assert "train-00001.safetensors is corrupted" in capsys.readouterr().err
    assert files_of(config.data.dir) == whole


def test_check_names_every_broken_shard_and_changes_nothing(toy_config, capsys):
    make(toy_config)
    check(toy_config)
    said = capsys.readouterr().out
    assert "5 shards intact" in said
    assert said.endswith(" are intact.\n")
    broken = broken_shards(toy_config)
    features_path(toy_config.data.dir, "fed", "train", 0).unlink()
    sidecar_path(features_path(toy_config.data.dir, "fed", "train", 1)).write_text("{")
    lost = rows_path(toy_config.data.dir, "test", 1)
    lost.unlink()
    sidecar_path(lost).unlink()
    before = files_of(toy_config.data.dir)
    with pytest.raises(ValueError, match=r"5 shards in .* are damaged or missing"):
        check(toy_config)
    said = capsys.readouterr().out
    assert all(f"{path} is corrupted: its sha256 differs from its sidecar's; delete it" in said for path in broken)
    assert "fed/train-00000.safetensors is missing" in said
    assert "fed/train-00001.safetensors.json: invalid JSON" in said
    assert f"{lost} is missing or incomplete" in said
    assert files_of(toy_config.data.dir) == before


def test_check_ends_with_exit_code_2_and_shows_a_bar(toy_config, tmp_path, capsys):
    make(toy_config)
    broken = broken_shards(toy_config)
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump({"pair": asdict(toy_config.pair), "data": {"dir": toy_config.data.dir}}))
    capsys.readouterr()
    with pytest.raises(SystemExit, match="2"):
        main(["check", "--config", str(path)])
    said = capsys.readouterr()
    assert "checking sums" in said.err
    assert said.err.splitlines()[-1].startswith("error: 2 shards in")
    assert all(str(path) in said.out for path in broken)


def test_responses_of_a_broken_shard_are_not_handed_on(toy_config, tmp_path):
    make(toy_config)
    flip(rows_path(toy_config.data.dir, "test", 0))
    with pytest.raises(ValueError, match=r"test-00000\.parquet is corrupted"):
        responses(toy_config, out=str(tmp_path / "out.jsonl"))
    assert not (tmp_path / "out.jsonl").exists()


def test_a_shard_is_read_once_in_a_process_and_again_where_it_has_changed(tmp_path, monkeypatch):
    path, read = tmp_path / "train-00000.parquet", []
    write_shard(path, b"x" * 100)
    digest = shards.hashlib.file_digest
    monkeypatch.setattr(shards.hashlib, "file_digest", lambda file, name: read.append(file.name) or digest(file, name))
    check_sums([path])
    check_sums([path])
    assert len(read) == 1
    write_shard(path, b"y" * 100)
    check_sums([path])
    assert len(read) == 2


def test_an_unreadable_shard_is_named_among_the_others(tmp_path, monkeypatch):
    paths = [tmp_path / f"train-{index:05d}.parquet" for index in range(3)]
    for path in paths:
        write_shard(path, b"x")
    flip(paths[2])
    verify = shards.verify_shard

    def failing(path: Path, *, command: str) -> None:
        if path == paths[1]:
            raise OSError(5, "Input/output error", str(path))
        verify(path, command=command)

    monkeypatch.setattr(shards, "verify_shard", failing)
    problems = dict(problems_of(paths))
    assert list(problems) == paths[1:]
    assert problems[paths[1]].startswith(f"{paths[1]} cannot be read (Input/output error); repair the disk")

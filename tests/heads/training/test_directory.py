"""heads.dir: which run is there, whatever was killed, changed, broken or full."""

import errno
import json
import os
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_only

from configs.schema import Config
from heads.batches.module import is_first_process
from heads.command import export, load_sweep
from heads.model.head import AcceptanceHead
from heads.training.command import train
from heads.training.directory import RunDirectory, run_of
from heads.training.sweep import Sweep
from heads.training.trainer import WholeCheckpoints
from store import facts
from tests.toys.made_up import make_config

ONE = {"max_epochs": 1}


def changed(config: Config, **heads) -> Config:
    return replace(config, heads=replace(config.heads, **heads))


@pytest.fixture
def directory(copied: Config) -> RunDirectory:
    return RunDirectory(Path(copied.heads.dir))


def full(descriptor: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.slow
def test_a_run_that_started_over_and_died_at_once_is_never_the_old_one(data_dir: Path, tmp_path: Path):
    old = make_config(data_dir, tmp_path, trainer=ONE)
    new = changed(old, learning_rate=0.5)
    train(old)
    directory = RunDirectory(tmp_path)
    name = directory.prepare(new, resume=False)[0]  # and killed before its first checkpoint
    with pytest.raises(ValueError, match=r"last\.ckpt belongs to an earlier run"):
        export(new)
    assert directory.prepare(new, resume=True) == (name, None)
    directory.checkpoint.rename(tmp_path / "old.ckpt")
    measured = directory.metrics.read_bytes()
    train(new)
    directory.metrics.write_bytes(measured)  # as if it had been killed before it measured anything
    [path] = export(new, head="fed-d0-w1")
    head = AcceptanceHead.from_pretrained(path)
    assert (head.provenance.metrics, head.provenance.training["learning_rate"]) == ({}, 0.5)
    with pytest.raises(ValueError, match="--head best needs val_metrics"):
        export(new, head="best")
    [path] = export(old, head="fed-d0-w1", checkpoint=str(tmp_path / "old.ckpt"), force=True)
    assert AcceptanceHead.from_pretrained(path).provenance.metrics["auroc"] > 0


def test_a_full_disk_at_the_start_leaves_the_run_as_it_was(copied, directory, monkeypatch: pytest.MonkeyPatch):
    before = (directory.path / "run.json").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        for resume in (True, False):
            with pytest.raises(ValueError, match="no space for"):
                directory.prepare(copied, resume=resume)
        with pytest.raises(ValueError, match="no space for"):
            WholeCheckpoints().save_checkpoint({}, directory.checkpoint)
    assert (directory.path / "run.json").read_bytes() == before
    assert directory.prepare(copied, resume=True)[1]


def test_a_run_resumes_where_nothing_depends_on_what_differs_and_else_the_setting_is_named(copied, directory, tmp_path):
    """A setting may be new or removed, and data may move, not change; dropout depends on the number of processes."""
    written, trainer, threads = directory.read(), copied.trainer, replace(copied.pair, num_threads=3)
    heads = written["config"]["heads"]
    other_version = {name: value for name, value in heads.items() if name != "dropout"} | {"removed": 3}
    same_version = {name: value for name, value in heads.items() if name != "warmup_ratio"} | {"removed": 3}
    data = Path(shutil.copytree(copied.data.dir, tmp_path / "moved"))
    moved = replace(copied, data=replace(copied.data, dir=str(data)))
    for message, config, old_heads, old_processes in (
        (r"heads\.learning_rate = 0\.01, but this config has 0\.5", changed(copied, learning_rate=0.5), heads, 1),
        (r"epochs = 2, but this config has 9", replace(copied, trainer=trainer | {"max_epochs": 9}), heads, 1),
        (r"max_steps = -1, but this config has 9", replace(copied, trainer=trainer | {"max_steps": 9}), heads, 1),
        (r"heads\.dropout = \[0\.0, 0\.2\], but .* \[0\.0\]", changed(copied, dropout=(0.0,)), other_version, 1),
        (r"8 processes, .* has 1, and .* \[0.1\] ", changed(copied, dropout=(0.1,)), heads | {"dropout": [0.1]}, 8),
        (None, copied, same_version, 1),
        (None, replace(copied, trainer=trainer | {"devices": 8, "num_nodes": 1}), heads, 8),
        (None, replace(changed(copied, checkpoint_every_n_steps=7), pair=threads), heads, 1),
        (None, moved, heads, 1),
    ):
        old = written | {"config": written["config"] | {"heads": old_heads}, "processes": old_processes}
        (directory.path / "run.json").write_text(json.dumps(old))
        with pytest.raises(ValueError, match=message) if message else nullcontext():
            assert directory.prepare(config, resume=True) == (written["run"], str(directory.checkpoint))
    assert directory.read()["processes"] == 1
    assert directory.prepare(changed(copied, learning_rate=0.5), resume=False)[1] is None
    manifest = json.loads((data / "manifest.json").read_text())
    (data / "manifest.json").write_text(json.dumps(manifest | {"generator": "another"}))
    (directory.path / "run.json").write_text(json.dumps(written))
    with pytest.raises(ValueError, match="trained on other data"):
        directory.prepare(moved, resume=True)


def test_ctrl_c_reaches_the_command_line_and_a_second_run_in_a_directory_is_refused(data_dir, tmp_path, monkeypatch):
    config = make_config(data_dir, tmp_path, trainer=ONE)
    with RunDirectory(tmp_path).alone(), pytest.raises(ValueError, match="is in use by process"):
        train(config)

    def stopped(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(Sweep, "training_step", stopped)
    with pytest.raises(KeyboardInterrupt):
        train(config)


def test_the_first_process_of_another_node_leaves_the_lock_and_the_files_to_rank_0(tmp_path, monkeypatch):
    with RunDirectory(tmp_path).alone():
        monkeypatch.setenv("NODE_RANK", "1")
        with RunDirectory(tmp_path).alone():
            assert not is_first_process()


def middle_of_a_tensor(path: Path) -> int:
    """Offset of a byte that counts: the padding between the members of a checkpoint has no checksum."""
    with ZipFile(path) as archive:
        member = max(archive.infolist(), key=lambda info: info.file_size)
    header = path.read_bytes()[member.header_offset :][:30]
    name, extra = (int.from_bytes(header[start : start + 2], "little") for start in (26, 28))
    return member.header_offset + 30 + name + extra + member.file_size // 2


def test_a_broken_checkpoint_is_refused_and_named(copied: Config, directory):
    path = directory.checkpoint
    content = bytearray(path.read_bytes())
    flipped = content.copy()
    flipped[middle_of_a_tensor(path)] ^= 255
    cases = (content[:-500], "is incomplete"), (flipped, "is .* corrupted"), (None, "is not a checkpoint of")
    for broken, message in cases:
        if broken is None:
            WholeCheckpoints().save_checkpoint({"weights": 1}, path)
        else:
            path.write_bytes(broken)
        for use in (lambda: train(copied), lambda: load_sweep(path)):
            with pytest.raises(ValueError, match=rf"last\.ckpt {message}"):
                use()
    path.write_bytes(content)
    checkpoint = torch.load(path, weights_only=True)
    del checkpoint["hyper_parameters"]["facts"]["signals"]
    torch.save(checkpoint, path)
    for use in (lambda: train(copied), lambda: load_sweep(path)):
        with pytest.raises(ValueError, match=r"of version 0\.2\.0 or earlier.*pass --resume false to start over"):
            use()
    assert directory.prepare(copied, resume=False)[1] is None


@pytest.mark.parametrize(("rank", "num_reads"), [(0, 1), (1, 0)])
def test_one_rank_compares_the_sums_of_a_checkpoint_once_per_change(rank, num_reads, copied, directory, monkeypatch):
    for name in ("_LARGE_BYTES", "_SETTLED_NS"):
        monkeypatch.setattr(facts, name, 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(directory.path / "cache"))
    monkeypatch.setattr(rank_zero_only, "rank", rank, raising=False)
    compared = []
    testzip = ZipFile.testzip
    monkeypatch.setattr(ZipFile, "testzip", lambda file: compared.append(file.filename) or testzip(file))
    names = {run_of(directory.checkpoint) for _ in range(2)}
    assert names == {directory.read()["run"]}
    assert len(compared) == num_reads

"""heads.dir: which run stands there, whatever was killed, changed, broken or full."""

import errno
import itertools
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from zipfile import ZipFile

import pytest

from heads.command import export, load_sweep, save_whole
from heads.model.head import AcceptanceHead
from heads.training.command import train
from heads.training.directory import RunDirectory
from heads.training.sweep import Sweep
from heads.training.trainer import WholeCheckpoints
from tests.data_gen.on_disk import in_a_child
from tests.toys.made_up import make_config

ONE = {"max_epochs": 1}


def changed(config, **heads):
    return replace(config, heads=replace(config.heads, **heads))


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
    [path] = export(old, head="fed-d0-w1", checkpoint=str(tmp_path / "old.ckpt"))
    assert AcceptanceHead.from_pretrained(path).provenance.metrics["auroc"] > 0


def test_a_full_disk_at_the_start_leaves_the_run_as_it_was(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = make_config(data_dir, tmp_path, trainer=ONE)
    train(config)
    before = (tmp_path / "run.json").read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        for resume in (True, False):
            with pytest.raises(ValueError, match="no space for"):
                RunDirectory(tmp_path).prepare(config, resume=resume)
        with pytest.raises(ValueError, match="no space for"):
            WholeCheckpoints().save_checkpoint({}, tmp_path / "last.ckpt")
    assert (tmp_path / "run.json").read_bytes() == before
    assert RunDirectory(tmp_path).prepare(config, resume=True)[1]


def test_a_resume_from_another_config_is_refused_and_named(data_dir: Path, tmp_path: Path):
    config = make_config(data_dir, tmp_path, trainer=ONE)
    directory = RunDirectory(tmp_path)
    assert directory.prepare(config, resume=True)[1] is None
    train(config)
    assert directory.prepare(changed(config, checkpoint_every_n_steps=7), resume=True)[1] == str(directory.checkpoint)
    other = changed(config, learning_rate=0.5)
    for different, key in (
        (other, r"heads\.learning_rate"),
        (replace(config, trainer=config.trainer | {"max_epochs": 2}), "max_epochs"),
    ):
        with pytest.raises(ValueError, match=key):
            directory.prepare(different, resume=True)
    assert directory.prepare(other, resume=False)[1] is None


def test_another_draft_is_named_by_the_setting_that_differs(data_dir: Path, tmp_path: Path):
    config = make_config(data_dir, tmp_path, trainer=ONE)
    train(config)
    moved = replace(config, pair=replace(config.pair, draft=replace(config.pair.draft, dtype="float64")))
    with pytest.raises(ValueError, match=r"pair\.draft\.dtype = 'auto', but this config has 'float64'"):
        RunDirectory(tmp_path).prepare(moved, resume=True)


def test_a_stop_by_hand_reaches_the_command_line(data_dir: Path, tmp_path: Path, monkeypatch):
    def stopped(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(Sweep, "training_step", stopped)
    with pytest.raises(KeyboardInterrupt):
        train(make_config(data_dir, tmp_path, trainer=ONE))


def test_a_run_without_a_new_setting_or_with_a_removed_one_is_resumed(data_dir: Path, tmp_path: Path):
    config = make_config(data_dir, tmp_path, trainer=ONE)
    directory = RunDirectory(tmp_path)
    directory.prepare(config, resume=True)
    written = directory.read()
    del written["config"]["heads"]["dropout"], written["config"]["pair"]["draft"]["quantization"]
    written["config"]["pair"]["target"]["extra_layers"] = 3
    (tmp_path / "run.json").write_text(json.dumps(written))
    WholeCheckpoints().save_checkpoint({"hyper_parameters": {"facts": {"run": written["run"]}}}, directory.checkpoint)
    assert directory.prepare(config, resume=True) == (written["run"], str(directory.checkpoint))
    (tmp_path / "run.json").write_text(json.dumps(written))
    with pytest.raises(ValueError, match=r"heads\.dropout = 0\.0, but this config has 0\.5"):
        directory.prepare(changed(config, dropout=0.5), resume=True)


def test_a_second_run_in_the_same_directory_is_refused(data_dir: Path, tmp_path: Path):
    config = make_config(data_dir, tmp_path, trainer=ONE)
    with RunDirectory(tmp_path).alone(), pytest.raises(ValueError, match="is in use by process"):
        train(config)
    train(config)


def middle_of_a_tensor(path: Path) -> int:
    """Offset of a byte that counts: between the members of a checkpoint lies padding, of which no sum is kept."""
    with ZipFile(path) as archive:
        member = max(archive.infolist(), key=lambda info: info.file_size)
    header = path.read_bytes()[member.header_offset :][:30]
    name, extra = (int.from_bytes(header[place : place + 2], "little") for place in (26, 28))
    return member.header_offset + 30 + name + extra + member.file_size // 2


@pytest.mark.parametrize("how", ["cut", "flipped", "other"])
def test_a_broken_checkpoint_is_refused_and_named(data_dir: Path, tmp_path: Path, how: str):
    config = make_config(data_dir, tmp_path, trainer=ONE)
    train(config)
    path = tmp_path / "last.ckpt"
    content = bytearray(path.read_bytes())
    if how == "cut":
        path.write_bytes(content[:-500])
    elif how == "flipped":
        content[middle_of_a_tensor(path)] ^= 255
        path.write_bytes(content)
    else:
        WholeCheckpoints().save_checkpoint({"weights": 1}, path)
    for use in (lambda: train(config), lambda: load_sweep(path)):
        with pytest.raises(ValueError, match=r"last\.ckpt (is incomplete|is corrupted|is not a checkpoint of)"):
            use()
    assert RunDirectory(tmp_path).prepare(config, resume=False)[1] is None


def test_an_export_that_fails_keeps_the_head_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = save_whole(AcceptanceHead(4, 1), tmp_path / "head")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(ValueError, match="no space for"):
            save_whole(AcceptanceHead(4, 2), path)
    assert AcceptanceHead.from_pretrained(path).depth == 1
    save_whole(AcceptanceHead(4, 2), path)
    assert AcceptanceHead.from_pretrained(path).depth == 2


@pytest.mark.parametrize("num_written", range(4))
def test_an_export_that_was_killed_while_it_wrote_is_made_again(tmp_path: Path, num_written: int):
    """Each file reaches the disk by an fsync of its own, and so does its name."""
    path, calls = tmp_path / "head", itertools.count()

    def killed(descriptor: int) -> None:
        if next(calls) == num_written:
            os._exit(9)

    def work() -> None:
        os.fsync = killed
        save_whole(AcceptanceHead(4, 1), path)

    assert os.waitstatus_to_exitcode(in_a_child(work)) == 9
    save_whole(AcceptanceHead(4, 2), path)
    assert AcceptanceHead.from_pretrained(path).depth == 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["head"]


def test_a_run_resumes_on_data_that_has_moved_and_on_no_other(data_dir: Path, tmp_path: Path):
    config = make_config(data_dir, tmp_path / "run", trainer=ONE)
    train(config)
    shutil.copytree(data_dir, tmp_path / "moved")
    moved = replace(config, data=replace(config.data, dir=str(tmp_path / "moved")))
    assert RunDirectory(tmp_path / "run").prepare(moved, resume=True)[1] is not None
    manifest = tmp_path / "moved" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"generator": "another"}))
    with pytest.raises(ValueError, match="trained on other data"):
        RunDirectory(tmp_path / "run").prepare(moved, resume=True)

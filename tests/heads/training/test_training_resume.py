"""A run that is interrupted, killed or continued by other processes ends in the heads of an uninterrupted one."""

import csv
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from configs.schema import Config
from heads.command import export
from heads.model.head import AcceptanceHead
from heads.training.command import train
from heads.training.trainer import WholeCheckpoints
from tests.cases import first_fast
from tests.data_gen.processes import descendants
from tests.toys.made_up import ROOT, SLURM, command, environment, make_config, train_by_command

EPOCHS = 40


def saved(run_dir: Path) -> dict[str, Any]:
    return torch.load(run_dir / "last.ckpt", weights_only=True)


def exported(config: Config) -> dict[str, str]:
    export(config, head="all")
    weights = Path(config.heads.dir, "exported").rglob("model.safetensors")
    return {path.parent.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in weights}


class StopAfter(pl.Callback):
    """Ctrl-C after so many batches; with `within`, in the middle of a step."""

    def __init__(self, batches: int, within: bool = False) -> None:
        self.batches = batches
        setattr(self, "on_before_backward" if within else "on_train_batch_end", self.count)

    def count(self, *_: Any) -> None:
        self.batches -= 1
        if self.batches == 0:
            raise KeyboardInterrupt


STOPS = [(StopAfter(3), 1, 8), (StopAfter(8), 1, 8), (StopAfter(11), 3, 8), (StopAfter(13, True), 1, 8)]
STOPS += [(StopAfter(batches), 3, 4) for batches in (4, 5, 6, 7, 12, 13)]


@pytest.mark.parametrize(("stop", "accumulate", "validate"), first_fast([(StopAfter(13), 1, 8), *STOPS], 1))
def test_an_interrupted_run_ends_in_the_very_weights_of_an_uninterrupted_one(
    data_dir: Path, tmp_path: Path, stop, accumulate: int, validate: int
):
    """8 batches an epoch, 3 epochs; stopped inside and at the end of an epoch, inside a forward, and inside an
    accumulated step, also where a validation came within one.
    """
    trainer = {"max_epochs": 3, "accumulate_grad_batches": accumulate, "val_check_interval": validate}
    kinds = {"timings": ("fed", "drawn"), "scalars": (False, True), "dropout": (0.0, 0.2)}  # and heads that are solved
    whole, broken = (
        make_config(data_dir, tmp_path / name, trainer=trainer, checkpoint_every_n_steps=1000, **kinds)
        for name in ("whole", "broken")
    )
    train(whole)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        train(replace(broken, trainer=broken.trainer | {"callbacks": [stop]}))
    train(broken)
    expected, resumed = (saved(tmp_path / name)["state_dict"] for name in ("whole", "broken"))
    torch.testing.assert_close(resumed, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("trainer", "position"),
    [({"max_epochs": 3}, "epoch 2 of 3"), ({"max_epochs": -1, "max_steps": 20}, "step 12 of 20")],
)
def test_heads_of_an_interrupted_training_say_where_it_stopped(data_dir, tmp_path, capsys, trainer, position):
    config = make_config(data_dir, tmp_path, trainer=trainer, checkpoint_every_n_steps=1000)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        train(replace(config, trainer=config.trainer | {"callbacks": [StopAfter(12)]}))
    with pytest.raises(ValueError, match="--head best needs val_metrics"):
        export(config, head="best")
    capsys.readouterr()
    [path] = export(config, head="fed-d2-w6")
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"warning: these heads are unfinished and were not measured: their training stopped in {position}"
    )
    assert AcceptanceHead.from_pretrained(path).provenance.training["stopped_in"] == position
    assert f"**Unfinished:** its training stopped in {position}." in (path / "README.md").read_text()
    earlier = shutil.copy(tmp_path / "last.ckpt", tmp_path / "earlier.ckpt")
    train(config)
    [path] = export(config, head="fed-d2-w6", force=True)
    finished = AcceptanceHead.from_pretrained(path).provenance
    assert "stopped_in" not in finished.training
    assert finished.metrics["auroc"] > 0
    assert "Unfinished" not in (path / "README.md").read_text()
    [path] = export(config, head="fed-d2-w6", checkpoint=str(earlier))
    unfinished = AcceptanceHead.from_pretrained(path).provenance
    assert (unfinished.metrics, unfinished.training["stopped_in"]) == ({}, position), (
        "metrics are those of other weights"
    )


@pytest.fixture(scope="module")
def whole(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    config = make_config(data_dir, tmp_path_factory.mktemp("whole"), trainer={"max_epochs": EPOCHS})
    train(config)
    return exported(config)


def start(config: Config, folder: Path, **variables: str) -> subprocess.Popen:
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    run = subprocess.Popen(command(config, folder), cwd=ROOT, env=environment() | variables, **silent)
    deadline = time.monotonic() + 120
    while not Path(config.heads.dir, "last.ckpt").is_file() and run.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "variables"),
    [(signal.SIGTERM, {}), (signal.SIGKILL, {}), (signal.SIGUSR1, SLURM), (signal.SIGTERM, SLURM)],
    ids=["SIGTERM", "SIGKILL", "SIGUSR1 under SLURM", "SIGTERM under SLURM"],
)
def test_a_run_that_got_a_signal_ends_in_the_very_heads_of_an_undisturbed_one(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole, kind, variables: dict[str, str]
):
    """320 steps; the signal comes at a random moment. SIGTERM and SIGUSR1 leave a checkpoint; after SIGKILL the run
    continues from the last one that was due. Under SLURM the same command is the requeued job.
    """
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    every = 5 if kind == signal.SIGKILL else 100_000
    config = make_config(data_dir, tmp_path / "run", trainer={"max_epochs": EPOCHS}, checkpoint_every_n_steps=every)
    run = start(config, tmp_path, **variables)
    time.sleep(random.uniform(0, 0.3))
    run.send_signal(kind)
    assert run.wait(timeout=120) == (-signal.SIGKILL if kind == signal.SIGKILL else 128 + signal.SIGTERM)
    step = saved(tmp_path / "run")["global_step"]
    assert 0 < step < 8 * EPOCHS, f"the signal came outside the run, at step {step}"
    [unfinished] = export(config, head="fed-d2-w6")
    position = AcceptanceHead.from_pretrained(unfinished).provenance.training["stopped_in"]
    assert re.fullmatch(rf"epoch \d+ of {EPOCHS}", position)
    train_by_command(config, tmp_path)
    assert exported(config) == whole
    assert not list(tmp_path.rglob("hpc_ckpt*"))


@pytest.mark.slow
@pytest.mark.parametrize("trainer", [{}, {"val_check_interval": 3}])
def test_wherever_it_is_killed_a_run_ends_in_the_very_heads(data_dir: Path, tmp_path: Path, monkeypatch, trainer):
    monkeypatch.setattr(
        "heads.training.command.report", lambda sweep, directory: sweep.state_dict() | {"history": sweep.history}
    )
    save, written = WholeCheckpoints.save_checkpoint, []

    def save_and_copy(self: WholeCheckpoints, checkpoint, path, storage_options=None) -> None:
        save(self, checkpoint, path, storage_options)
        written.append(Path(path).read_bytes())

    def run(name: str) -> dict:
        settings = {"max_epochs": 2, "limit_test_batches": 1} | trainer
        return train(make_config(data_dir, tmp_path / name, trainer=settings, checkpoint_every_n_steps=1))

    with monkeypatch.context() as patch:
        patch.setattr(WholeCheckpoints, "save_checkpoint", save_and_copy)
        expected = run("whole")
    assert len(written) >= 16, "one of each step"
    for index, checkpoint in enumerate(written):
        (tmp_path / str(index)).mkdir()
        (tmp_path / str(index) / "run.json").write_bytes((tmp_path / "whole" / "run.json").read_bytes())
        (tmp_path / str(index) / "last.ckpt").write_bytes(checkpoint)
        resumed = run(str(index))
        torch.testing.assert_close(resumed, expected, rtol=0, atol=0, equal_nan=True)


def check_close(run_dir: Path, whole_dir: Path) -> None:
    weights, expected = (saved(directory)["state_dict"] for directory in (run_dir, whole_dir))
    for name in (name for name in expected if name.startswith("stacks")):
        torch.testing.assert_close(weights[name], expected[name], atol=2e-4, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("resumed", [2, 1])
def test_two_processes_of_which_one_was_killed_resume_and_take_the_steps_of_one(data_dir, tmp_path, resumed):
    """gloo, 8 responses a batch: the same batches, so the same weights up to rounding; metrics over dev, each token
    once.
    """
    shared = {"timings": ("fed", "drawn"), "scalars": (True,), "learning_rate": 1e-3}
    one = make_config(data_dir, tmp_path / "one", **shared, trainer={"max_epochs": 10})
    trainer = {"max_epochs": 10, "devices": 2}
    two = make_config(data_dir, tmp_path / "two", **shared, trainer=trainer, checkpoint_every_n_steps=1)
    train(one)
    run = start(two, tmp_path)
    [second] = [pid for pid in descendants(run.pid) if "train.py" in Path(f"/proc/{pid}/cmdline").read_text()]
    os.kill(second, signal.SIGKILL)
    assert run.wait(timeout=60) != 0
    assert not (tmp_path / "two" / "val_metrics.json").exists()
    two = replace(two, trainer=two.trainer | {"devices": resumed})
    subprocess.run(command(two, tmp_path), cwd=ROOT, check=True, capture_output=True, env=environment())
    check_close(tmp_path / "two", tmp_path / "one")
    metrics = [json.loads((tmp_path / name / "val_metrics.json").read_text())["results"] for name in ("one", "two")]
    for split in ("dev", "train", "test"):
        for timing, labels in metrics[0][split]["labels"].items():
            assert metrics[1][split]["labels"][timing] == pytest.approx(labels, rel=1e-9), "no token is counted twice"
        for name, head in metrics[0][split]["heads"].items():
            assert metrics[1][split]["heads"][name]["calibrated_kl"] == pytest.approx(head["calibrated_kl"], abs=1e-4)


@pytest.mark.slow
def test_one_process_goes_on_in_two_and_ends_in_the_steps_of_one(data_dir: Path, tmp_path: Path):
    """gloo; stopped after five of 24 batches. Losses that are logged are those of whole batches."""
    trainer = {"max_epochs": 3, "logger": True, "log_every_n_steps": 1}
    whole, broken = (
        make_config(data_dir, tmp_path / name, trainer=trainer, learning_rate=1e-3) for name in ("whole", "broken")
    )
    train(whole)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        train(replace(broken, trainer=broken.trainer | {"callbacks": [StopAfter(5)]}))
    assert saved(tmp_path / "broken")["global_step"] == 5
    two = command(replace(broken, trainer=broken.trainer | {"devices": 2}), tmp_path)
    output = subprocess.run(two, cwd=ROOT, check=True, capture_output=True, text=True, env=environment())
    assert "training for 24 steps, 8 responses per batch, 4 on each of 2 processes" in output.stderr
    expected, resumed = saved(tmp_path / "whole"), saved(tmp_path / "broken")
    assert (resumed["global_step"], resumed["epoch"]) == (expected["global_step"], expected["epoch"]) == (24, 2)
    assert resumed["lr_schedulers"] == expected["lr_schedulers"]
    check_close(tmp_path / "broken", tmp_path / "whole")
    of_one, of_two = (losses(tmp_path / name / "logs" / "csv") for name in ("whole", "broken"))
    assert list(of_one) == list(range(24))
    assert sorted(of_two) == [step for step in of_one if step != 4], "the Ctrl-C came before that was logged"
    assert of_two == pytest.approx({step: of_one[step] for step in of_two}, rel=1e-3)


def losses(folder: Path) -> dict[int, float]:
    rows = [row for path in folder.glob("*/metrics.csv") for row in csv.DictReader(path.open())]
    return {int(row["step"]): float(row["train/loss"]) for row in rows if row["train/loss"]}

"""A process that is told to stop, or is killed, in the middle of a run: the next run ends in the very heads of an
uninterrupted one.
"""

import hashlib
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from heads.command import export
from heads.training.command import train
from heads.training.trainer import WholeCheckpoints
from tests.toys.made_up import ROOT, SLURM, command, environment, make_config, train_by_command

EPOCHS = 40


def exported(config) -> dict[str, str]:
    """sha256 of the weights of every exported head."""
    export(config, head="all")
    found = Path(config.heads.dir, "exported").rglob("model.safetensors")
    return {path.parent.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


@pytest.fixture(scope="module")
def whole(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The heads of a run that nobody disturbs."""
    config = make_config(data_dir, tmp_path_factory.mktemp("whole"), trainer={"max_epochs": EPOCHS})
    train(config)
    return exported(config)


def interrupt(config, folder: Path, kind: signal.Signals, variables: dict[str, str]) -> int:
    """Send a signal to a real `python train.py` at a random moment after its first checkpoint; the step it had saved
    last.
    """
    checkpoint = Path(config.heads.dir, "last.ckpt")
    run = subprocess.Popen(
        command(config, folder),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment() | variables,
    )
    deadline = time.monotonic() + 120
    while not checkpoint.is_file() and run.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(random.uniform(0, 0.3))
    run.send_signal(kind)
    assert run.wait(timeout=120) == (-signal.SIGKILL if kind == signal.SIGKILL else 128 + signal.SIGTERM)
    return int(torch.load(checkpoint, weights_only=True)["global_step"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "every", "variables"),
    [
        (signal.SIGTERM, 100_000, {}),
        (signal.SIGKILL, 5, {}),
        (signal.SIGUSR1, 100_000, SLURM),
        (signal.SIGTERM, 100_000, SLURM),
    ],
    ids=["SIGTERM", "SIGKILL", "SIGUSR1 under SLURM", "SIGTERM under SLURM"],
)
def test_a_run_that_got_a_signal_ends_in_the_very_heads_of_an_undisturbed_one(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole, kind, every: int, variables: dict[str, str]
):
    """320 steps. SIGTERM, and SIGUSR1, leave a checkpoint of their own; after SIGKILL the last one that was due is gone
    on from.

    Under SLURM the same command is the requeued job.
    """
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    config = make_config(data_dir, tmp_path / "run", trainer={"max_epochs": EPOCHS}, checkpoint_every_n_steps=every)
    step = interrupt(config, tmp_path, kind, variables)
    assert 0 < step < 8 * EPOCHS, f"the signal came outside the run, at step {step}"
    train_by_command(config, tmp_path)
    assert exported(config) == whole
    assert not list(tmp_path.rglob("hpc_ckpt*"))


@pytest.mark.slow
@pytest.mark.parametrize("trainer", [{}, {"val_check_interval": 3}])
def test_wherever_it_is_killed_a_run_ends_in_the_very_heads(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainer
):
    """Gone on from each checkpoint that a run writes, also from those beside a validation: none is left out, none
    counts twice.
    """
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
        found = run(str(index))
        assert [name for name in expected if not is_same(expected[name], found[name])] == [], (
            f"gone on from checkpoint {index}"
        )


def is_same(one: object, other: object) -> bool:
    return (
        torch.equal(one, other) if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) else one == other
    )


def test_a_checkpoint_that_could_not_be_written_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "last.ckpt"
    WholeCheckpoints().save_checkpoint({"step": 1}, path)

    def killed(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        WholeCheckpoints().save_checkpoint({"step": 2}, path)
    assert WholeCheckpoints().load_checkpoint(path, weights_only=True) == {"step": 1}

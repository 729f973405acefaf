"""Under SLURM a run has one kind of checkpoint, its own: Lightning's for requeued jobs are neither written nor read."""

import shutil
import signal
import threading
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.environments import LightningEnvironment, SLURMEnvironment

from heads.training.cluster import environments, stopped_by_sigusr1
from heads.training.command import train
from heads.training.trainer import make_trainer
from tests.toys.made_up import SLURM, make_config


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)


def saved(run_dir: Path) -> dict:
    return torch.load(run_dir / "last.ckpt", weights_only=True)


@pytest.mark.slow
@pytest.mark.usefixtures("slurm")
@pytest.mark.parametrize("resume", [True, False])
def test_a_requeue_checkpoint_of_lightning_is_never_gone_on_from(data_dir: Path, tmp_path: Path, capsys, resume: bool):
    """It is of a finished run with another learning rate; `test`, too, would load it in place of the weights just
    trained.
    """
    old = make_config(data_dir, tmp_path / "old", learning_rate=0.3)
    train(old)
    anew = make_config(data_dir, tmp_path / "new")
    expected = train(anew)["dev"]["heads"]
    (tmp_path / "run").mkdir()
    shutil.copy(tmp_path / "old" / "last.ckpt", tmp_path / "run" / "hpc_ckpt_1.ckpt")
    if not resume:
        shutil.copy(tmp_path / "old" / "last.ckpt", tmp_path / "run")
        shutil.copy(tmp_path / "old" / "run.json", tmp_path / "run")
    capsys.readouterr()
    found = train(make_config(data_dir, tmp_path / "run"), resume=resume)["dev"]["heads"]
    assert found == expected
    weights, others = saved(tmp_path / "run"), saved(tmp_path / "new")
    assert weights["history"] == others["history"]
    assert all(torch.equal(weights["state_dict"][name], value) for name, value in others["state_dict"].items())
    assert "hpc_ckpt_1.ckpt of Lightning's SLURM requeueing is not read" in capsys.readouterr().err


@pytest.mark.usefixtures("slurm")
def test_slurm_s_environment_requeues_nothing(data_dir: Path, tmp_path: Path):
    config = make_config(data_dir, tmp_path)
    chosen = make_trainer(config)._accelerator_connector.cluster_environment
    assert isinstance(chosen, SLURMEnvironment)
    assert not chosen.auto_requeue
    for given in (LightningEnvironment(), SLURMEnvironment(auto_requeue=False)):
        assert environments([given]) == [], "an environment that the YAML names stays"
    with pytest.raises(ValueError, match=r"SLURMEnvironment with auto_requeue.*auto_requeue: false"):
        make_trainer(make_config(data_dir, tmp_path, trainer={"plugins": [SLURMEnvironment()]}))


@pytest.mark.usefixtures("slurm")
def test_srun_with_tasks_that_lightning_cannot_place_is_one_line(
    monkeypatch: pytest.MonkeyPatch, data_dir: Path, tmp_path: Path
):
    monkeypatch.setenv("SLURM_NTASKS", "2")
    monkeypatch.delenv("SLURM_NTASKS_PER_NODE")
    with pytest.raises(ValueError, match=r"SLURM: .*--ntasks-per-node=2"):
        make_trainer(make_config(data_dir, tmp_path))


def test_outside_slurm_and_under_torchrun_lightning_chooses(monkeypatch: pytest.MonkeyPatch):
    assert environments([]) == []
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    assert len(environments([])) == 1
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    assert environments([]) == []


def test_sigusr1_is_a_sigterm_within_a_run_and_what_it_was_after_it():
    received: list[int] = []
    before = {kind: signal.getsignal(kind) for kind in (signal.SIGUSR1, signal.SIGTERM)}
    signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        with stopped_by_sigusr1():
            signal.raise_signal(signal.SIGUSR1)
        assert received == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGUSR1) == before[signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGTERM, before[signal.SIGTERM])


def test_a_run_in_a_thread_leaves_signals_alone():
    entered: list[bool] = []

    def work() -> None:
        with stopped_by_sigusr1():
            entered.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert entered == [True]


def test_a_trainer_elsewhere_finds_requeue_checkpoints_as_before(tmp_path: Path):
    """What is turned off is turned off in the run's own trainer alone."""
    (tmp_path / "hpc_ckpt_3.ckpt").touch()
    other = pl.Trainer(accelerator="cpu", logger=False, default_root_dir=tmp_path)
    assert str(other._checkpoint_connector._hpc_resume_path).endswith("hpc_ckpt_3.ckpt")

"""Under SLURM a run has one kind of checkpoint, its own: Lightning's for requeued jobs are not written."""

import signal
import threading
from pathlib import Path

import pytest
from pytorch_lightning.plugins.environments import LightningEnvironment, SLURMEnvironment

from heads.training.trainer import _environments as environments
from heads.training.trainer import make_trainer, stopped_by_sigusr1
from tests.toys.made_up import SLURM, make_config


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("slurm")
def test_slurm_s_environment_requeues_nothing(data_dir: Path, tmp_path: Path):
    config = make_config(data_dir, tmp_path)
    chosen = make_trainer(config)._accelerator_connector.cluster_environment
    assert isinstance(chosen, SLURMEnvironment)
    assert not chosen.auto_requeue
    for given in (LightningEnvironment(), SLURMEnvironment(auto_requeue=False)):
        assert environments([given]) == [], "an environment that the YAML names stays"


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

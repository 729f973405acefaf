"""`all` with several processes: Lightning's own, torchrun's and srun's. All train together, the first one goes on, and
the verdict is that of one process's data.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.toys.made_up import ROOT

SETTINGS = {
    "data.num_train": 24,
    "data.num_dev": 24,
    "data.num_test": 24,
    "data.max_new_tokens": 32,
    "heads.depths": [0, 1],
    "heads.reject_weights": [1],
    "heads.specdec": "false",
    "heads.timings": ["drawn"],
    "heads.batch_size": 8,
    "trainer.max_epochs": 1,
    "trainer.accelerator": "cpu",
    "trainer.devices": 2,
    "decode.num_dev": 12,
    "decode.num_test": 12,
    "decode.max_new_tokens": 24,
    "decode.t_draft_s": 0.001,
    "decode.t_target_s": 0.005,
    "decode.stop_share": "size",
}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "--no-python"]
SCRIPT = str(Path(sys.executable).with_name("acceptance-heads"))


def started(folder: Path, *launcher: str, **variables: str) -> subprocess.Popen[str]:
    """One process of `all`, or a launcher with its processes."""
    places = {f"{section}.dir": folder / section for section in ("data", "heads", "decode")}
    flags = [f"--{name}={value}" for name, value in (SETTINGS | places).items()]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | variables
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = [*launcher, SCRIPT, "all", "--config", "tiny", *flags]
    return subprocess.Popen(command, env=environment, cwd=ROOT, **pipes)


def tasks_of_srun(folder: Path) -> list[subprocess.Popen[str]]:
    """Both tasks of a job."""
    names = ("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_STEP_NUM_TASKS")
    job = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "all", "SLURM_NODEID": "0", "SLURM_NODELIST": "localhost"}
    job |= dict.fromkeys(names, "2") | {"MASTER_ADDR": "127.0.0.1"}
    return [started(folder, **job, SLURM_PROCID=rank, SLURM_LOCALID=rank) for rank in ("0", "1")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "start",
    [lambda folder: [started(folder)], lambda folder: [started(folder, *TORCHRUN)], tasks_of_srun],
    ids=["Lightning", "torchrun", "srun"],
)
def test_all_with_two_processes_ends_with_one_verdict(tmp_path: Path, start):
    processes = start(tmp_path)
    printed = [process.communicate(timeout=500)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(printed)
    together = "\n".join(printed)
    assert (together.count("== 2 of 5: train"), together.count("== 5 of 5: tune")) == (2, 1)
    assert "sync_dist" not in together
    assert "bucket view strides" not in together
    verdict = json.loads((tmp_path / "decode" / "verdict.json").read_text())
    assert verdict["sentence"] in " ".join(printed[0].replace("\n", " ").split())

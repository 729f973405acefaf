"""The recipes of docs/several-machines.md run as written, on the toy pair; absent launchers set variables."""

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from configs.schema import Config
from tests.data_gen.on_disk import files_of

ROOT = Path(__file__, "../../../..").resolve()
PAGE = (ROOT / "docs" / "several-machines.md").read_text()
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for RANK in 0 1 2; do SLURM_PROCID=$RANK SLURM_LOCALID=$RANK SLURM_STEP_NUM_TASKS=3 "$@" & done; wait
"""
FRONT = """#!/bin/bash
exec python -c 'from configs.front import main; main()' "$@"
"""


def recipe(name: str) -> str:
    """The block of the page that begins with `# recipe: name`."""
    [block] = re.findall(rf"^```\w+\n((?:#![^\n]*\n)?# recipe: {name}\n.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return block


def run_in(folder: Path, script: str, **environment: str) -> None:
    """Run a recipe where `experiment.yaml` is, with the commands that the folder `bin` has."""
    path = f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    settings = {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    how = {"cwd": folder, "env": os.environ | settings, "capture_output": True, "text": True, "check": False}
    done = subprocess.run(["bash", "-euc", script], **how)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture
def experiment(made: Config, tmp_path: Path) -> Path:
    """A folder with experiment.yaml, the toy run into `many`; the same run by one process is in data.dir."""
    data = asdict(made.data) | {"dir": "many", "features": ["fed", "drawn"]}
    content = json.dumps({"pair": asdict(made.pair), "data": data})  # JSON is YAML
    (tmp_path / "experiment.yaml").write_text(content)
    (tmp_path / "bin").mkdir()
    for name, text in {"srun": SRUN, "acceptance-heads": FRONT}.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes"),
    [("one node", {"N=8": "N=2"}), ("torchrun", {"--nproc-per-node 8": "--nproc-per-node 2"}), ("slurm", {})],
)
def test_a_recipe_of_several_processes_writes_the_bytes_of_one(experiment, toy_config, name, changes):
    script = recipe(name)
    for written, here in changes.items():
        assert written in script
        script = script.replace(written, here)
    if name == "torchrun":
        script = script.replace("torchrun", f"{sys.executable} -m torch.distributed.run")
    run_in(experiment, script)
    assert files_of(experiment / "many") == files_of(toy_config.data.dir)


@pytest.mark.slow
def test_the_pods_of_the_indexed_job_write_the_bytes_of_one(experiment, toy_config):
    """Each runs the container's own command with its index, as Kubernetes hands it over."""
    job = yaml.safe_load(recipe("kubernetes"))
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert (job["apiVersion"], job["kind"], spec["completionMode"]) == ("batch/v1", "Job", "Indexed")
    assert pod["restartPolicy"] in ("OnFailure", "Never"), "a Job takes no other"
    mounted = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    command = pod["containers"][0]["command"]
    assert f"--world_size {spec['completions']}" in command[-1]
    for index in range(3):
        script = command[-1].replace(f"--world_size {spec['completions']}", "--world_size 3")
        run_in(experiment, script, JOB_COMPLETION_INDEX=str(index))
    assert files_of(experiment / "many") == files_of(toy_config.data.dir)


def test_the_stages_of_the_servers_recipe_are_all_there_are_and_in_order():
    """The server itself is started by `benchmarks`; here the page's order is held to the stages of a run."""
    script = recipe("servers")
    stages = re.findall(r"--stages (\w+)", script) + re.findall(r"for STAGE in ([\w ]+);", script)[0].split()
    assert stages == ["respond", "draft", "target"]
    assert script.index("--stages respond") < script.index("kill $SERVER") < script.index("for STAGE")
    checked = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr

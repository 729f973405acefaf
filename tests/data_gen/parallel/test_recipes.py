"""Several processes by launchers: the recipes of docs/several-machines.md run as written, on the toy pair (absent
launchers set variables); sliced models on two processes of gloo give the logits of the whole, and the rows of one.
"""

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from safetensors.torch import load_file

from configs.schema import Config, ModelSource
from data_gen.pipeline.command import make
from tests.data_gen.on_disk import files_of, with_data

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


def launch(argv: list[str], folder: Path, **environment: str) -> str:
    """What a command prints that runs to its end in a folder."""
    settings = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    how = {"cwd": folder, "env": os.environ | settings, "capture_output": True, "text": True, "check": False}
    done = subprocess.run(argv, **how, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def run_in(folder: Path, script: str, **environment: str) -> None:
    """Run a recipe where `experiment.yaml` is, with the commands that the folder `bin` has."""
    path = f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    launch(["bash", "-euc", script], folder, PATH=path, **environment)


def on_two(*argv: str | Path) -> str:
    """What a command prints that two processes run to its end."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    return launch([*torchrun, *map(str, argv)], ROOT)


@pytest.fixture
def experiment(made: Config, tmp_path: Path) -> Path:
    """A folder with experiment.yaml, the toy run into `many`; the same run by one process is in data.dir."""
    data = asdict(made.data) | {"dir": "many"}
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


TINY = ROOT / "checkpoints" / "tiny"
OF_TARGET = {"acceptance_prob", "log_p", "acceptance_rate", "cross_entropy", "target_prob"}
"""Columns that the target's forwards decide."""
LOGITS = """
import torch
from configs.schema import ModelSource
from lm import load_model
from lm.forwards import hidden_states, logits_of
rows = [[5, 6, 7, 8, 9, 10, 11], [12, 13, 14, 15]]
def numbers(**settings):
    model = load_model(ModelSource(path=PATH, dtype="float32", **settings))
    states = hidden_states(model, rows, [0, 0])
    held = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    return states, logits_of(model, states, 1000), sum(p.numel() for p in held)
sliced, whole = numbers(tp_plan="auto"), numbers()
assert 2 * sliced[2] < 1.5 * whole[2], (sliced[2], whole[2])
for ours, theirs in zip(sliced[:2], whole[:2]):
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
"""


@pytest.mark.slow
def test_a_sliced_model_gives_the_logits_of_the_whole_one(tmp_path: Path):
    script = tmp_path / "logits.py"
    script.write_text(f"PATH = {str(TINY / 'target')!r}\n{LOGITS}")
    on_two(script)


def yaml_of(config: Config, folder: Path) -> Path:
    """A YAML of the pair, its target sliced, and of the data of a config, in a directory of its own."""
    heads = {"timings": config.heads.timings, "specdec": config.heads.specdec}
    values = json.loads(json.dumps({"pair": asdict(config.pair), "data": asdict(config.data), "heads": heads}))
    values["pair"]["target"]["tp_plan"], values["data"]["dir"] = "auto", str(folder / "sliced")
    path = folder / "sliced.yaml"
    path.write_text(json.dumps(values))
    return path


def columns_of(directory: Path) -> dict[str, Any]:
    """File and column -> values, of every shard."""
    read = {".safetensors": load_file, ".parquet": lambda path: pq.read_table(path).to_pydict()}
    paths = [path for path in sorted(directory.rglob("*")) if path.suffix in read]
    columns = {path.relative_to(directory): read[path.suffix](path) for path in paths}
    return {f"{path} {name}": values for path, table in columns.items() for name, values in table.items()}


def check_same(ours: Path, theirs: Path) -> None:
    """Fail unless all but what the sliced model computes is equal to the bit, and that to a unit of half precision."""
    mine, other = columns_of(ours), columns_of(theirs)
    assert len(other) > 20
    assert mine.keys() == other.keys()
    for name, values in other.items():
        if name.rpartition(" ")[2] in OF_TARGET and not all(value is None for value in values):
            rows, others = ([torch.as_tensor(row) for row in column[name]] for column in (mine, other))
            torch.testing.assert_close(rows, others, rtol=2**-9, atol=2**-10)  # rows keep half precision
        elif isinstance(values, torch.Tensor):
            assert torch.equal(mine[name], values), name
        else:
            assert mine[name] == values, name


@pytest.fixture
def config(toy_config: Config) -> Config:
    """The toy's prompts, answered by the embedded pair, whose heads two processes can share."""
    sources = {name: ModelSource(path=str(TINY / name), dtype="float32") for name in ("target", "draft")}
    return replace(toy_config, pair=replace(toy_config.pair, **sources))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["together", "sequential"])
def test_two_slices_make_the_rows_of_one_process(config: Config, tmp_path: Path, mode: str):
    whole = with_data(config, mode=mode)
    make(whole)
    yaml = yaml_of(whole, tmp_path)
    if mode == "sequential":  # in two runs, the second of which goes on
        on_two("-m", "data_gen", "--config", yaml, "--stages", "respond")
    assert on_two("-m", "data_gen", "--config", yaml).count("next: acceptance-heads train") == 1
    check_same(tmp_path / "sliced", Path(whole.data.dir))


@pytest.mark.slow
def test_replicas_of_slices_share_the_shards_by_their_flags(config: Config, tmp_path: Path):
    make(config)
    yaml = yaml_of(config, tmp_path)
    for rank in ("1", "0"):
        on_two("-m", "data_gen", "--config", yaml, "--rank", rank, "--world_size", "2")
    check_same(tmp_path / "sliced", Path(config.data.dir))

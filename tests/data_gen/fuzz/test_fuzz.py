"""Broken input: every boundary reads it, or refuses it in one clear line that names the file or the setting."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from pytorch_lightning import Trainer

from configs.command import run
from configs.schema import Config
from data_gen.pipeline.command import make
from data_gen.pipeline.plan import plan
from evaluation.traces.recording import trace
from heads.training.command import train
from tests.data_gen.faults.stages import Child, at, experiment
from tests.data_gen.fuzz.boundaries import TEXTS, Boundary, files, made, texts
from tests.data_gen.fuzz.breaking import BROKEN, Draw

_MAX_LINE = 1500
_FILES = ["rows", "sidecar of rows", "features", "labels", "sidecar of features", "manifest", "costs", "checkpoint"]
_FILES += [f"{part} of {whole}" for part in ("config", "weights") for whole in ("head", "official", "draft")]
_FILES += ["tokenizer of draft"]


def tried(read: Callable[[], object], name: str) -> str:
    """ "read" or "refused"; every other end fails."""
    try:
        read()
        return "read"
    except (ValueError, OSError) as error:
        line = " ".join(str(error).split())
        assert 0 < len(line) <= _MAX_LINE, f"a line of {len(line)} characters"
        assert name in line, f"it does not name {name}: {line[:300]}"
        return "refused"


def broken(num: int, case: Callable[[Draw], str]) -> Counter[str]:
    """What came of `num` seeded cases."""
    outcomes: Counter[str] = Counter()
    silent = list(HealthCheck)

    @seed(num)
    @settings(max_examples=num, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=silent)
    @given(st.data())
    def cases(data: st.DataObject) -> None:
        outcomes[case(data.draw)] += 1

    cases()
    return outcomes


def broken_file(boundary: Boundary, draw: Draw) -> str:
    intact = boundary.path.read_bytes()
    boundary.path.write_bytes(BROKEN[boundary.kind](intact, draw))
    try:
        return tried(boundary.read, boundary.name)
    finally:
        boundary.path.write_bytes(intact)


@pytest.mark.parametrize("name", TEXTS)
def test_broken_texts_are_refused_by_name(toy_config, tmp_path, name: str):
    boundary = texts(tmp_path, toy_config)[name]
    assert broken(60, lambda draw: broken_file(boundary, draw))["refused"] > 8


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> dict[str, Boundary]:
    folder = tmp_path_factory.mktemp("fuzz")
    return files(folder, made(experiment(folder), folder))


@pytest.mark.slow
@pytest.mark.parametrize("name", _FILES)
def test_broken_files_are_refused_by_name(stored, name: str):
    assert stored.keys() == set(_FILES)
    outcomes = broken(40, lambda draw: broken_file(stored[name], draw))
    assert outcomes["refused"] > 8


_BAD_SETTINGS = """
make data.batch_size=0 data.rows_per_shard=1000000000 data.max_new_tokens=100000000 data.chunk_mb=0 data.num_train=-1
make data.max_prompt_tokens=1 data.num_train=1000000000000000000 data.mixes=0 data.template=none data.template=llama2
make data.prompts=/dev/null data.prompts=nothing.jsonl data.source=file data.source=server data.features=[]
make data.features=[fed,fed] data.split_weights=[0,0,0] data.split_weights=[1] data.dir=/dev/null/x data.dir=/proc/x
make data.engine=slurm pair.num_threads=-1 pair.target.path=/ pair.target.path=/no/such pair.draft.device_map=cuda:7
make pair.draft.device_map={x:1} pair.sampling.top_k=0 pair.sampling.top_k=1000000000000
make pair.sampling.top_p=2 pair.sampling.top_p=.nan pair.sampling.temperature=-1 pair.sampling.temperature=.inf
train heads.batch_size=0 heads.batch_size=1000000000 heads.depths=[] heads.depths=[-1] heads.depths=[0,0]
train heads.reject_weights=[0] heads.reject_weights=[.nan] heads.reject_weights=[1e300] heads.learning_rate=.nan
train heads.num_train=1000000 heads.dir=/dev/null heads.scalars=[[x]] heads.scalars=[] trainer.devices=99
train trainer.devices=x trainer.accelerator=cuda trainer.accumulate_grad_batches=0 trainer.limit_test_batches=2.5
train trainer.limit_train_batches=0.0001 trainer.limit_val_batches=0 trainer.precision=x trainer.precision=16-true
train trainer.max_epochs=-7 trainer.max_steps=0 trainer.val_check_interval=1000000000 trainer.max_time=x
train trainer.check_val_every_n_epoch=0 trainer.strategy=x trainer.gradient_clip_val=.nan
trace decode.max_draft_length=-1 decode.max_new_tokens=0 decode.num_dev=-1 decode.prompts_per_shard=0
trace decode.heads=[/no/such] decode.dir=/dev/null
"""
SETTINGS: dict[str, list[str]] = {"make": [], "train": [], "trace": []}
for name, *bad_settings in map(str.split, _BAD_SETTINGS.strip().splitlines()):
    SETTINGS[name] += bad_settings
SETTINGS["plan"] = SETTINGS["make"][::3]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Config:
    folder = tmp_path_factory.mktemp("settings")
    return made(experiment(folder), folder)


@pytest.mark.slow
@pytest.mark.parametrize("command", SETTINGS)
def test_a_command_with_one_bad_setting_runs_or_is_refused_in_one_line(prepared, tmp_path: Path, command: str):
    commands = {"make": make, "plan": plan, "train": train, "trace": trace}
    failed, outcomes = {}, Counter[int]()
    for number, setting in enumerate(SETTINGS[command]):
        fresh = at(prepared, tmp_path / str(number))  # nothing is there yet
        config = asdict(fresh) | ({"data": asdict(prepared.data)} if command in ("train", "trace") else {})
        path = tmp_path / "settings.json"
        path.write_text(json.dumps(config | {"trainer": {**prepared.trainer, "max_epochs": 1}}))
        argv = [command, "--config", str(path), f"--{setting}"]
        child = Child(lambda argv=argv: run(commands, argv=argv, trainer=Trainer if argv[0] == "train" else None))
        status = child.wait()
        outcomes[status] += 1
        if status and not (status == 2 and child.has_one_clear_line()):
            failed[setting] = (status, child.said[-300:])
    assert not failed, "\n".join(map(str, failed.items()))
    assert outcomes[2] > len(SETTINGS[command]) / 3, "few are refused: is it the setting that is tried?"

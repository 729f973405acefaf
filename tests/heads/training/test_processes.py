"""How many processes train decides how fast a run is, and not what it is: batches, steps and schedule are those of one
process.
"""

import csv
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from configs.command import config_of, parser_for
from configs.schema import Config
from heads.training.command import build, train
from heads.training.directory import RunDirectory
from heads.training.trainer import make_trainer, num_optimizer_steps, trainer_arguments, training_plan
from tests.toys.made_up import ROOT, command, environment, make_config, train_by_command

YAMLS = sorted((ROOT / "configs").glob("*.yaml"))


class StopAfterFive(pl.Callback):
    """Ctrl-C after five batches."""

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 4:
            raise KeyboardInterrupt


def saved(run_dir: Path) -> dict[str, Any]:
    return torch.load(run_dir / "last.ckpt", weights_only=True)


def run(config: Config, folder: Path) -> str:
    """Train in a process of its own, which starts the others; what it says on stderr."""
    return subprocess.run(
        command(config, folder),
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        env=environment(Path(__file__).parent),
    ).stderr


def by_name(callback: type[pl.Callback], **arguments: str) -> dict[str, Any]:
    """A callback, as a YAML names it."""
    return {"class_path": f"{callback.__module__}.{callback.__name__}", "init_args": arguments}


@pytest.mark.parametrize("devices", [1, 2, 8, "2"])
def test_the_schedule_is_that_of_one_process(data_dir: Path, tmp_path: Path, devices: int | str):
    """64 responses in batches of 8, twice."""
    config = make_config(data_dir, tmp_path, trainer={"devices": devices})
    trainer = make_trainer(config)
    trainer.datamodule = data = build(config)[1]
    data.trainer = trainer
    assert num_optimizer_steps(trainer) == 16
    line = training_plan(trainer, config.heads.batch_size)
    if int(devices) == 1:
        assert line == "training for 16 steps, 8 responses per batch"
    else:
        assert (
            line == f"training for 16 steps, 8 responses per batch, {8 // int(devices)} on each of {devices} processes"
        )


def test_a_batch_that_processes_cannot_share_equally_is_refused(
    data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture
):
    with pytest.raises(SystemExit, match="2"):
        train_by_command(make_config(data_dir, tmp_path / "run"), tmp_path, "--trainer.devices", "3")
    assert (
        "error: heads.batch_size is 8, but 3 processes (trainer.devices x trainer.num_nodes)" in capsys.readouterr().err
    )
    with pytest.raises(ValueError, match=r"heads.batch_size is 8, but 6 processes .*use a multiple of 6"):
        make_trainer(make_config(data_dir, tmp_path, trainer={"devices": 3, "num_nodes": 2, "strategy": "ddp"}))


@pytest.mark.parametrize("path", YAMLS, ids=lambda path: path.stem)
def test_an_experiment_takes_one_device_unless_it_says_more(path: Path):
    parser = parser_for(train, trainer=pl.Trainer)
    config = config_of(parser, parser.parse_args(["--config", str(path)]))
    assert trainer_arguments(config)["devices"] == 1
    assert trainer_arguments(replace(config, trainer={}))["devices"] == 1
    config = config_of(parser, parser.parse_args(["--config", str(path), "--trainer.devices", "auto"]))
    assert trainer_arguments(config)["devices"] == "auto"


def test_a_resume_on_another_number_of_processes_goes_on_unless_dropout_depends_on_it(data_dir: Path, tmp_path: Path):
    """With `auto`, too: it is the number that is recorded. Config and folder are those of a run; its checkpoint is
    there.
    """
    for rate in (0.0, 0.1):
        config = make_config(data_dir, tmp_path / str(rate), trainer={"max_epochs": 1, "devices": "auto"}, dropout=rate)
        train(config)
        directory = RunDirectory(tmp_path / str(rate))
        assert directory.read()["processes"] == 1
        assert directory.prepare(config, resume=True, processes=1)[1]
        if rate:
            with pytest.raises(
                ValueError, match=r"a run of 1 processes, but this one has 8, and heads.dropout 0.1 .*--resume false"
            ):
                directory.prepare(config, resume=True, processes=8)
            assert directory.read()["processes"] == 1, "what was refused has written nothing"
        else:
            eight = replace(config, trainer=config.trainer | {"devices": 8, "num_nodes": 1})
            assert directory.prepare(eight, resume=True, processes=8)[1]
            assert directory.read()["processes"] == 8


@pytest.mark.slow
def test_one_process_goes_on_in_two_and_ends_in_the_steps_of_one(data_dir: Path, tmp_path: Path):
    """gloo; stopped after five of 24 batches. Losses that are logged are those of whole batches."""
    trainer = {"max_epochs": 3, "logger": True, "log_every_n_steps": 1}
    whole = make_config(data_dir, tmp_path / "whole", trainer=trainer, learning_rate=1e-3)
    train(whole)
    broken = make_config(data_dir, tmp_path / "broken", trainer=trainer, learning_rate=1e-3)
    with pytest.raises(SystemExit):
        train_by_command(replace(broken, trainer=broken.trainer | {"callbacks": [by_name(StopAfterFive)]}), tmp_path)
    assert saved(tmp_path / "broken")["global_step"] == 5
    said = run(replace(broken, trainer=broken.trainer | {"devices": 2}), tmp_path)
    assert "training for 24 steps, 8 responses per batch, 4 on each of 2 processes" in said
    expected, found = saved(tmp_path / "whole"), saved(tmp_path / "broken")
    assert (found["global_step"], found["epoch"]) == (expected["global_step"], expected["epoch"]) == (24, 2)
    assert found["lr_schedulers"] == expected["lr_schedulers"]
    for name, value in expected["state_dict"].items():
        if name.startswith("stacks"):
            torch.testing.assert_close(found["state_dict"][name], value, atol=2e-4, rtol=1e-3)
    one, two = (losses(tmp_path / name / "logs" / "csv") for name in ("whole", "broken"))
    assert list(one) == list(range(24))
    assert sorted(two) == [step for step in one if step != 4], "the Ctrl-C came before that was logged"
    assert two == pytest.approx({step: one[step] for step in two}, rel=1e-3)


def losses(folder: Path) -> dict[int, float]:
    """Step -> train/loss, over all versions of a CSV log."""
    rows = [row for path in folder.glob("*/metrics.csv") for row in csv.DictReader(path.open())]
    return {int(row["step"]): float(row["train/loss"]) for row in rows if row["train/loss"]}

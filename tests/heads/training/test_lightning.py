"""Lightning as its users expect it: the Trainer does what the `trainer` section, the command line and SLURM say."""

import re
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.environments import LightningEnvironment, SLURMEnvironment

from configs.command import config_of, parser_for
from configs.schema import Config
from heads.command import load_sweep
from heads.training import trainer as trainer_module
from heads.training.command import build, train
from heads.training.progress import StepsBar, num_optimizer_steps, training_plan
from heads.training.trainer import make_trainer, stopped_by_sigusr1, trainer_arguments
from tests.toys.made_up import HIDDEN, ROOT, SLURM, make_config, train_by_command, write_yaml

_BARS = {
    (): True,
    ("--trainer.enable_progress_bar=true",): False,
    ("--trainer.enable_progress_bar=false",): False,
    ("--trainer.barebones=true",): False,
    ("--trainer.callbacks=TQDMProgressBar",): False,
}
"""Flags -> whether the project's bar shows the steps."""

parser = cache(lambda: parser_for(train, trainer=pl.Trainer))


def parsed(path: Path, *flags: str) -> Config:
    return config_of(parser(), parser().parse_args(["--config", str(path), *flags]))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
@pytest.mark.filterwarnings("ignore:.*AMP with fp16 is not supported on CPU")
def test_mixed_precision_trains_heads_close_to_those_of_float32(data_dir: Path, tmp_path: Path, precision: str):
    """Without a GPU Lightning turns 16-mixed into bf16-mixed, and says so."""
    train_by_command(make_config(data_dir, tmp_path / "32"), tmp_path)
    train_by_command(make_config(data_dir, tmp_path / "mixed"), tmp_path, "--trainer.precision", precision)
    hidden, sweeps = torch.randn(200, HIDDEN), [load_sweep(tmp_path / name / "last.ckpt") for name in ("mixed", "32")]
    with torch.no_grad():
        probs = [torch.cat([stack(hidden) for stack in sweep.by_shape]).float().sigmoid() for sweep in sweeps]
    difference = (probs[0] - probs[1]).abs()
    assert 0 < float(difference.max()) < 0.1
    assert float(difference.mean()) < 0.01
    stored = sweeps[0].state_dict()
    assert all(value.dtype == torch.float32 for name, value in stored.items() if name.startswith("stacks"))


@pytest.mark.parametrize(("trainer", "is_used"), [({}, True), ({"precision": "32-true"}, False)])
def test_training_steps_alone_may_use_tf32_and_a_stated_precision_keeps_them_from_it(
    trainer: dict[str, Any], is_used: bool, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    steps = []

    def recorded(device: torch.device) -> nullcontext[None]:
        steps.append(device.type)
        return nullcontext()

    monkeypatch.setattr("heads.training.sweep.tf32_products", recorded)
    train(make_config(data_dir, tmp_path, depths=(1,), trainer=trainer | {"max_steps": 2}))
    assert steps == (["cpu"] * 2 * len(load_sweep(tmp_path / "last.ckpt").trained) if is_used else [])


@pytest.mark.slow
def test_early_stopping_from_the_yaml_stops_the_run_and_keeps_the_best_weights(data_dir: Path, tmp_path: Path):
    """A learning rate far too high: dev gets worse from early on."""
    stopping = {"monitor": "dev/calibrated_kl", "patience": 2}
    callback = {"class_path": "pytorch_lightning.callbacks.EarlyStopping", "init_args": stopping}
    trainer = {"max_epochs": 30, "callbacks": [callback]}
    train_by_command(make_config(data_dir, tmp_path / "run", learning_rate=0.5, trainer=trainer), tmp_path)
    means = [sum(entry["calibrated_kl"]) for entry in load_sweep(tmp_path / "run" / "last.ckpt").history]
    assert len(means) < 30
    assert min(means[-2:]) >= min(means[:-2]), "stopped after two epochs without a better one"


def test_a_log_shows_the_steps_of_the_whole_run_and_the_kl_on_dev(data_dir: Path, tmp_path: Path, capsys):
    train(make_config(data_dir, tmp_path / "run", depths=(1,), trainer={"max_epochs": 2, "enable_progress_bar": None}))
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("train: ")]
    first, last = (re.search(r"(\d+)/(\d+) steps", lines[number]) for number in (0, -1))
    assert (first[1], last[1]) == ("0", last[2])
    assert re.search(r"KL on dev \d+% of the draft's own signal\]$", lines[-1])


def test_trainer_flags_reach_the_trainer_and_shipped_experiments_take_one_device(data_dir: Path, tmp_path: Path):
    path = write_yaml(make_config(data_dir, tmp_path / "run"), tmp_path)
    stopping = ("--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=dev/calibrated_kl")
    callbacks = trainer_arguments(parsed(path, *stopping, "--trainer.callbacks.patience=7"))["callbacks"]
    assert [callback.patience for callback in callbacks if isinstance(callback, pl.callbacks.EarlyStopping)] == [7]
    assert sum(isinstance(callback, pl.callbacks.Checkpoint) for callback in callbacks) == 2
    for flags, has_own_bar in _BARS.items():
        arguments = trainer_arguments(parsed(path, "--trainer.enable_progress_bar=null", *flags))
        assert (StepsBar in map(type, arguments["callbacks"])) == has_own_bar, flags
    flags = ("--trainer.num_nodes=3", "--trainer.devices=2", "--trainer.strategy=ddp")
    trainer = pl.Trainer(**trainer_arguments(parsed(path, *flags, "--trainer.gradient_clip_val=2.5")))
    assert (trainer.num_nodes, trainer.num_devices, trainer.world_size) == (3, 2, 6)
    assert trainer.gradient_clip_val == 2.5
    assert isinstance(trainer.strategy, pl.strategies.DDPStrategy)
    for shipped in (parsed(path) for path in sorted((ROOT / "configs").glob("*.yaml"))):
        assert trainer_arguments(shipped)["devices"] == trainer_arguments(replace(shipped, trainer={}))["devices"] == 1
    assert trainer_arguments(parsed(path, "--trainer.devices", "auto"))["devices"] == "auto"


def test_gradients_are_clipped_per_head_and_in_float16_after_the_scaler_has_unscaled_them(data_dir, tmp_path):
    """What Lightning sets up for 16-mixed on a GPU, here on the CPU: autocast to float16, and a scale of 65,536. At the
    first step Adam's first moment is a tenth of the gradient that it was given.
    """
    precision = pl.plugins.MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    norms = []
    for changes in ({}, {"gradient_clip_val": 0.001}, {"gradient_clip_val": 0.001, "plugins": [precision]}):
        run_dir = tmp_path / str(len(norms))
        train(make_config(data_dir, run_dir, depths=(2,), trainer={"max_steps": 1} | changes))
        state = torch.load(run_dir / "last.ckpt", weights_only=True)["optimizer_states"][0]["state"]
        norms.append(10 * torch.stack([each["exp_avg"].flatten(1).norm(dim=1) for each in state.values()]).norm(dim=0))
    assert (norms[0] > 0.001).all()
    for clipped in norms[1:]:
        torch.testing.assert_close(clipped, torch.full((2,), 0.001), rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--trainer.precision", "bf16-true"], r"trainer.precision is bf16-true.* use bf16-mixed"),
        (["--trainer.accelerator", "gpu"], r"trainer: No supported gpu backend"),
        (["--trainer.devices", "0"], r"trainer: .*devices='0'"),
        (["--trainer.devices", "3"], r"heads.batch_size is 8, but 3 processes .*use a multiple of 3"),
        (["--trainer.max_epochs", "-1"], r"the cosine schedule needs an end"),
    ],
)
def test_a_trainer_that_cannot_be_is_one_line(data_dir: Path, tmp_path: Path, capsys, flags: list[str], complaint: str):
    if "gpu" in flags and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit, match="2"):
        train_by_command(make_config(data_dir, tmp_path / "run"), tmp_path, *flags)
    assert re.search(f"^error: .*{complaint}", capsys.readouterr().err, re.MULTILINE)


@pytest.mark.parametrize("strategy", ["ddp_spawn", "ddp_notebook", "ddp_fork"])
def test_a_strategy_whose_results_do_not_come_back_is_refused(data_dir, tmp_path, strategy):
    trainer = {"accelerator": "cpu", "devices": 2, "strategy": strategy}
    with pytest.raises(ValueError, match=rf"trainer\.strategy is {strategy}, .* do not come back"):
        make_trainer(make_config(data_dir, tmp_path, trainer=trainer))


@pytest.mark.parametrize(
    ("setting", "ending"),
    [
        ({"fast_dev_run": True}, "nothing to export"),
        ({"enable_checkpointing": False}, "nothing to export"),
        ({}, "all metrics: "),
    ],
)
def test_a_run_without_a_checkpoint_does_not_send_its_user_to_export(data_dir, tmp_path, capsys, setting, ending):
    train(make_config(data_dir, tmp_path / "run", trainer={"max_epochs": 1} | setting))
    assert ending in capsys.readouterr().out.splitlines()[-1]


def test_the_schedule_ends_with_epochs_or_steps_and_is_that_of_one_process(data_dir, tmp_path):
    """64 responses in batches of 8; two epochs if the trainer says nothing."""
    for trainer, steps, shared in (
        ({"max_epochs": 3}, 24, ""),
        ({"max_epochs": 3, "max_steps": 5}, 5, ""),
        ({"max_epochs": 1, "max_steps": 50}, 8, ""),
        ({"devices": 2}, 16, ", 4 on each of 2 processes"),
        ({"devices": "8"}, 16, ", 1 on each of 8 processes"),
    ):
        config = make_config(data_dir, tmp_path / "run", trainer=trainer)
        made = make_trainer(config)
        made.datamodule = data = build(config)[1]
        data.trainer = made
        assert num_optimizer_steps(made) == steps
        assert training_plan(made, 8) == f"training for {steps} steps, 8 responses per batch{shared}"


def test_under_slurm_lightning_requeues_nothing(data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)

    def environment_of(**trainer: Any) -> Any:
        made = make_trainer(make_config(data_dir, tmp_path, trainer=trainer))
        return made._accelerator_connector.cluster_environment

    assert isinstance(environment_of(), SLURMEnvironment)
    assert not environment_of().auto_requeue
    given = LightningEnvironment()
    assert environment_of(plugins=[given]) is given
    with monkeypatch.context() as patch:
        patch.setenv("SLURM_NTASKS", "2")
        patch.delenv("SLURM_NTASKS_PER_NODE")
        with pytest.raises(ValueError, match=r"SLURM: .*--ntasks-per-node=2"):
            environment_of()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    assert trainer_module._environments([]) == [], "under torchrun Lightning chooses"


def test_sigusr1_acts_as_sigterm_within_a_run_only_and_a_run_in_a_thread_leaves_signals_alone():
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

    def work() -> int:
        with stopped_by_sigusr1():
            return 1

    assert ThreadPoolExecutor().submit(work).result() == 1

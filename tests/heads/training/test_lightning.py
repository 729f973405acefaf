"""Lightning as its users expect it: what the `trainer` section and the command line say is what the Trainer does."""

import re
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch

from configs.command import config_of, parser_for
from heads.command import load_sweep
from heads.training.command import build, train
from heads.training.trainer import make_trainer, num_optimizer_steps, trainer_arguments
from tests.toys.made_up import HIDDEN, make_config, train_by_command, write_yaml

EARLY_STOPPING = {
    "class_path": "pytorch_lightning.callbacks.EarlyStopping",
    "init_args": {"monitor": "dev/calibrated_kl", "patience": 2},
}


def probs(run_dir: Path) -> torch.Tensor:
    """Acceptance probabilities of all heads on made-up states, [head, token]."""
    sweep = load_sweep(run_dir / "last.ckpt")
    hidden = torch.randn(200, HIDDEN, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        return torch.cat([stack(hidden) for _, stack in sweep.items()]).float().sigmoid()


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
@pytest.mark.filterwarnings("ignore:.*AMP with fp16 is not supported on CPU")
def test_mixed_precision_trains_heads_close_to_those_of_float32(data_dir: Path, tmp_path: Path, precision: str):
    """Without a GPU Lightning turns 16-mixed into bf16-mixed, and says so."""
    single = train_by_command(make_config(data_dir, tmp_path / "32"), tmp_path)
    mixed = train_by_command(make_config(data_dir, tmp_path / "mixed"), tmp_path, "--trainer.precision", precision)
    for name, head in single["dev"]["heads"].items():
        assert mixed["dev"]["heads"][name]["calibrated_kl"] == pytest.approx(head["calibrated_kl"], abs=0.01)
    difference = (probs(tmp_path / "mixed") - probs(tmp_path / "32")).abs()
    assert 0 < float(difference.max()) < 0.1
    assert float(difference.mean()) < 0.01
    kept = load_sweep(tmp_path / "mixed" / "last.ckpt").state_dict()
    assert all(value.dtype == torch.float32 for name, value in kept.items() if name.startswith("stacks"))


@pytest.mark.slow
def test_early_stopping_from_the_yaml_stops_the_run_and_keeps_the_best_weights(data_dir: Path, tmp_path: Path):
    """A learning rate far too high: dev gets worse from early on."""
    config = make_config(
        data_dir, tmp_path / "run", learning_rate=0.5, trainer={"max_epochs": 30, "callbacks": [EARLY_STOPPING]}
    )
    results = train_by_command(config, tmp_path)
    sweep = load_sweep(tmp_path / "run" / "last.ckpt")
    means = [sum(entry["calibrated_kl"]) for entry in sweep.history]
    assert len(means) < 30
    assert min(means[-2:]) >= min(means[:-2]), "stopped after two epochs without a better one"
    for index, spec in enumerate(sweep.specs):
        best = min(entry["calibrated_kl"][index] for entry in sweep.history)
        assert results["dev"]["heads"][str(spec)]["calibrated_kl"] == pytest.approx(best, abs=1e-6)


def test_a_callback_can_be_given_on_the_command_line(data_dir: Path, tmp_path: Path):
    path = write_yaml(make_config(data_dir, tmp_path / "run"), tmp_path)
    parser = parser_for(train, trainer=pl.Trainer)
    flags = [
        "--trainer.callbacks+=EarlyStopping",
        "--trainer.callbacks.monitor=dev/calibrated_kl",
        "--trainer.callbacks.patience=7",
    ]
    config = config_of(parser, parser.parse_args(["--config", str(path), *flags]))
    callbacks = trainer_arguments(config)["callbacks"]
    assert [callback.patience for callback in callbacks if isinstance(callback, pl.callbacks.EarlyStopping)] == [7]
    assert sum(isinstance(callback, pl.callbacks.Checkpoint) for callback in callbacks) == 2


def test_gradients_accumulate_as_the_command_line_says(data_dir: Path, tmp_path: Path):
    """8 batches an epoch, three to a step, the last step of an epoch of two: 3 steps an epoch."""
    train_by_command(make_config(data_dir, tmp_path / "run"), tmp_path, "--trainer.accumulate_grad_batches", "3")
    saved = torch.load(tmp_path / "run" / "last.ckpt", weights_only=True)
    assert (saved["epoch"], saved["global_step"]) == (1, 6)


def gradient_norms(run_dir: Path) -> torch.Tensor:
    """Of each head at the first step: Adam's first moment is then a tenth of the gradient that it was given."""
    state = torch.load(run_dir / "last.ckpt", weights_only=True)["optimizer_states"][0]["state"]
    return 10 * torch.stack([moments["exp_avg"].flatten(1).norm(dim=1) for moments in state.values()]).norm(dim=0)


@pytest.mark.slow
def test_gradients_are_clipped_per_head_as_the_command_line_says(data_dir: Path, tmp_path: Path):
    config = make_config(data_dir, tmp_path / "run", depths=(2,))
    norms = []
    for flags in ([], ["--trainer.gradient_clip_val", "0.001"]):
        train_by_command(config, tmp_path, "--resume", "false", "--trainer.max_steps", "1", *flags)
        norms.append(gradient_norms(tmp_path / "run"))
    assert (norms[0] > 0.001).all()
    torch.testing.assert_close(norms[1], torch.full((2,), 0.001), rtol=1e-3, atol=0)


def test_float16_clips_gradients_that_the_scaler_has_unscaled(data_dir: Path, tmp_path: Path):
    """What Lightning sets up for 16-mixed on a GPU, here on the CPU: autocast to float16, and a scale of 65,536."""
    precision = pl.plugins.MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    trainer = {"max_steps": 1, "gradient_clip_val": 0.001, "plugins": [precision]}
    train(make_config(data_dir, tmp_path / "run", depths=(2,), trainer=trainer))
    torch.testing.assert_close(gradient_norms(tmp_path / "run"), torch.full((2,), 0.001), rtol=1e-3, atol=0)


def test_nodes_and_strategy_reach_the_trainer(data_dir: Path, tmp_path: Path):
    path = write_yaml(make_config(data_dir, tmp_path / "run"), tmp_path)
    parser = parser_for(train, trainer=pl.Trainer)
    flags = ["--trainer.num_nodes", "3", "--trainer.devices", "2", "--trainer.strategy", "ddp"]
    config = config_of(parser, parser.parse_args(["--config", str(path), *flags]))
    trainer = pl.Trainer(**trainer_arguments(config))
    assert (trainer.num_nodes, trainer.num_devices, trainer.world_size) == (3, 2, 6)
    assert isinstance(trainer.strategy, pl.strategies.DDPStrategy)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--trainer.precision", "bf16-true"], r"trainer.precision is bf16-true.* use bf16-mixed"),
        (["--trainer.accelerator", "gpu"], r"trainer: No supported gpu backend"),
        (["--trainer.devices", "0"], r"trainer\.devices is 0"),
        (["--trainer.max_epochs", "-1"], r"the cosine schedule needs an end"),
    ],
)
def test_a_trainer_that_cannot_be_is_one_line(data_dir: Path, tmp_path: Path, capsys, flags: list[str], complaint: str):
    if "gpu" in flags and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit, match="2"):
        train_by_command(make_config(data_dir, tmp_path / "run"), tmp_path, *flags)
    assert re.search(f"^error: .*{complaint}", capsys.readouterr().err, re.MULTILINE)


def test_the_schedule_ends_where_the_first_of_epochs_and_steps_does(data_dir: Path, tmp_path: Path):
    """8 batches an epoch."""
    for trainer, expected in (
        ({"max_epochs": 3}, 24),
        ({"max_epochs": 3, "max_steps": 5}, 5),
        ({"max_epochs": 1, "max_steps": 50}, 8),
    ):
        config = make_config(data_dir, tmp_path / "run", trainer=trainer)
        made = make_trainer(config)
        made.datamodule = build(config)[1]
        assert num_optimizer_steps(made) == expected

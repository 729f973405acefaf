"""Lightning's Trainer, from the `trainer` section of a config with defaults for loggers, checkpoints and others."""

import logging
import warnings
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from pytorch_lightning.plugins.io import CheckpointIO
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from configs.schema import Config, HeadsConfig
from heads.training.checkpoints import EpochCheckpoint, StepCheckpoint, WholeCheckpoints
from heads.training.cluster import environments
from heads.training.progress import RunProgress

PAPER_EPOCHS = 3
_INTERVAL = timedelta(minutes=3)


def make_trainer(config: Config) -> pl.Trainer:
    """The Trainer of a config.

    Raises:
        ValueError: arguments that Lightning rejects, weights in half precision, or a batch size that is not divisible
            by the number of processes.
    """
    precision = config.trainer.get("precision")
    if precision in ("bf16-true", "16-true"):
        raise ValueError(
            f"trainer.precision is {precision}, but 16-bit weights are too coarse for steps of heads.learning_rate; "
            f"use {precision.replace('true', 'mixed')}"
        )
    try:
        trainer = pl.Trainer(**trainer_arguments(config))
    except (MisconfigurationException, TypeError) as error:
        raise ValueError(f"trainer: {error}") from error
    if config.heads.batch_size % trainer.world_size:
        raise ValueError(
            f"heads.batch_size is {config.heads.batch_size}, but {trainer.world_size} processes (trainer.devices x "
            f"trainer.num_nodes) share each batch; use a multiple of {trainer.world_size}, or fewer devices"
        )
    return trainer


def trainer_arguments(config: Config) -> dict[str, Any]:
    """The `trainer` section with defaults: three epochs (the paper's), one device, loggers, checkpoints."""
    arguments = {name: value for name, value in config.trainer.items() if value is not None}
    if "max_epochs" not in arguments and arguments.get("max_steps", -1) == -1:
        arguments["max_epochs"] = PAPER_EPOCHS
    path = Path(config.heads.dir)
    if arguments.get("logger", True) is True and not arguments.get("barebones"):
        arguments["logger"] = [CSVLogger(path / "logs", "csv"), TensorBoardLogger(path / "logs", name="tb", version="")]
    has_checkpoints = arguments.get("enable_checkpointing", True) and not arguments.get("barebones")
    arguments["callbacks"] = [
        *_listed(arguments.get("callbacks")),
        *([RunProgress()] if _takes_bar(arguments) else []),
        *(_checkpoints(config.heads) if has_checkpoints else []),
    ]
    plugins = _listed(arguments.get("plugins"))
    files = [] if any(isinstance(plugin, CheckpointIO) for plugin in plugins) else [WholeCheckpoints()]
    arguments["plugins"] = [*plugins, *files, *environments(plugins)]
    return {
        "devices": 1,
        "num_sanity_val_steps": 0,
        "enable_model_summary": False,
        "default_root_dir": str(path),
    } | arguments


def _takes_bar(arguments: Mapping[str, Any]) -> bool:
    """False if bars are disabled or the user's callbacks have one, since Lightning allows only one."""
    has_bar = any(isinstance(callback, pl.callbacks.ProgressBar) for callback in _listed(arguments.get("callbacks")))
    return arguments.get("enable_progress_bar", True) and not arguments.get("barebones") and not has_bar


def _checkpoints(heads: HeadsConfig) -> list[pl.Callback]:
    """Callbacks that write checkpoints after each validation, on exceptions, and every N steps or minutes."""
    path: dict[str, Any] = {"dirpath": Path(heads.dir), "filename": "last", "enable_version_counter": False}
    steps = heads.checkpoint_every_n_steps
    interval = {"train_time_interval": _INTERVAL} if steps is None else {"every_n_train_steps": steps}
    return [StepCheckpoint(**path, **interval), EpochCheckpoint(**path, every_n_epochs=1, save_on_exception=True)]


def quiet() -> None:
    """Silence Lightning's start-up lines and two warnings that every small training run would cause."""
    # run.json is in heads.dir before the first checkpoint, and `RunDirectory` refuses files of another run
    warnings.filterwarnings("ignore", "Checkpoint directory .* exists and is not empty")
    # the interval counts steps of all epochs, and metrics on dev are logged after each epoch anyway
    warnings.filterwarnings("ignore", r"The number of training batches \(\d+\) is smaller than the logging interval")
    for name in ("pytorch_lightning", "lightning.pytorch", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)


def _listed(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]

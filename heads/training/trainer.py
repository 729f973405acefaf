"""Lightning's Trainer from the `trainer` section of a config, with defaults for loggers, checkpoints and batch systems.

Checkpoints are written atomically, to their own folder: Lightning writes to the temporary folder and moves the file,
which between file systems is a copy, and a kill in the middle destroys the run's only checkpoint. One can be large:
10.7 GB for 20 heads of width 4,096 (weights, selected weights, Adam's two moments).

Under a batch system a signal stops the run and the same command resumes it. SIGUSR1, which SLURM and Grid Engine can
send before a time limit, acts like SIGTERM. SLURM or the job script decides whether the job is queued again.
"""

import logging
import signal
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from pytorch_lightning.plugins.environments import ClusterEnvironment, SLURMEnvironment, TorchElasticEnvironment
from pytorch_lightning.plugins.io import CheckpointIO, TorchCheckpointIO
from pytorch_lightning.strategies.launchers import _MultiProcessingLauncher
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from configs.schema import Config, HeadsConfig
from heads.training.progress import StepsBar
from store.shards import atomic_file

_INTERVAL = timedelta(minutes=3)


class WholeCheckpoints(TorchCheckpointIO):
    """`TorchCheckpointIO` that writes local files atomically; a user's own callback may name remote ones."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: object = None) -> None:
        if "://" in str(path) or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        with atomic_file(Path(path)) as file:
            try:
                torch.save(checkpoint, file)
            except RuntimeError as error:  # torch wraps the OSError of a full disk
                raise error.__context__ if isinstance(error.__context__, OSError) else error from error


class CheckpointBetweenSteps(ModelCheckpoint):
    """A `ModelCheckpoint` that saves only between two optimiser steps, and not between a batch and its validation.

    A checkpoint within a step (after Ctrl-C, or a loss that is not finite) would lose a batch or accumulated gradients,
    and resuming from one before a validation would skip it, so the previous checkpoint is kept instead.
    """

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if _is_between_steps(trainer):
            super().on_train_batch_end(trainer, *args)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.fit_loop._should_accumulate():
            super().on_validation_end(trainer, pl_module)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        progress: Any = trainer.fit_loop.epoch_loop.batch_progress.current
        if progress.ready == progress.processed and _is_between_steps(trainer):
            super().on_exception(trainer, pl_module, exception)


def _is_between_steps(trainer: pl.Trainer) -> bool:
    """Whether no gradients are accumulated and no validation belongs to the newest batch."""
    loop = trainer.fit_loop
    is_due = loop._data_fetcher is not None and loop.epoch_loop._should_check_val_fx(loop._data_fetcher)
    return not loop._should_accumulate() and not is_due


def make_trainer(config: Config) -> pl.Trainer:
    """The Trainer of a config; ValueError for arguments that Lightning rejects, weights in half precision, or a batch
    size that is not divisible by the number of processes.
    """
    precision = config.trainer.get("precision")
    if precision in ("bf16-true", "16-true"):
        raise ValueError(
            f"trainer.precision is {precision}, but 16-bit weights are too coarse for steps of the learning "
            f"rate; use {precision.replace('true', 'mixed')}"
        )
    try:
        trainer = pl.Trainer(**trainer_arguments(config))
    except (MisconfigurationException, TypeError) as error:
        raise ValueError(f"trainer: {error}") from error
    if isinstance(trainer.strategy.launcher, _MultiProcessingLauncher):
        raise ValueError(
            f"trainer.strategy is {config.trainer.get('strategy', 'auto')}, which here starts processes whose "
            "results do not come back (ddp_spawn, or a notebook with several devices); set trainer.devices: "
            "1, or train with strategy ddp from a command line"
        )
    if config.heads.batch_size % trainer.world_size:
        raise ValueError(
            f"heads.batch_size is {config.heads.batch_size}, but {trainer.world_size} processes "
            f"(trainer.devices x num_nodes) share each batch; use a multiple of {trainer.world_size}, or fewer "
            "devices"
        )
    return trainer


def trainer_arguments(config: Config) -> dict[str, Any]:
    """The `trainer` section with defaults: one device, loggers, checkpoints, the project's progress bar."""
    arguments = {name: value for name, value in config.trainer.items() if value is not None}
    path = config.heads.dir
    is_bare = arguments.get("barebones")
    if arguments.get("logger", True) is True and not is_bare:
        arguments["logger"] = [
            CSVLogger(f"{path}/logs", "csv"),
            TensorBoardLogger(f"{path}/logs", name="tb", version=""),
        ]
    callbacks = _listed(arguments.get("callbacks"))
    if arguments.get("enable_checkpointing", True) and not is_bare:
        callbacks += _checkpoints(config.heads)
    has_bar = any(isinstance(callback, pl.callbacks.ProgressBar) for callback in callbacks)
    if "enable_progress_bar" not in arguments and not has_bar and not is_bare:
        callbacks.append(StepsBar())
        arguments["enable_progress_bar"] = False  # Lightning's own
    arguments["callbacks"] = callbacks
    plugins = _listed(arguments.get("plugins"))
    files = [] if any(isinstance(plugin, CheckpointIO) for plugin in plugins) else [WholeCheckpoints()]
    arguments["plugins"] = [*plugins, *files, *_environments(plugins)]
    defaults = {"devices": 1, "num_sanity_val_steps": 0, "enable_model_summary": False, "default_root_dir": path}
    return defaults | arguments


@contextmanager
def stopped_by_sigusr1() -> Iterator[None]:
    """Treat SIGUSR1 as SIGTERM while the block runs."""
    if threading.current_thread() is not threading.main_thread():  # Python sets signal handlers only there
        yield
        return
    before = signal.signal(signal.SIGUSR1, lambda number, frame: signal.raise_signal(signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def quiet() -> None:
    """Silence Lightning's start-up lines, and warnings that many runs would cause for no reason."""
    for message in (
        "Checkpoint directory .* exists and is not empty",  # run.json is written before the first checkpoint
        # the interval counts steps of all epochs, and metrics on dev are logged after each epoch anyway
        r"The number of training batches \(\d+\) is smaller than the logging interval",
        "You have overridden `on_after_batch_transfer`",  # the data module has no such hook
        r"It is recommended to use `self\.log\('dev/",  # metrics on dev are of sums over all processes
        "Grad strides do not match bucket view strides",  # of stacks with one head
    ):
        warnings.filterwarnings("ignore", message)
    warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
    for name in ("pytorch_lightning", "lightning.pytorch", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)


def _checkpoints(heads: HeadsConfig) -> list[pl.Callback]:
    """Callbacks that write checkpoints after each validation, on exceptions, and every N steps or minutes."""
    last = partial(CheckpointBetweenSteps, dirpath=Path(heads.dir), filename="last", enable_version_counter=False)
    steps = heads.checkpoint_every_n_steps
    by_interval = last(train_time_interval=_INTERVAL) if steps is None else last(every_n_train_steps=steps)
    return [by_interval, last(every_n_epochs=1, save_on_exception=True)]


def _environments(plugins: Sequence[object]) -> list[ClusterEnvironment]:
    """Under SLURM, its environment without Lightning's requeueing, which can save in the middle of a step."""
    is_set = any(isinstance(plugin, ClusterEnvironment) for plugin in plugins)
    if is_set or TorchElasticEnvironment.detect() or not SLURMEnvironment.detect():
        return []
    try:
        return [SLURMEnvironment(auto_requeue=False)]
    except RuntimeError as error:  # srun was started with --ntasks only
        raise ValueError(f"SLURM: {error}") from error


def _listed(value: object) -> list[object]:
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]

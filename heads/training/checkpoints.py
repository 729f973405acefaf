"""Lightning checkpoints that are written atomically.

Lightning writes a checkpoint to the temporary folder and moves it. Between file systems that is a copy, and a kill in
the middle destroys the run's only checkpoint. Here it is written to its own folder, fsynced and renamed. It can be
large: 10.7 GB for 20 heads of width 4,096 (weights, selected weights, Adam's two moments).
"""

import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.plugins.io import TorchCheckpointIO

from heads.training.lightning_private import is_validation_due, is_within_step
from store.shards import atomic_file


class WholeCheckpoints(TorchCheckpointIO):
    """`TorchCheckpointIO` that writes local files atomically."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        if "://" in str(path) or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        with atomic_file(Path(path)) as file:
            try:
                torch.save(checkpoint, file)
            except RuntimeError as error:  # torch wraps the OSError of a full disk
                raise error.__context__ if isinstance(error.__context__, OSError) else error from error


class StepCheckpoint(ModelCheckpoint):
    """A checkpoint every N steps or minutes, between two steps, unless a validation follows."""

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if not is_within_step(trainer) and not is_validation_due(trainer):
            super().on_train_batch_end(trainer, *args)


class EpochCheckpoint(ModelCheckpoint):
    """A checkpoint after each validation and when the run is stopped, but only between two steps.

    A checkpoint within a step (after Ctrl-C, or a loss that is not finite) would lose a batch or accumulated gradients,
    so the previous checkpoint is kept instead.
    """

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not is_within_step(trainer):
            super().on_validation_end(trainer, pl_module)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        progress: Any = trainer.fit_loop.epoch_loop.batch_progress.current
        if progress.ready == progress.processed and not is_within_step(trainer) and not is_validation_due(trainer):
            super().on_exception(trainer, pl_module, exception)


def check_whole(path: Path) -> None:
    """Raise ValueError if a checkpoint is truncated or corrupted."""
    remedy = "delete it, or pass --resume false, to start over"
    try:
        with zipfile.ZipFile(path) as file:
            broken = file.testzip()
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError, UnicodeDecodeError) as error:
        raise ValueError(f"checkpoint {path} is incomplete ({path.stat().st_size:,} bytes); {remedy}") from error
    if broken is not None:
        raise ValueError(f"checkpoint {path} is corrupted (in {broken}); {remedy}")


def run_of(path: Path) -> str:
    """The name of the run that wrote a checkpoint; ValueError if it is not a checkpoint of a sweep."""
    try:
        return torch.load(path, mmap=True, weights_only=True, map_location="cpu")["hyper_parameters"]["facts"]["run"]
    except (pickle.UnpicklingError, RuntimeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is not a checkpoint of `acceptance-heads train` ({type(error).__name__}: {error}); name another"
        ) from error

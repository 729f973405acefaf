"""Lightning checkpoints that are whole or not there, wherever the process is killed, and as many of them as the run can
afford.

Lightning writes a checkpoint to the folder for temporary files and moves it: between file systems that is a copy, and a
kill in the middle of it destroys the only checkpoint of the run. Here it is written beside its place, fsynced and
renamed, as shards are, and straight from the tensors: a sweep of 20 heads for a draft of width 4,096 is 10.7 GB
(weights, selected weights, Adam's two moments).
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
    """`TorchCheckpointIO` whose local files are whole or not there."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        if "://" in str(path) or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        with atomic_file(Path(path)) as file:
            try:
                torch.save(checkpoint, file)
            except RuntimeError as error:  # torch's own words for an error of the file
                raise error.__context__ if isinstance(error.__context__, OSError) else error from error


class StepCheckpoint(ModelCheckpoint):
    """A checkpoint every so many steps or minutes, between two steps, except where a validation follows."""

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if not is_within_step(trainer) and not is_validation_due(trainer):
            super().on_train_batch_end(trainer, *args)


class EpochCheckpoint(ModelCheckpoint):
    """A checkpoint after each validation, and when the run is stopped, between two steps.

    Within a step, a batch may have been taken and not learnt from (Ctrl-C, a loss that is not finite), or gradients of
    some batches of an accumulated step are held, and a resumed run would lose them. The checkpoint before stays.
    """

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not is_within_step(trainer):
            super().on_validation_end(trainer, pl_module)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        progress: Any = trainer.fit_loop.epoch_loop.batch_progress.current
        if progress.ready == progress.processed and not is_within_step(trainer) and not is_validation_due(trainer):
            super().on_exception(trainer, pl_module, exception)


def check_whole(path: Path) -> None:
    """Raise ValueError if a checkpoint is cut short or has other bytes than were written."""
    remedy = "delete it, or pass --resume false, to train anew"
    try:
        with zipfile.ZipFile(path) as file:
            broken = file.testzip()
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} ({path.stat().st_size:,} bytes) is no whole checkpoint; {remedy}") from error
    if broken is not None:
        raise ValueError(f"{path} is corrupted (in {broken}), so it is no whole checkpoint; {remedy}")


def run_of(path: Path) -> str:
    """The name of the run that wrote a checkpoint.

    Raises:
        ValueError: it is no checkpoint of a sweep.
    """
    try:
        return torch.load(path, mmap=True, weights_only=True, map_location="cpu")["hyper_parameters"]["facts"]["run"]
    except (pickle.UnpicklingError, RuntimeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is no checkpoint of `acceptance-heads train` ({type(error).__name__}: {error}); name another"
        ) from error

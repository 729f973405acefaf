"""Lightning checkpoints that are whole or not there, wherever the process is killed, and as many of them as the run can
afford.

Lightning writes a checkpoint to the folder for temporary files and moves it: between file systems that is a copy, and a
kill in the middle of it destroys the only checkpoint of the run. Here it is written beside its place, fsynced and
renamed, as shards are, and straight from the tensors: a sweep of 20 heads for a draft of width 4,096 is 10.7 GB
(weights, selected weights, Adam's two moments).
"""

import pickle
import time
import zipfile
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Checkpoint, ModelCheckpoint
from pytorch_lightning.plugins.io import TorchCheckpointIO

from heads.training.lightning_private import is_validation_due, is_within_step
from store.shards import atomic_file

_LEAST_GAP_S = 30.0
_TIMES_WRITING = 19
"""Seconds of training for each second of writing."""
_STEPS_BETWEEN_QUESTIONS = 10
"""Several processes go by the clock of the first, and to ask it makes them wait for their devices."""


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
    """A checkpoint every so many steps, except where a validation follows."""

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if not is_validation_due(trainer):
            super().on_train_batch_end(trainer, *args)


class EpochCheckpoint(ModelCheckpoint):
    """A checkpoint after each validation, and when the run is stopped between two steps.

    In the middle of a step, where Ctrl-C, a loss that is not finite or the death of another process may come, the batch
    counts as taken and has not been learnt from: a run that went on from there would leave it out. The checkpoint
    before stays.
    """

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        progress: Any = trainer.fit_loop.epoch_loop.batch_progress.current
        if progress.ready == progress.processed and not is_validation_due(trainer):
            super().on_exception(trainer, pl_module, exception)


class TimedCheckpoint(Checkpoint):
    """A checkpoint between steps, whenever the run has trained for 19 times what the last one took to write, and for 30
    s.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._due = time.monotonic() + _LEAST_GAP_S

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        is_asked = trainer.world_size == 1 or trainer.global_step % _STEPS_BETWEEN_QUESTIONS == 0
        if not is_asked or is_within_step(trainer) or is_validation_due(trainer):
            return
        if not trainer.strategy.broadcast(time.monotonic() >= self._due):
            return
        started = time.monotonic()
        trainer.save_checkpoint(self.path)
        now = time.monotonic()
        self._due = now + max(_LEAST_GAP_S, _TIMES_WRITING * (now - started))


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

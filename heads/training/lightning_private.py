"""What the run asks of Lightning that has no public name. Read in pytorch-lightning 2.6.6.

No other file names anything private of Lightning, and `tests/heads/training/test_lightning_private.py` fails where a
later version answers otherwise.
"""

import pytorch_lightning as pl
from pytorch_lightning.trainer.connectors.checkpoint_connector import _CheckpointConnector


def trainer_of(module: pl.LightningModule) -> pl.Trainer | None:
    """The trainer of a module; None for a module without, whose `trainer` raises an error."""
    return module._trainer


def is_within_step(trainer: pl.Trainer) -> bool:
    """Whether gradients of some batches of an accumulated step are held, and the step is still to come."""
    return trainer.fit_loop._should_accumulate()


def is_validation_due(trainer: pl.Trainer) -> bool:
    """Whether a validation follows the newest batch, or followed it.

    A run that goes on from a checkpoint between the two never makes it up.
    """
    loop = trainer.fit_loop
    return loop._data_fetcher is not None and loop.epoch_loop._should_check_val_fx(loop._data_fetcher)


def ignore_requeue_checkpoints(trainer: pl.Trainer) -> None:
    """Make a trainer find no hpc_ckpt_N.ckpt.

    Under SLURM, `fit` and `test` that are given no checkpoint load that of the highest number in the default root
    directory, whichever run it is of.
    """
    trainer._checkpoint_connector = _OwnCheckpoints(trainer)


class _OwnCheckpoints(_CheckpointConnector):
    """Loads the checkpoint that it is given, and nothing else."""

    @property
    def _hpc_resume_path(self) -> str | None:
        return None

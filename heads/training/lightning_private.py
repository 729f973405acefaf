"""What the run asks of Lightning that has no public name. Read in pytorch-lightning 2.6.6.

No other file names anything private of Lightning, and `tests/heads/training/test_lightning_private.py` fails where a
later version answers otherwise.
"""

import pytorch_lightning as pl


def is_within_step(trainer: pl.Trainer) -> bool:
    """Whether gradients of some batches of an accumulated step are held, and the step is still to come."""
    return trainer.fit_loop._should_accumulate()


def is_validation_due(trainer: pl.Trainer) -> bool:
    """Whether a validation follows the newest batch, or followed it.

    A run that goes on from a checkpoint between the two never makes it up.
    """
    loop = trainer.fit_loop
    return loop._data_fetcher is not None and loop.epoch_loop._should_check_val_fx(loop._data_fetcher)

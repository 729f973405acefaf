"""The only uses of Lightning's private names, as of pytorch-lightning 2.6.6.

`tests/heads/training/test_lightning_private.py` fails if a later version behaves differently.
"""

import pytorch_lightning as pl


def is_within_step(trainer: pl.Trainer) -> bool:
    """Whether gradients are accumulated whose optimiser step has not happened yet."""
    return trainer.fit_loop._should_accumulate()


def is_validation_due(trainer: pl.Trainer) -> bool:
    """Whether a validation belongs to the newest batch; resuming from a checkpoint between the two would skip it."""
    loop = trainer.fit_loop
    return loop._data_fetcher is not None and loop.epoch_loop._should_check_val_fx(loop._data_fetcher)

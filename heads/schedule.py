"""How many optimiser steps a run takes, known before it starts."""

import math

import pytorch_lightning as pl


def num_optimizer_steps(trainer: pl.Trainer) -> int:
    """Steps of the whole run: what warm-up and cosine are measured against.

    Lightning's own `estimated_stepping_batches` sets up the loader, which makes it forget the state of a resumed one; so this one asks the
    data module.
    """
    if trainer.max_steps != -1:
        return trainer.max_steps
    assert trainer.max_epochs is not None
    batches = trainer.datamodule.num_train_batches  # type: ignore[attr-defined]
    limit = trainer.limit_train_batches
    batches = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
    return math.ceil(batches / trainer.accumulate_grad_batches) * trainer.max_epochs

"""Number of optimiser steps of a run, known before it starts."""

import math

import pytorch_lightning as pl


def num_optimizer_steps(trainer: pl.Trainer) -> int:
    """Optimiser steps of the whole run; ValueError if neither epochs nor steps are limited.

    Lightning's `estimated_stepping_batches` would set up the loader and so discard the state of a resumed one.
    """
    if trainer.max_epochs in (-1, None):
        if trainer.max_steps == -1:
            raise ValueError(
                "trainer.max_epochs and trainer.max_steps are both -1, but the cosine schedule needs an end; set one"
            )
        return trainer.max_steps
    assert trainer.max_epochs is not None
    batches = len(trainer.datamodule.train_dataloader())  # type: ignore[attr-defined]
    limit = trainer.limit_train_batches
    batches = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
    steps = math.ceil(batches / trainer.accumulate_grad_batches) * trainer.max_epochs
    return steps if trainer.max_steps == -1 else min(steps, trainer.max_steps)


def training_plan(trainer: pl.Trainer, batch_size: int) -> str:
    """One line with the number of steps, the batch size and the number of processes."""
    processes, accumulated = trainer.world_size, trainer.accumulate_grad_batches
    shared = f", {batch_size // processes:,} on each of {processes:,} processes" if processes > 1 else ""
    of_batches = f" of {accumulated:,} batches" if accumulated > 1 else ""
    return (
        f"training for {num_optimizer_steps(trainer):,} steps{of_batches}, {batch_size:,} responses per batch{shared}"
    )

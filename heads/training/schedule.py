"""How many optimiser steps a run takes, known before it starts."""

import math

import pytorch_lightning as pl


def num_optimizer_steps(trainer: pl.Trainer) -> int:
    """Steps of the whole run: what warm-up and cosine are measured against.

    Lightning's own `estimated_stepping_batches` sets up the loader, which makes it forget the state of a resumed one;
    so this asks the data module for a loader.

    Raises:
        ValueError: neither epochs nor steps are limited.
    """
    if trainer.max_epochs in (-1, None):
        if trainer.max_steps == -1:
            raise ValueError(
                "trainer.max_epochs and trainer.max_steps are both -1: the cosine schedule needs an end, set one of "
                "them"
            )
        return trainer.max_steps
    assert trainer.max_epochs is not None
    batches = len(trainer.datamodule.train_dataloader())  # type: ignore[attr-defined]
    limit = trainer.limit_train_batches
    batches = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
    steps = math.ceil(batches / trainer.accumulate_grad_batches) * trainer.max_epochs
    return steps if trainer.max_steps == -1 else min(steps, trainer.max_steps)


def training_plan(trainer: pl.Trainer, batch_size: int) -> str:
    """One line: how many processes share each batch, and how many steps the whole run takes."""
    processes, accumulated = trainer.world_size, trainer.accumulate_grad_batches
    shared = f", {batch_size // processes:,} each" if processes > 1 else ""
    of_batches = f" of {accumulated:,} batches" if accumulated > 1 else ""
    return (
        f"training in {processes:,} process{'es' if processes > 1 else ''}, a batch of {batch_size:,} responses in "
        f"all{shared}, {num_optimizer_steps(trainer):,} steps{of_batches}"
    )

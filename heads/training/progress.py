"""How many steps a run has, and its progress on the project's bar: a log has lines of it as a terminal has a bar."""

import math

import pytorch_lightning as pl

from store.progress import Bar


class StepsBar(pl.Callback):
    """A bar over all optimiser steps of a run, with the latest KL on dev, and one over the batches of the last
    measurement.
    """

    def __init__(self) -> None:
        self._bar: Bar | None = None

    def on_train_batch_start(self, trainer: pl.Trainer, *args: object) -> None:
        if self._bar is None:  # not earlier: linear heads are solved before the first step, with a bar of their own
            self._bar = Bar(
                total=num_optimizer_steps(trainer),
                initial=trainer.global_step,
                desc="train",
                unit="steps",
                disable=not trainer.is_global_zero,
            )

    def on_train_batch_end(self, trainer: pl.Trainer, *args: object) -> None:
        if self._bar is not None:
            self._bar.update(trainer.global_step - self._bar.n)

    def on_validation_batch_end(self, *args: object) -> None:
        if self._bar is not None:
            self._bar.update(0)

    def on_validation_end(self, trainer: pl.Trainer, *args: object) -> None:
        kl = trainer.callback_metrics.get("dev/calibrated_kl")
        if self._bar is not None and kl is not None:
            self._bar.set_postfix_str(f"KL on dev {kl:.0%} of the draft's own signal", refresh=False)

    def on_test_batch_end(self, trainer: pl.Trainer, *args: object) -> None:
        if self._bar is None:
            self._bar = Bar(
                total=sum(trainer.num_test_batches),
                desc="measure heads",
                unit="batches",
                leave=False,
                disable=not trainer.is_global_zero,
            )
        self._bar.update()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._bar is not None:
            self._bar.close()
        self._bar = None

    on_test_end = on_train_end

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.on_train_end(trainer, pl_module)


def num_optimizer_steps(trainer: pl.Trainer) -> int:
    """Optimiser steps of the whole run, known before it starts; ValueError if neither epochs nor steps are limited.

    Lightning's `estimated_stepping_batches` would set up the loader and so discard the state of a resumed one.
    """
    if trainer.max_epochs in (-1, None) and trainer.max_steps == -1:
        raise ValueError(
            "trainer.max_epochs and trainer.max_steps are both -1, but the cosine schedule needs an end; set one"
        )
    if trainer.max_epochs is None or trainer.max_epochs == -1:
        return trainer.max_steps
    batches = len(trainer.datamodule.train_dataloader())  # type: ignore[attr-defined]
    limit = trainer.limit_train_batches
    batches = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
    steps = math.ceil(batches / trainer.accumulate_grad_batches) * trainer.max_epochs
    return steps if trainer.max_steps == -1 else min(steps, trainer.max_steps)


def training_plan(trainer: pl.Trainer, batch_size: int) -> str:
    """One line with the number of steps, the batch size and the number of processes."""
    plan = f"training for {num_optimizer_steps(trainer):,} steps"
    if trainer.accumulate_grad_batches > 1:
        plan += f" of {trainer.accumulate_grad_batches:,} batches"
    plan += f", {batch_size:,} responses per batch"
    if trainer.world_size > 1:
        plan += f", {batch_size // trainer.world_size:,} on each of {trainer.world_size:,} processes"
    return plan

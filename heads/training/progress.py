"""The progress of a training run as one bar over all its steps, not one per epoch."""

from typing import Any

import pytorch_lightning as pl

from heads.training.schedule import num_optimizer_steps
from store.progress import Bar


class RunProgress(pl.callbacks.ProgressBar):
    """One bar for training, in optimiser steps, and one for each test."""

    def __init__(self) -> None:
        super().__init__()
        self._bar: Bar | None = None
        self._is_hidden = False

    def disable(self) -> None:
        """Hide the bars; Lightning calls this on every rank but 0."""
        self._is_hidden = True

    def enable(self) -> None:
        self._is_hidden = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        total = num_optimizer_steps(trainer)
        self._bar = Bar(total=total, desc="train", unit="steps", initial=trainer.global_step, disable=self._is_hidden)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        assert self._bar is not None
        self._bar.set_postfix_str(f"epoch {trainer.current_epoch + 1}", refresh=False)
        self._bar.update(trainer.global_step - self._bar.n)

    def on_train_end(self, *_: Any) -> None:
        self._close()

    def on_exception(self, *_: Any) -> None:
        self._close()  # so that the error message starts on a new line

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        batches = trainer.num_test_batches
        self._bar = Bar(total=sum(batches), desc="test", unit="batches", disable=self._is_hidden)

    def on_test_batch_end(self, *_: Any, **__: Any) -> None:
        assert self._bar is not None
        self._bar.update()

    def on_test_end(self, *_: Any) -> None:
        self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

"""The training loop of every recipe, on Lightning's Trainer: steps, clipping, progress bar, resume.

Matrices inside the layers are trained with Muon (momentum, orthogonalised by Newton-Schulz iterations; K. Jordan 2024),
embeddings and norms with AdamW. Against AdamW throughout, Muon needed a quarter to a third fewer steps for the same
loss and a sixth more time per step (10 layers of 128, batch 16).
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Generic, TypeVar

import pytorch_lightning as pl
import torch
from jaxtyping import Float
from torch import Tensor, nn

from heads.training.trainer import WholeCheckpoints, quiet
from store.progress import Bar

_CHECKPOINT_S = 300.0
_WARMUP_STEPS = 50
_FINAL_SHARE = 0.02  # of the peak learning rate


Batch = TypeVar("Batch")


@dataclass(frozen=True)
class Pupil(Generic[Batch]):
    """A model in training; its layers are in its list `layers`."""

    module: nn.Module
    loss: Callable[[Batch], Float[Tensor, ""]]
    """Of a batch."""
    has_muon: bool = True
    """False: AdamW for everything; Muon computes in bfloat16, which is slow on CPUs without it."""


def fit(
    pupils: Sequence[Pupil[Batch]],
    batches: Iterator[Batch],
    *,
    title: str,
    num_steps: int,
    learning_rate: float,
    path: Path | None = None,
    key: Mapping[str, object] | None = None,
) -> None:
    """Train models on the same `num_steps` batches, each by one step per batch, or resume from the checkpoint `path`,
    which skips the batches before it; a checkpoint of a run with another `key` is refused.

    The learning rate is AdamW's peak; Muon's is 5 times as high, since its updates have unit singular values.
    """
    quiet()
    run = _Run(pupils, num_steps, learning_rate, path, dict(key or {}))
    start = run.resumed_step()
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=1,
        plugins=[WholeCheckpoints()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    with Bar(desc=title, unit="steps", total=num_steps, initial=start) as run.bar:
        trainer.fit(run, islice(batches, start, num_steps), ckpt_path=path if start else None)
    if path is not None:
        trainer.save_checkpoint(path)
    for pupil in pupils:
        pupil.module.eval()


class _Run(pl.LightningModule, Generic[Batch]):
    """The pupils and their optimisers; each batch is one step of every pupil."""

    bar: Bar

    def __init__(
        self,
        pupils: Sequence[Pupil[Batch]],
        num_steps: int,
        learning_rate: float,
        path: Path | None,
        key: dict[str, object],
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.pupil_modules = nn.ModuleList([pupil.module for pupil in pupils])
        self._pupils = pupils
        self._num_steps = num_steps
        self._path = path
        self._key = key
        self._optimisers = [_optimisers_of(pupil, learning_rate) for pupil in pupils]
        self._step = 0
        self._saved_s = time.monotonic()

    def resumed_step(self) -> int:
        """The number of steps in the checkpoint; 0 if there is none."""
        if self._path is None or not self._path.exists():
            return 0
        state = torch.load(self._path, weights_only=True, mmap=True)["run"]
        if differing := ", ".join(name for name in self._key if state["key"].get(name) != self._key[name]):
            raise ValueError(f"{self._path} belongs to a run that differs in {differing}; delete it, or change --out")
        return int(state["step"])

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return list(chain(*self._optimisers))

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        """Update every parameter once, with each pupil's gradients clipped to norm 1."""
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, batch_idx / self._num_steps)))
        warm_up = min(1.0, (batch_idx + 1) / min(_WARMUP_STEPS, self._num_steps))
        share = warm_up * (_FINAL_SHARE + (1 - _FINAL_SHARE) * cosine)
        losses = []
        for pupil, optimisers in zip(self._pupils, self._optimisers, strict=True):
            loss = pupil.loss(batch)
            self.manual_backward(loss)
            nn.utils.clip_grad_norm_([p for p in pupil.module.parameters() if p.requires_grad], 1.0)
            for optimiser in optimisers:
                for group in optimiser.param_groups:
                    group["lr"] = optimiser.defaults["lr"] * share
                optimiser.step()
                optimiser.zero_grad()
            losses.append(loss.item())
        self._step = batch_idx + 1
        self.bar.set_postfix_str(" ".join(f"{loss:.3f}" for loss in losses), refresh=False)
        self.bar.update()

    def on_train_batch_end(self, *args: object) -> None:
        if self._path is not None and time.monotonic() - self._saved_s >= _CHECKPOINT_S:
            self.trainer.save_checkpoint(self._path)
            self._saved_s = time.monotonic()

    def on_save_checkpoint(self, checkpoint: dict[str, object]) -> None:
        checkpoint["run"] = {"key": self._key, "step": self._step}


def _optimisers_of(pupil: Pupil, learning_rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, if the pupil has it, and AdamW for the rest."""
    trained = {name: p for name, p in pupil.module.named_parameters() if p.requires_grad}
    matrices = {name: p for name, p in trained.items() if pupil.has_muon and "layers." in name and p.ndim == 2}
    rest = [p for name, p in trained.items() if name not in matrices]
    adam = torch.optim.AdamW(rest, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    muon = [torch.optim.Muon(matrices.values(), lr=5 * learning_rate, weight_decay=0.1)] if matrices else []
    return [*muon, adam]

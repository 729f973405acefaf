"""The one loop in which every model of the recipes learns, on Lightning's Trainer: steps, clipping, bar, resume.

Matrices inside the layers are trained with Muon (momentum, orthogonalised by Newton-Schulz iterations; K. Jordan 2024),
embeddings and norms with AdamW. Against AdamW throughout, Muon needed a quarter to a third fewer steps for the same
loss and a sixth more time per step (10 layers of 128, batch 16).
"""

import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from jaxtyping import Float
from pytorch_lightning.callbacks import Checkpoint
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from heads.training.checkpoints import WholeCheckpoints
from heads.training.trainer import quiet
from store.progress import Bar

_CHECKPOINT_S = 300.0
_WARMUP_STEPS = 50
_LAST_RATE = 0.02  # the learning rate ends at this share of its peak


class Pupil(NamedTuple):
    """A model that learns, its layers under `layers`."""

    module: nn.Module
    lesson: Callable[[Any, int], tuple[Float[Tensor, ""], float]]
    """(loss, figure for the bar) of what was read from a batch, at a step."""
    has_muon: bool = True
    """False: AdamW for all; Muon computes in bfloat16, which is slow on a CPU without it."""


class Course(NamedTuple):
    """What decides how pupils learn, besides their batches."""

    title: str
    num_steps: int
    learning_rate: float  # the peak of AdamW's; Muon's is 5 times that, since its updates have unit singular values
    work: Path | None = None  # the folder of the checkpoint; None: none is written
    key: Mapping[str, Any] = {}  # what decides the run; a checkpoint of another is refused


def fit(
    pupils: Sequence[Pupil],
    batches: Callable[[int], Iterable[Any]],
    course: Course,
    *,
    read: Callable[[Any], Any] = lambda batch: batch,
) -> list[list[float]]:
    """Teach some models on the same batches, or continue where they were stopped.

    Args:
        pupils: models, as their seed has made them.
        batches: the batches from a step on.
        course: how they learn.
        read: what all of them learn from a batch, such as the frozen target's probabilities.

    Returns:
        The figures of each pupil at each step that was made now.

    Raises:
        ValueError: the checkpoint is of another run.
    """
    quiet()
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")  # Lightning's own
    path = None if course.work is None else course.work / "checkpoint.pt"
    start = _start(path, course.key)
    lessons = _Lessons(pupils, read, course)
    checkpoints: list[pl.Callback] = [] if path is None else [_TimedCheckpoint(path)]
    how: dict[str, Any] = {"max_epochs": 1, "accelerator": "cpu", "devices": 1, "plugins": [WholeCheckpoints()]}
    how |= dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    trainer = pl.Trainer(**how, enable_checkpointing=path is not None, callbacks=checkpoints)
    with Bar(desc=course.title, unit="steps", total=course.num_steps, initial=start) as lessons.bar:
        trainer.fit(lessons, _Batches(batches, start, course.num_steps), ckpt_path=path if start else None)
    if path is not None:
        trainer.save_checkpoint(path)
    for pupil in pupils:
        pupil.module.eval()
    return lessons.figures


def _start(path: Path | None, key: Mapping[str, Any]) -> int:
    """The number of steps in a checkpoint; 0 if there is none."""
    if path is None or not path.exists():
        return 0
    state = torch.load(path, weights_only=True, mmap=True)["course"]
    if differing := [name for name in key if state["key"].get(name) != key[name]]:
        raise ValueError(
            f"{path} is of another run, which differs in {', '.join(differing)}; choose another --out, or delete it"
        )
    return int(state["step"])


class _TimedCheckpoint(Checkpoint):
    """A checkpoint after a step, every few minutes."""

    def __init__(self, path: Path) -> None:
        self.path, self._saved_s = path, time.monotonic()

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if time.monotonic() - self._saved_s >= _CHECKPOINT_S:
            trainer.save_checkpoint(self.path)
            self._saved_s = time.monotonic()


class _Batches:
    """A loader that begins where a stopped run was, which Lightning therefore need not skip to."""

    def __init__(self, batches: Callable[[int], Iterable[Any]], start: int, num_steps: int) -> None:
        self._batches, self._start, self._num_steps = batches, start, num_steps

    def __len__(self) -> int:
        return self._num_steps

    def __iter__(self) -> Iterator[Any]:
        return islice(self._batches(self._start), self._num_steps - self._start)


class _Lessons(pl.LightningModule):
    """Every pupil with its optimisers: each batch is read once, and each pupil makes a step on it."""

    bar: Bar

    def __init__(self, pupils: Sequence[Pupil], read: Callable[[Any], Any], course: Course) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.modules_of_pupils = nn.ModuleList([pupil.module for pupil in pupils])
        self.figures: list[list[float]] = []
        self._pupils, self._read, self._course = pupils, read, course
        self._optimisers = [self._optimisers_of(pupil) for pupil in pupils]
        rate = lambda step: self._share(step)  # noqa: E731  # LambdaLR would save the attributes of a method
        self._schedules = [[LambdaLR(each, rate) for each in optimisers] for optimisers in self._optimisers]
        self._step = 0

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """One update of every parameter, each pupil's gradients clipped to norm 1."""
        reading = self._read(batch)
        figures = []
        for pupil, optimisers, schedules in zip(self._pupils, self._optimisers, self._schedules, strict=True):
            loss, figure = pupil.lesson(reading, batch_idx)
            self.manual_backward(loss)
            torch.nn.utils.clip_grad_norm_([p for p in pupil.module.parameters() if p.requires_grad], 1.0)
            for optimiser, schedule in zip(optimisers, schedules, strict=True):
                optimiser.step()
                optimiser.zero_grad()
                schedule.step()
            figures.append(figure)
        self._step = batch_idx + 1
        self.figures.append(figures)
        self.bar.set_postfix_str(" ".join(f"{figure:.3f}" for figure in figures), refresh=False)
        self.bar.update()

    def configure_optimizers(self) -> Any:
        return list(chain(*self._optimisers)), list(chain(*self._schedules))

    def _optimisers_of(self, pupil: Pupil) -> list[torch.optim.Optimizer]:
        """Muon for the layers' matrices, if it has it, and AdamW for the rest."""
        rate, named = self._course.learning_rate, list(pupil.module.named_parameters())
        matrices = [p for name, p in named if pupil.has_muon and "layers." in name and p.ndim == 2 and p.requires_grad]
        rest = [p for _, p in named if p.requires_grad and all(p is not matrix for matrix in matrices)]
        adam = torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
        return [torch.optim.Muon(matrices, lr=5 * rate, weight_decay=0.1), adam] if pupil.has_muon else [adam]

    def _share(self, step: int) -> float:
        """Linear warm-up, then a cosine."""
        num_steps = self._course.num_steps
        falling = _LAST_RATE + (1 - _LAST_RATE) * 0.5 * (1 + math.cos(math.pi * min(1.0, step / num_steps)))
        return min(1.0, (step + 1) / min(_WARMUP_STEPS, num_steps)) * falling

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["course"] = {"key": dict(self._course.key), "step": self._step}

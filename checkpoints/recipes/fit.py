"""The training loop of every recipe: steps, clipping, progress bar, resume.

Matrices inside the layers are trained with Muon (momentum, orthogonalised by Newton-Schulz iterations; K. Jordan 2024),
embeddings and norms with AdamW. Against AdamW throughout, Muon needed a quarter to a third fewer steps for the same
loss and a sixth more time per step (10 layers of 128, batch 16).
"""

import io
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from store.progress import Bar
from store.shards import write_atomic

_CHECKPOINT_S = 300.0
_WARMUP_STEPS = 50
_FINAL_SHARE = 0.02  # of the peak learning rate


class Pupil(NamedTuple):
    """A model in training; its layers are in its list `layers`."""

    module: nn.Module
    loss: Callable[[Any], Float[Tensor, ""]]
    """Of a batch."""
    has_muon: bool = True
    """False: AdamW for everything; Muon computes in bfloat16, which is slow on CPUs without it."""


def fit(
    pupils: Sequence[Pupil],
    batches: Iterator[Any],
    *,
    title: str,
    num_steps: int,
    learning_rate: float,
    path: Path | None = None,
    key: Mapping[str, Any] | None = None,
) -> None:
    """Train models on the same batches, each by one step per batch, or resume their training from a checkpoint.

    Args:
        pupils: the models, initialised.
        batches: at least `num_steps`; those of steps before the checkpoint are skipped.
        title: for the progress bar.
        num_steps: steps of the whole run.
        learning_rate: the peak of AdamW; Muon's is 5 times as high, since its updates have unit singular values.
        path: of the checkpoint; None writes none.
        key: values that decide the run; a checkpoint with other values is refused.
    """
    optimisers = [_optimisers_of(pupil, learning_rate) for pupil in pupils]
    stateful = [pupil.module.train() for pupil in pupils] + [one for of_pupil in optimisers for one in of_pupil]
    start = _resumed(stateful, path, dict(key or {})) if path is not None and path.exists() else 0
    saved_s = time.monotonic()
    with Bar(desc=title, unit="steps", total=num_steps, initial=start) as bar:
        for step, batch in enumerate(islice(batches, start, num_steps), start):
            share = _share_of_peak(step, num_steps)
            losses = [
                _updated(pupil, of_pupil, batch, share) for pupil, of_pupil in zip(pupils, optimisers, strict=True)
            ]
            bar.set_postfix_str(" ".join(f"{loss:.3f}" for loss in losses), refresh=False)
            bar.update()
            is_last, is_due = step + 1 == num_steps, time.monotonic() - saved_s >= _CHECKPOINT_S
            if path is not None and (is_last or is_due):
                state = {"key": dict(key or {}), "step": step + 1, "states": [one.state_dict() for one in stateful]}
                torch.save(state, buffer := io.BytesIO())
                write_atomic(path, buffer.getbuffer())
                saved_s = time.monotonic()
    for pupil in pupils:
        pupil.module.eval()


def _resumed(stateful: Sequence[Any], path: Path, key: Mapping[str, Any]) -> int:
    """Load a checkpoint; the number of its steps."""
    checkpoint = torch.load(path, weights_only=True)
    if differing := ", ".join(name for name in key if checkpoint["key"].get(name) != key[name]):
        raise ValueError(f"{path} belongs to a run that differs in {differing}; delete it, or change --out")
    for one, state in zip(stateful, checkpoint["states"], strict=True):
        one.load_state_dict(state)
    return int(checkpoint["step"])


def _share_of_peak(step: int, num_steps: int) -> float:
    warm_up = min(1.0, (step + 1) / min(_WARMUP_STEPS, num_steps))
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, step / num_steps)))
    return warm_up * (_FINAL_SHARE + (1 - _FINAL_SHARE) * cosine)


def _updated(pupil: Pupil, optimisers: Sequence[torch.optim.Optimizer], batch: Any, share: float) -> float:
    """Update every parameter once, with gradients clipped to norm 1, at a share of the learning rate; the loss."""
    loss = pupil.loss(batch)
    loss.backward()
    nn.utils.clip_grad_norm_([p for p in pupil.module.parameters() if p.requires_grad], 1.0)
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["lr"] = optimiser.defaults["lr"] * share
        optimiser.step()
        optimiser.zero_grad()
    return loss.item()


def _optimisers_of(pupil: Pupil, learning_rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, if the pupil has it, and AdamW for the rest."""
    trained = {name: p for name, p in pupil.module.named_parameters() if p.requires_grad}
    matrices = {name: p for name, p in trained.items() if pupil.has_muon and "layers." in name and p.ndim == 2}
    rest = [p for name, p in trained.items() if name not in matrices]
    adam = torch.optim.AdamW(rest, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    muon = [torch.optim.Muon(matrices.values(), lr=5 * learning_rate, weight_decay=0.1)] if matrices else []
    return [*muon, adam]

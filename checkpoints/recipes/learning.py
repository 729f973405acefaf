"""How a draft learns from readings of its target (`checkpoints.recipes.readings`): batches, the loss at each depth, and
steps that go on where they were stopped.

The loss is KL(p' || q), p' the target's NUM_LIKELIEST tokens as far as the draft's vocabulary has them, made to sum to
1, mixed with 1 - acceptance_rate, which is what decoding meets and alone would teach a fresh draft nothing. Positions
where the vocabulary has less than a twentieth of the target's probability do not count for the divergence. Of a draft
that is taught several depths, as EAGLE-3's "training-time test" has it (arXiv 2503.01840), depth k weighs .8^k.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional

from checkpoints.recipes.fit import Course, Pupil, fit
from checkpoints.recipes.readings import Reading, readings_in
from store.shards import read_sidecar

NUM_DEPTHS = 5  # depths of a draft that are measured
_DEPTH_WEIGHT = 0.8
_ACCEPTANCE_SHARE = 0.5  # of the loss; the divergence has the rest
_LEAST_MASS = 0.05  # probability of the target that the vocabulary must have where a position counts
_SHARDS_TOGETHER = 4  # shards whose texts are shuffled together


@dataclass(frozen=True, kw_only=True)
class Distillation:
    """What decides a draft, but for its shape, its target, its texts and the machine."""

    num_depths: int = 3
    """Depths that it is taught, where it has several."""
    num_epochs: int = 6
    num_deep_epochs: int = 2
    """The last epochs, which teach all depths; those before teach the first alone, in a third of the time."""
    batch_size: int = 2
    learning_rate: float = 2e-3
    seed: int = 0
    is_mixed: bool = True
    """bfloat16 where torch's autocast has it: half the time on a CPU that computes in it."""

    def depths_of(self, epoch: int) -> int:
        """Depths that an epoch teaches."""
        return self.num_depths if epoch >= self.num_epochs - self.num_deep_epochs else 1


class Batch(NamedTuple):
    """Some readings, padded on the right."""

    ids: Int[Tensor, "batch position"]
    features: Float[Tensor, "batch position feature"]
    is_learned: Bool[Tensor, "batch position"]
    """True at i where token i + 1 belongs to the response and NUM_DEPTHS tokens are before it."""
    likeliest: Int[Tensor, "batch position top"]
    log_p: Float[Tensor, "batch position top"]


class Loss(NamedTuple):
    """What a batch says of a draft at each depth."""

    total: Float[Tensor, ""]
    divergences: list[float]
    """KL(p' || q), in nats per token."""
    acceptance_rates: list[float]
    """Sum of min(p, q) over the target's likeliest tokens, at temperature 1."""


@runtime_checkable
class Draft(Protocol):
    """A draft that learns."""

    module: nn.Module

    def said(self, batch: Batch, num_depths: int) -> Iterator[Float[Tensor, "learned vocab"]]:
        """Logits at the learned positions of a batch, as the first, second, … token of a draft."""

    def places(self, tokens: Int[Tensor, "learned top"]) -> Int[Tensor, "learned top"]:
        """Where its vocabulary has the target's tokens; -1: nowhere."""


def loss_of(draft: Draft, batch: Batch, num_depths: int) -> Loss:
    """The loss of some depths, the first weighed most."""
    p = batch.log_p[batch.is_learned].float().exp()
    places = draft.places(batch.likeliest[batch.is_learned])
    p = p * (places >= 0)
    mass, places = p.sum(-1), places.clamp(min=0)
    counts = (mass >= _LEAST_MASS).float()
    aim = p / mass.clamp(min=1e-6).unsqueeze(-1)
    entropy = -(aim * aim.clamp(min=1e-9).log()).sum(-1)
    total, divergences, rates = torch.zeros(()), [], []
    for depth, logits in enumerate(draft.said(batch, num_depths)):
        log_q = logits.float().log_softmax(-1).gather(-1, places)
        divergence = ((-(aim * log_q).sum(-1) - entropy) * counts).sum() / counts.sum().clamp(min=1)
        rate = torch.minimum(log_q.exp(), p).sum(-1).mean()
        total = total + _DEPTH_WEIGHT**depth * torch.lerp(divergence, 1 - rate, _ACCEPTANCE_SHARE)
        divergences.append(divergence.item())
        rates.append(rate.item())
    return Loss(total, divergences, rates)


def learn(draft: Draft, paths: Sequence[Path], directory: Path, distillation: Distillation) -> dict[str, Any]:
    """Teach a draft, or continue; its figures on the last shard of the readings, which is held out.

    Raises:
        ValueError: fewer than two shards; a checkpoint of another run.
    """
    if len(paths) < 2:
        raise ValueError(f"there are {len(paths)} shards of readings, and one is held out; read more responses")
    taught, held_out = paths[:-1], paths[-1:]
    plan = [
        (group, distillation.depths_of(epoch))
        for epoch in range(distillation.num_epochs)
        for group in _groups(taught, distillation, epoch)
    ]
    num_steps = sum(group.num_batches for group, _ in plan)
    key = asdict(distillation) | {
        "readings": [read_sidecar(path, keys=("key",))["key"] for path in paths],
        "shapes": {name: list(tensor.shape) for name, tensor in draft.module.state_dict().items()},
    }
    course = Course("the draft learns", num_steps, distillation.learning_rate, directory, key)

    def lesson(batch: tuple[Batch, int], step: int) -> tuple[Float[Tensor, ""], float]:
        with torch.autocast("cpu", torch.bfloat16, enabled=distillation.is_mixed):
            loss = loss_of(draft, *batch)
        return loss.total, loss.divergences[0]

    fit([Pupil(draft.module, lesson, has_muon=False)], lambda start: _batches(plan, start), course)
    return {"steps": num_steps, **_measured(draft, held_out, distillation), **asdict(distillation)}


def _batches(plan: Sequence[tuple["Group", int]], start: int) -> Iterator[tuple[Batch, int]]:
    """The batches of all groups from a step on, each with the depths that it teaches."""
    for group, num_depths in plan:
        if start < group.num_batches:
            yield from ((batch, num_depths) for batch in group.batches(start))
        start = max(0, start - group.num_batches)


@dataclass(frozen=True)
class Group:
    """Some shards whose texts are shuffled together, into batches of about one length."""

    paths: tuple[Path, ...]
    batch_size: int
    seed: str

    @property
    def num_batches(self) -> int:
        """Batches of the group, the last of which may be smaller."""
        num_texts = sum(read_sidecar(path, keys=("texts",))["texts"] for path in self.paths)
        return -(-num_texts // self.batch_size)

    def batches(self, start: int = 0) -> Iterator[Batch]:
        """The batches from place `start` on, in an order that the seed decides."""
        rng = random.Random(self.seed)
        readings = [reading for path in self.paths for reading in readings_in(path)]
        readings.sort(key=lambda reading: len(reading.ids) + rng.random())
        parts = [readings[place : place + self.batch_size] for place in range(0, len(readings), self.batch_size)]
        rng.shuffle(parts)
        yield from map(_padded, parts[start:])


def _groups(paths: Sequence[Path], distillation: Distillation, epoch: int) -> Iterator[Group]:
    """The groups of an epoch, whose order seed and epoch decide."""
    order = list(paths)
    random.Random(f"{distillation.seed} {epoch}").shuffle(order)
    for start in range(0, len(order), _SHARDS_TOGETHER):
        group = tuple(order[start : start + _SHARDS_TOGETHER])
        yield Group(group, distillation.batch_size, f"{distillation.seed} {epoch} {start}")


def _padded(readings: Sequence[Reading]) -> Batch:
    pad = torch.nn.utils.rnn.pad_sequence
    likeliest, log_p, is_learned = [], [], []
    for reading in readings:
        start = reading.num_prompt - 1  # the target speaks of response token i at position start + i
        likeliest.append(functional.pad(reading.likeliest, (0, 0, start, 1)))
        log_p.append(functional.pad(reading.log_p.float(), (0, 0, start, 1), value=float("-inf")))
        place = torch.arange(len(reading.ids))
        is_learned.append((place >= max(start, NUM_DEPTHS + 1)) & (place < len(reading.ids) - 1))
    return Batch(
        pad([reading.ids for reading in readings], batch_first=True),
        pad([reading.features.float() for reading in readings], batch_first=True),
        pad(is_learned, batch_first=True),
        pad(likeliest, batch_first=True),
        pad(log_p, batch_first=True, padding_value=float("-inf")),
    )


@torch.no_grad()
def _measured(draft: Draft, paths: Sequence[Path], distillation: Distillation) -> dict[str, list[float]]:
    """Mean KL and acceptance_rate at each depth on held-out readings."""
    groups = _groups(paths, distillation, 0)
    losses = [loss_of(draft, batch, NUM_DEPTHS) for group in groups for batch in group.batches()]
    columns = {name: [getattr(loss, name) for loss in losses] for name in ("divergences", "acceptance_rates")}
    return {
        name: [round(sum(values) / len(losses), 4) for values in zip(*rows, strict=True)]
        for name, rows in columns.items()
    }

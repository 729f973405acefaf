"""Training a draft on readings of its target (`checkpoints.recipes.readings`), at one or several depths.

The loss is the mean of KL(p' || q) and 1 - acceptance_rate. p' is the target's distribution over its NUM_LIKELIEST
tokens that are in the draft's vocabulary. acceptance_rate is what decoding needs, but alone it teaches a new draft
nothing. Positions where the vocabulary has less than a twentieth of the target's probability are left out of the
divergence. Depth k weighs 0.8^k, as in EAGLE-3's "training-time test" (arXiv 2503.01840).
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional

from checkpoints.recipes.feature_drafts import DEPTH_WEIGHT
from checkpoints.recipes.fit import Pupil, fit
from checkpoints.recipes.readings import Reading, load_readings
from checkpoints.recipes.texts import NUM_DEPTHS
from store.shards import read_sidecar

_ACCEPTANCE_SHARE = 0.5  # of the loss; the divergence has the rest
_MIN_MASS = 0.05  # probability of the target in the draft's vocabulary
_SHARDS_TOGETHER = 4  # shards whose texts are shuffled together


@dataclass(frozen=True, kw_only=True)
class Distillation:
    """What decides a draft, besides its shape, its target, its texts and the machine."""

    num_depths: int = 3
    num_epochs: int = 6
    num_deep_epochs: int = 2
    """The last epochs, which train all depths; the others train the first alone, in a third of the time."""
    batch_size: int = 2
    learning_rate: float = 2e-3
    seed: int = 0
    is_mixed: bool = True
    """Compute in bfloat16 where torch's autocast does: half the time on CPUs with bfloat16."""


class Batch(NamedTuple):
    """Readings, padded on the right."""

    ids: Int[Tensor, "batch position"]
    features: Float[Tensor, "batch position feature"]
    is_learned: Bool[Tensor, "batch position"]
    """True at i where token i + 1 belongs to the response and NUM_DEPTHS tokens are before it."""
    likeliest: Int[Tensor, "batch position top"]
    log_p: Float[Tensor, "batch position top"]


@runtime_checkable
class Draft(Protocol):
    """A draft that can be trained on readings."""

    module: nn.Module
    index_of: Int[Tensor, " vocab"]
    """Index of each token of the target in the draft's vocabulary; -1: it is not there."""

    def logits(self, batch: Batch, num_depths: int) -> Iterator[Float[Tensor, "learned reduced"]]:
        """Logits at the learned positions, as the first, second, … token of drafts."""

    def save(self, directory: Path) -> None: ...


def divergences_and_rates(
    draft: Draft, batch: Batch, num_depths: int
) -> tuple[Float[Tensor, " depth"], Float[Tensor, " depth"]]:
    """(KL(p' || q) in nats per token, acceptance_rate at temperature 1) of a batch, by depth."""
    p = batch.log_p[batch.is_learned].float().exp()
    indices = draft.index_of[batch.likeliest[batch.is_learned]]
    p = p * (indices >= 0)
    mass, indices = p.sum(-1), indices.clamp(min=0)
    is_counted = (mass >= _MIN_MASS).float()
    renormalised = p / mass.clamp(min=1e-6).unsqueeze(-1)
    entropy = -(renormalised * renormalised.clamp(min=1e-9).log()).sum(-1)
    divergences, rates = [], []
    for logits in draft.logits(batch, num_depths):
        log_q = logits.float().log_softmax(-1).gather(-1, indices)
        divergence = -(renormalised * log_q).sum(-1) - entropy
        divergences.append((divergence * is_counted).sum() / is_counted.sum().clamp(min=1))
        rates.append(torch.minimum(log_q.exp(), p).sum(-1).mean())
    return torch.stack(divergences), torch.stack(rates)


def distil(draft: Draft, paths: Sequence[Path], directory: Path, distillation: Distillation) -> dict[str, Any]:
    """Train a draft, or resume; returns its figures on the last shard of the readings, which is held out."""
    if len(paths) < 2:
        raise ValueError(f"there are {len(paths)} shards of readings, but 2 are needed; use more responses")
    *training, held_out = paths
    groups = [group for epoch in range(distillation.num_epochs) for group in _groups(training, distillation, epoch)]
    num_steps = sum(group.num_batches for group in groups)

    def loss(batch_and_depths: tuple[Batch, int]) -> Float[Tensor, ""]:
        with torch.autocast("cpu", torch.bfloat16, enabled=distillation.is_mixed):
            divergences, rates = divergences_and_rates(draft, *batch_and_depths)
        weights = torch.tensor([DEPTH_WEIGHT**depth for depth in range(len(rates))])
        return (weights * torch.lerp(divergences, 1 - rates, _ACCEPTANCE_SHARE)).sum()

    fit(
        [Pupil(draft.module, loss, has_muon=False)],
        partial(_batches, groups),
        title="train the draft",
        num_steps=num_steps,
        learning_rate=distillation.learning_rate,
        directory=directory,
        key=asdict(distillation)
        | {
            "readings": [read_sidecar(path, keys=("key",))["key"] for path in paths],
            "shapes": {name: list(tensor.shape) for name, tensor in draft.module.state_dict().items()},
        },
    )
    return {"steps": num_steps, **_figures(draft, held_out, distillation), **asdict(distillation)}


class _Group(NamedTuple):
    """Shards whose texts are shuffled together, as batches of texts of about one length."""

    paths: Sequence[Path]
    num_batches: int
    batch_size: int
    num_depths: int
    seed: str

    def batches(self, start: int = 0) -> Iterator[tuple[Batch, int]]:
        """The batches from `start` on, each with the number of depths to train."""
        rng = random.Random(self.seed)
        readings = [reading for path in self.paths for reading in load_readings(path)]
        readings.sort(key=lambda reading: len(reading.ids) + rng.random())
        parts = [readings[first : first + self.batch_size] for first in range(0, len(readings), self.batch_size)]
        rng.shuffle(parts)
        return ((_padded(part), self.num_depths) for part in parts[start:])


def _groups(paths: Sequence[Path], distillation: Distillation, epoch: int) -> Iterator[_Group]:
    order, size = list(paths), distillation.batch_size
    random.Random(f"{distillation.seed} {epoch}").shuffle(order)
    is_deep = epoch >= distillation.num_epochs - distillation.num_deep_epochs
    for start in range(0, len(order), _SHARDS_TOGETHER):
        group = order[start : start + _SHARDS_TOGETHER]
        num_texts = sum(read_sidecar(path, keys=("texts",))["texts"] for path in group)
        seed = f"{distillation.seed} {epoch} {start}"
        yield _Group(group, -(-num_texts // size), size, distillation.num_depths if is_deep else 1, seed)


def _batches(groups: Sequence[_Group], start: int) -> Iterator[tuple[Batch, int]]:
    for group in groups:
        if start < group.num_batches:
            yield from group.batches(start)
        start = max(0, start - group.num_batches)


def _padded(readings: Sequence[Reading]) -> Batch:
    likeliest, log_p, is_learned = [], [], []
    for reading in readings:
        start = reading.num_prompt - 1  # the position that predicts the first response token
        likeliest.append(functional.pad(reading.likeliest, (0, 0, start, 1)))
        log_p.append(functional.pad(reading.log_p.float(), (0, 0, start, 1), value=float("-inf")))
        position = torch.arange(len(reading.ids))
        is_learned.append((position >= max(start, NUM_DEPTHS + 1)) & (position < len(reading.ids) - 1))
    ids, features = [reading.ids for reading in readings], [reading.features.float() for reading in readings]
    pad = partial(nn.utils.rnn.pad_sequence, batch_first=True)
    return Batch(pad(ids), pad(features), pad(is_learned), pad(likeliest), pad(log_p, padding_value=float("-inf")))


@torch.no_grad()
def _figures(draft: Draft, path: Path, distillation: Distillation) -> dict[str, list[float]]:
    """Mean divergence and acceptance_rate by depth."""
    [group] = _groups([path], distillation, 0)
    by_batch = zip(*(divergences_and_rates(draft, batch, NUM_DEPTHS) for batch, _ in group.batches()), strict=True)
    divergences, rates = (torch.stack(rows).double().mean(0).tolist() for rows in by_batch)
    figures = {"divergences": divergences, "acceptance_rates": rates}
    return {name: [round(value, 4) for value in values] for name, values in figures.items()}

"""An EAGLE-3 draft with a reduced vocabulary, taught on readings of its target (`checkpoints.recipes.readings`).

As in EAGLE-3 (arXiv 2503.01840) the draft reads three of the target's layers, is taught several depths on its own
outputs ("training-time test"), and its loss is the cross-entropy to the target's distribution over the reduced
vocabulary, here as KL(p' || q) with p' the target's NUM_LIKELIEST tokens as far as the vocabulary has them, made to sum
to 1; depths weigh .8^k. Departures: the output head is the target's own rows, frozen, so that what is trained, and
saved, is one layer; positions where the vocabulary has less than a twentieth of the target's probability are left out.

A run that was stopped goes on from its last checkpoint, some minutes ago, in the same steps.
"""

import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel

from checkpoints.recipes.feature_drafts import unrolled
from checkpoints.recipes.readings import Reading, likeliest_tokens, readings_in
from checkpoints.recipes.training import Optimiser
from lm.features.eagle import Eagle3
from store.progress import Bar
from store.shards import atomic_directory, atomic_file, read_sidecar

NUM_DEPTHS = 5
"""Depths of a draft that are measured."""
_DEPTH_WEIGHT = 0.8
_LEAST_MASS = 0.05
"""Probability of the target that the vocabulary must have where a position counts."""
_SHARDS_TOGETHER = 4
"""Shards whose texts are shuffled together."""
_CHECKPOINT_S = 300.0
_NO_KEYS = ("architectures", "dtype", "transformers_version")


@dataclass(frozen=True, kw_only=True)
class ReducedRecipe:
    """What decides the draft, but for its target, its texts and the machine."""

    vocab_size: int = 8192
    num_depths: int = 3
    num_epochs: int = 4
    batch_size: int = 8
    learning_rate: float = 1e-3
    seed: int = 0
    is_mixed: bool = True
    """bfloat16 where torch's autocast has it: half the time on a CPU that computes in it."""


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


class Reduced:
    """A draft, the vocabulary it draws from, and how it learns."""

    def __init__(self, target: PreTrainedModel, layer_ids: Sequence[int], target_ids: Int[Tensor, " reduced"]) -> None:
        """Args:
        target: whose embeddings, output rows and last norm it begins with.
        layer_ids: layers of the target that it reads.
        target_ids: the target's ids of its vocabulary.
        """
        of_target = target.config.get_text_config()
        keys = {name: value for name, value in of_target.to_diff_dict().items() if name not in _NO_KEYS}
        keys = {name: value for name, value in keys.items() if not name.startswith("_")}
        config = LlamaConfig(**keys | {"num_hidden_layers": 1, "tie_word_embeddings": False})
        config.draft_vocab_size, config.eagle_aux_hidden_state_layer_ids = len(target_ids), list(layer_ids)
        self.draft = Eagle3(config, tuple(layer_ids), target_size=of_target.hidden_size)
        body: Any = target.base_model
        self.draft.norm.load_state_dict(body.norm.state_dict())
        self.draft.reduce(target_ids)
        self.draft.bind(target)
        self._places = torch.full((of_target.vocab_size,), -1)
        self._places[target_ids] = torch.arange(len(target_ids))

    def loss(self, batch: Batch, num_depths: int) -> Loss:
        """The loss of some depths, the first weighed most."""
        is_learned = batch.is_learned[:, 1:]  # entry t says token t + 2, of which the target speaks at t + 1
        p = batch.log_p[:, 1:][is_learned].float().exp()
        places = self._places[batch.likeliest[:, 1:][is_learned]]
        p = p * (places >= 0)
        mass, places = p.sum(-1), places.clamp(min=0)
        counts = (mass >= _LEAST_MASS).float()
        aim = p / mass.clamp(min=1e-6).unsqueeze(-1)
        entropy = -(aim * aim.clamp(min=1e-9).log()).sum(-1)
        total, divergences, rates = torch.zeros(()), [], []
        for depth, outputs in enumerate(islice(unrolled(self.draft, batch.ids, batch.features), num_depths)):
            assert self.draft.lm_head is not None
            log_q = self.draft.lm_head(outputs.hidden[is_learned]).float().log_softmax(-1).gather(-1, places)
            divergence = ((-(aim * log_q).sum(-1) - entropy) * counts).sum() / counts.sum().clamp(min=1)
            total = total + _DEPTH_WEIGHT**depth * divergence
            divergences.append(divergence.item())
            rates.append(torch.minimum(log_q.detach().exp(), p).sum(-1).mean().item())
        return Loss(total, divergences, rates)

    def save(self, directory: Path) -> None:
        """Write the draft in bfloat16 in the layout of EAGLE-3; rows that are the target's own are left out."""
        target_ids = self.draft.target_ids
        assert target_ids is not None
        config = self.draft.config.to_diff_dict() | {"architectures": ["LlamaForCausalLMEagle3"], "dtype": "bfloat16"}
        tensors = {
            name.replace("layers.0.", "midlayer."): tensor.detach().bfloat16().contiguous()
            for name, tensor in self.draft.state_dict().items()
            if not name.startswith("lm_head.")
        }
        tensors["d2t"] = target_ids - torch.arange(len(target_ids))
        with atomic_directory(directory) as folder:
            (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def teach_reduced(
    target: PreTrainedModel,
    paths: Sequence[Path],
    directory: Path,
    *,
    layer_ids: Sequence[int],
    recipe: ReducedRecipe,
) -> tuple[Reduced, dict[str, Any]]:
    """Train a draft on readings, the last shard of which is held out; the draft, and its figures there.

    Args:
        target: the model that the draft is for.
        paths: shards of readings, two or more.
        directory: the folder of the checkpoint and of the vocabulary.
        layer_ids: layers that the readings are of.
        recipe: how it learns.

    Raises:
        ValueError: fewer than two shards; a checkpoint of another recipe.
    """
    if len(paths) < 2:
        raise ValueError(f"there are {len(paths)} shards of readings, and one is held out; read more responses")
    target.requires_grad_(False)
    torch.manual_seed(recipe.seed)
    vocab_size = target.config.get_text_config().vocab_size
    taught, held_out = paths[:-1], paths[-1:]
    reduced = Reduced(target, layer_ids, likeliest_tokens(taught, recipe.vocab_size, vocab_size=vocab_size))
    groups = [group for epoch in range(recipe.num_epochs) for group in _groups(taught, recipe, epoch)]
    *firsts, num_steps = accumulate((group.num_batches for group in groups), initial=0)
    optimiser = Optimiser(reduced.draft, recipe.learning_rate, num_steps, has_muon=False)
    checkpoint = Checkpoint(directory / "checkpoint.pt", recipe, reduced, optimiser)
    step = checkpoint.load()
    with Bar(desc="the draft learns", unit="steps", total=num_steps, initial=step) as bar:
        for group, first, end in zip(groups, firsts, [*firsts[1:], num_steps], strict=True):
            for batch in group.batches(step - first) if step < end else ():
                with torch.autocast("cpu", torch.bfloat16, enabled=recipe.is_mixed):
                    loss = reduced.loss(batch, recipe.num_depths)
                optimiser.step(loss.total)
                step += 1
                bar.set_postfix_str(f"KL {loss.divergences[0]:.2f}, acceptance {loss.acceptance_rates[0]:.2f}")
                bar.update()
                checkpoint.keep_now_and_then(step)
    checkpoint.keep(step)
    reduced.draft.eval()
    return reduced, {"steps": step, **_measured(reduced, held_out, recipe), **asdict(recipe)}


class Checkpoint:
    """The state of a run, written every few minutes."""

    def __init__(self, path: Path, recipe: ReducedRecipe, reduced: Reduced, optimiser: Optimiser) -> None:
        self._path, self._recipe, self._reduced, self._optimiser = path, asdict(recipe), reduced, optimiser
        self._kept_s = time.monotonic()

    def load(self) -> int:
        """Take the state that is there, if there is one; the number of its steps.

        Raises:
            ValueError: it is of another recipe.
        """
        if not self._path.exists():
            return 0
        state = torch.load(self._path)
        if state["recipe"] != self._recipe:
            raise ValueError(
                f"{self._path} is of another recipe, {state['recipe']}; choose another folder, or delete it"
            )
        self._reduced.draft.load_state_dict(state["draft"])
        self._optimiser.load_state_dict(state["optimiser"])
        return int(state["step"])

    def keep_now_and_then(self, step: int) -> None:
        """Write the state, if that was some minutes ago."""
        if time.monotonic() - self._kept_s >= _CHECKPOINT_S:
            self.keep(step)

    def keep(self, step: int) -> None:
        """Write the state."""
        state = {"recipe": self._recipe, "step": step, "draft": self._reduced.draft.state_dict()}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(self._path) as file:
            torch.save(state | {"optimiser": self._optimiser.state_dict()}, file)
        self._kept_s = time.monotonic()


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


def _groups(paths: Sequence[Path], recipe: ReducedRecipe, epoch: int) -> Iterator[Group]:
    """The groups of an epoch, whose order seed and epoch decide."""
    order = list(paths)
    random.Random(f"{recipe.seed} {epoch}").shuffle(order)
    for start in range(0, len(order), _SHARDS_TOGETHER):
        yield Group(tuple(order[start : start + _SHARDS_TOGETHER]), recipe.batch_size, f"{recipe.seed} {epoch} {start}")


def _padded(readings: Sequence[Reading]) -> Batch:
    pad = torch.nn.utils.rnn.pad_sequence
    likeliest, log_p, is_learned = [], [], []
    for reading in readings:
        start = reading.num_prompt - 1  # the target speaks of response token i at position start + i
        before, after = start, 1
        likeliest.append(torch.nn.functional.pad(reading.likeliest, (0, 0, before, after)))
        log_p.append(torch.nn.functional.pad(reading.log_p.float(), (0, 0, before, after), value=float("-inf")))
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
def _measured(reduced: Reduced, paths: Sequence[Path], recipe: ReducedRecipe) -> dict[str, list[float]]:
    """Mean KL and acceptance_rate at each depth on held-out readings."""
    losses = [reduced.loss(batch, NUM_DEPTHS) for group in _groups(paths, recipe, 0) for batch in group.batches()]
    return {
        name: [
            round(sum(values) / len(losses), 4)
            for values in zip(*(getattr(loss, name) for loss in losses), strict=True)
        ]
        for name in ("divergences", "acceptance_rates")
    }

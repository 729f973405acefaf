"""Training a draft on readings of its target at one or several depths.

Readings are a large target's features and predictions on its own responses, computed once and kept in shards, so that
training a draft costs no forwards of the target:

    features    the residual stream after the layers that the draft reads, at every token
    likeliest   the NUM_LIKELIEST most probable next tokens at temperature 1, and their log-probabilities, at every
                position whose next token belongs to the response

A shard is `readings-NNNNN.safetensors` with its sum and holds a fixed range of texts; a stopped run resumes with the
first missing shard.

The loss is the mean of KL(p' || q) and 1 - acceptance_rate. p' is the target's distribution over its NUM_LIKELIEST
tokens that are in the draft's vocabulary. acceptance_rate is what decoding needs, but alone it teaches a new draft
nothing. Positions where the vocabulary has less than a twentieth of the target's probability are left out of the
divergence. Depth k weighs 0.8^k, as in EAGLE-3's "training-time test" (arXiv 2503.01840).
"""

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from checkpoints.recipes.feature_drafts import DEPTH_WEIGHT
from checkpoints.recipes.fit import Pupil, fit
from checkpoints.recipes.texts import NUM_DEPTHS
from data_gen.prompts.prompt import json_lines
from store.progress import Bar
from store.shards import is_whole, read_sidecar, write_shard

NUM_LIKELIEST = 64
_TEXTS_PER_SHARD = 128
_BATCH_SIZE = 8
_SIGMA_OF_MEDIAN = 1.4826  # standard deviation of a normal over the median of its absolute values
_ACCEPTANCE_SHARE = 0.5  # of the loss; the divergence has the rest
_MIN_MASS = 0.05  # probability of the target in the draft's vocabulary
_SHARDS_TOGETHER = 4  # shards whose texts are shuffled together


class Text(NamedTuple):
    """A prompt and a response of the target."""

    prompt_ids: list[int]
    response_ids: list[int]


class Reading(NamedTuple):
    """The target's features and predictions on one text."""

    ids: Int[Tensor, " position"]
    num_prompt: int
    features: Float[Tensor, "position feature"]
    likeliest: Int[Tensor, "response top"]
    """At i: the most probable tokens at the position of response token i."""
    log_p: Float[Tensor, "response top"]


def read_responses(path: Path) -> list[Text]:
    """The responses in a file that `acceptance-heads responses` wrote."""
    texts = []
    for number, record in json_lines(path):
        if not record.keys() >= {"prompt_ids", "response_ids"}:
            remedy = f"write such a file with `acceptance-heads responses --out {path.name}`"
            raise ValueError(f"{path}:{number} has no prompt_ids and response_ids; {remedy}")
        texts.append(Text(record["prompt_ids"], record["response_ids"]))
    return [text for text in texts if text.response_ids]


def without_leakage(texts: Sequence[Text]) -> list[Text]:
    """Drop responses that share a prompt with the last shard, which is held out, to prevent leakage; the last response
    to each of its prompts remains.
    """
    remaining: list[Text] = []
    held_out: set[tuple[int, ...]] = set()
    for text in reversed(texts):
        if (prompt := tuple(text.prompt_ids)) not in held_out:
            remaining.append(text)
            if len(held_out) < _TEXTS_PER_SHARD:
                held_out.add(prompt)
    return remaining[::-1]


def read_target(
    target: PreTrainedModel, texts: Sequence[Text], directory: Path, *, layer_ids: Sequence[int]
) -> list[Path]:
    """Compute the readings that are not on disk yet; returns the paths of all shards. `layer_ids` count as
    transformers' hidden states do: 1 is after the first layer.
    """
    directory.mkdir(parents=True, exist_ok=True)
    weights = target.get_output_embeddings().weight[:64].float().sum().item()
    starts, paths = range(0, len(texts), _TEXTS_PER_SHARD), []
    for index, start in enumerate(Bar(starts, desc="the target reads", unit="shards")):
        path, part = directory / f"readings-{index:05d}.safetensors", texts[start : start + _TEXTS_PER_SHARD]
        key = sha256(json.dumps([part, list(layer_ids), weights]).encode()).hexdigest()[:16]
        if not is_whole(path):
            write_shard(path, _shard(target, part, layer_ids), key=key, texts=len(part))
        elif read_sidecar(path, keys=("key",))["key"] != key:
            raise ValueError(
                f"{path} was made from other responses, layers or another target; delete its folder, or change --out"
            )
        paths.append(path)
    return paths


def load_readings(path: Path) -> Iterator[Reading]:
    """The readings in a shard."""
    tensors = load_file(path)
    lengths, num_prompt = tensors["lengths"].tolist(), tensors["num_prompt"].tolist()
    num_response = (tensors["lengths"] - tensors["num_prompt"]).tolist()
    ids, features = tensors["ids"].long().split(lengths), tensors["features"].split(lengths)
    likeliest, log_p = tensors["likeliest"].long().split(num_response), tensors["log_p"].split(num_response)
    return map(Reading, ids, num_prompt, features, likeliest, log_p)


def likeliest_tokens(paths: Sequence[Path], num: int, *, vocab_size: int) -> Int[Tensor, " reduced"]:
    """The `num` tokens with most of the target's probability over all readings, sorted by id."""
    mass = torch.zeros(vocab_size, dtype=torch.float64)
    for path in paths:
        tensors = load_file(path)
        mass.index_add_(0, tensors["likeliest"].long().flatten(), tensors["log_p"].double().exp().flatten())
    return mass.topk(num).indices.sort().values


def feature_sizes(path: Path) -> Float[Tensor, " feature"]:
    """The standard deviation of each feature in one shard, estimated from its median absolute value, which a few huge
    entries do not move.
    """
    return load_file(path)["features"].float().abs().median(0).values.clamp(min=1e-6) * _SIGMA_OF_MEDIAN


@torch.inference_mode()
def _shard(target: PreTrainedModel, texts: Sequence[Text], layer_ids: Sequence[int]) -> bytes:
    order = sorted(range(len(texts)), key=lambda index: sum(map(len, texts[index])))  # little padding
    readings: dict[int, Reading] = {}
    for start in range(0, len(order), _BATCH_SIZE):
        indices = order[start : start + _BATCH_SIZE]
        readings |= zip(indices, _readings_of(target, [texts[index] for index in indices], layer_ids), strict=True)
    ids, num_prompt, *columns = zip(*(readings[index] for index in range(len(texts))), strict=True)
    features, likeliest, log_p = map(torch.cat, columns)
    tensors = {"ids": torch.cat(ids).int(), "features": features, "likeliest": likeliest.int(), "log_p": log_p.half()}
    lengths = {"lengths": torch.tensor([len(row) for row in ids]), "num_prompt": torch.tensor(num_prompt)}
    return bytes(save(tensors | lengths))


def _readings_of(target: PreTrainedModel, texts: Sequence[Text], layer_ids: Sequence[int]) -> Iterator[Reading]:
    rows = [torch.tensor([*text.prompt_ids, *text.response_ids]) for text in texts]
    # padded on the right, where a causal model cannot see it
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    output = target.base_model(input_ids=ids, use_cache=False, output_hidden_states=True)
    features = torch.cat([output.hidden_states[layer_id] for layer_id in layer_ids], -1)
    for index, (row, text) in enumerate(zip(rows, texts, strict=True)):
        start, end = len(text.prompt_ids) - 1, len(row) - 1
        logits = target.get_output_embeddings()(output.last_hidden_state[index, start:end])
        log_p, likeliest = logits.float().log_softmax(-1).topk(min(NUM_LIKELIEST, logits.shape[-1]), -1)
        yield Reading(row, len(text.prompt_ids), features[index, : len(row)].clone(), likeliest, log_p)


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


def distil(draft: Draft, paths: Sequence[Path], path: Path, settings: Distillation) -> dict[str, Any]:
    """Train a draft, or resume from the checkpoint `path`; returns its figures on the last shard, which is held out."""
    if len(paths) < 2:
        raise ValueError(f"there are {len(paths)} shards of readings, but 2 are needed; use more responses")
    *training, held_out = paths
    size, epochs = settings.batch_size, range(settings.num_epochs)
    num_texts = {shard: read_sidecar(shard, keys=("texts",))["texts"] for shard in training}
    groups = [group for epoch in epochs for group in _groups(training, settings, epoch)]
    num_steps = sum(-(-sum(num_texts[shard] for shard in group) // size) for group in groups)

    def loss(batch_and_depths: tuple[Batch, int]) -> Float[Tensor, ""]:
        with torch.autocast("cpu", torch.bfloat16, enabled=settings.is_mixed):
            divergences, rates = divergences_and_rates(draft, *batch_and_depths)
        weights = torch.tensor([DEPTH_WEIGHT**depth for depth in range(len(rates))])
        return (weights * torch.lerp(divergences, 1 - rates, _ACCEPTANCE_SHARE)).sum()

    key = asdict(settings) | {"readings": [read_sidecar(shard, keys=("key",))["key"] for shard in paths]}
    key["shapes"] = {name: list(tensor.shape) for name, tensor in draft.module.state_dict().items()}
    pupil, batches = Pupil(draft.module, loss, has_muon=False), _batches(training, settings, epochs)
    rate = settings.learning_rate
    fit([pupil], batches, title="train the draft", num_steps=num_steps, learning_rate=rate, path=path, key=key)
    return {"steps": num_steps, **_figures(draft, held_out, settings), **asdict(settings)}


def _groups(paths: Sequence[Path], settings: Distillation, epoch: int) -> list[list[Path]]:
    """Shards whose texts are shuffled together in an epoch."""
    order = list(paths)
    random.Random(f"{settings.seed} {epoch}").shuffle(order)
    return [order[start : start + _SHARDS_TOGETHER] for start in range(0, len(order), _SHARDS_TOGETHER)]


def _batches(paths: Sequence[Path], settings: Distillation, epochs: Iterable[int]) -> Iterator[tuple[Batch, int]]:
    """Batches of texts of about one length, each with the number of depths to train."""
    for epoch in epochs:
        num_depths = settings.num_depths if epoch >= settings.num_epochs - settings.num_deep_epochs else 1
        for number, group in enumerate(_groups(paths, settings, epoch)):
            rng = random.Random(f"{settings.seed} {epoch} {number * _SHARDS_TOGETHER}")
            readings = [reading for path in group for reading in load_readings(path)]
            readings.sort(key=lambda reading: len(reading.ids) + rng.random())
            size = settings.batch_size
            parts = [readings[first : first + size] for first in range(0, len(readings), size)]
            rng.shuffle(parts)
            yield from ((_padded(part), num_depths) for part in parts)


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
def _figures(draft: Draft, path: Path, settings: Distillation) -> dict[str, list[float]]:
    """Mean divergence and acceptance_rate by depth."""
    batches = _batches([path], settings, [0])
    by_batch = zip(*(divergences_and_rates(draft, batch, NUM_DEPTHS) for batch, _ in batches), strict=True)
    means = (torch.stack(rows).double().mean(0).tolist() for rows in by_batch)
    named = zip(("divergences", "acceptance_rates"), means, strict=True)
    return {name: [round(value, 4) for value in values] for name, values in named}

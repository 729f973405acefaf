"""Training a draft on readings of its target at one or several depths.

Readings are a large target's features and predictions on its own responses, computed once and kept in shards, so that
training a draft costs no forwards of the target:

    features    the residual stream after the layers that the draft reads, at every token
    likeliest   the NUM_LIKELIEST most probable next tokens at temperature 1, and their log-probabilities, at every
                position whose next token belongs to the response

A shard holds a fixed range of texts; a stopped run resumes with the first missing one.

The loss is the mean of KL(p' || q) and 1 - acceptance_rate, which is what decoding needs, but alone teaches a new draft
nothing. p' is the target's distribution over its NUM_LIKELIEST tokens that are in the draft's vocabulary; positions
where these have less than _MIN_MASS of its probability are left out of the divergence. Depth k weighs 0.8^k, as in
EAGLE-3's "training-time test" (arXiv 2503.01840).
"""

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from checkpoints.recipes.feature_drafts import DEPTH_WEIGHT
from checkpoints.recipes.fit import Pupil, fit
from checkpoints.recipes.texts import NUM_DEPTHS
from data_gen.prompts.files import json_lines
from store.json_files import Json
from store.progress import Bar
from store.shards import is_whole, read_sidecar, write_shard

NUM_LIKELIEST = 64
_TEXTS_PER_SHARD = 128
_BATCH_SIZE = 8
_ACCEPTANCE_SHARE = 0.5  # of the loss; the divergence has the rest
_MIN_MASS = 0.05  # probability of the target in the draft's vocabulary
_SHARDS_TOGETHER = 4  # shards whose texts are shuffled together

Text = tuple[list[int], list[int]]
"""Token ids of a prompt and of a response of the target."""


class Reading(NamedTuple):
    """The target's features and predictions on a text, or on a batch of texts that are padded on the right."""

    ids: Int[Tensor, "*batch position"]
    features: Float[Tensor, "*batch position feature"]
    is_learned: Bool[Tensor, "*batch position"]
    """True at i where token i + 1 belongs to the response and NUM_DEPTHS tokens are before it."""
    likeliest: Int[Tensor, "*batch position top"]
    """The most probable next tokens, at the positions of the response."""
    log_p: Float[Tensor, "*batch position top"]


def read_responses(path: Path) -> list[Text]:
    """The responses in a file that `acceptance-heads responses` wrote."""
    texts = []
    for where, record in json_lines(path):
        if not record.keys() >= {"prompt_ids", "response_ids"}:
            raise ValueError(
                f"{where} has no prompt_ids and response_ids; write such a file with `acceptance-heads responses "
                f"--out {path.name}`"
            )
        if record["response_ids"]:
            texts.append((record["prompt_ids"], record["response_ids"]))
    return texts


def without_leakage(texts: Sequence[Text]) -> list[Text]:
    """Drop responses that share a prompt with the held-out last shard, except for the last response to each prompt."""
    remaining: list[Text] = []
    for text in reversed(texts):
        if all(text[0] != prompt for prompt, _ in remaining[:_TEXTS_PER_SHARD]):
            remaining.append(text)
    return remaining[::-1]


def read_target(
    target: PreTrainedModel, texts: Sequence[Text], directory: Path, *, layer_ids: Sequence[int]
) -> list[Path]:
    """Compute the readings that are not on disk yet; returns the paths of all shards. `layer_ids` count as
    transformers' hidden states do: 1 is after the first layer.
    """
    directory.mkdir(parents=True, exist_ok=True)
    weights = target.get_output_embeddings().weight[:64].float().sum().item()
    starts = range(0, len(texts), _TEXTS_PER_SHARD)
    paths = []
    for index, start in enumerate(Bar(starts, desc="the target reads", unit="shards")):
        path = directory / f"readings-{index:05d}.safetensors"
        part = texts[start : start + _TEXTS_PER_SHARD]
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
    lengths = tensors["lengths"].tolist()
    num_prompt = tensors["num_prompt"].tolist()
    num_response = (tensors["lengths"] - tensors["num_prompt"]).tolist()
    columns = [tensors[name].split(lengths) for name in ("ids", "features")]
    columns += [tensors[name].split(num_response) for name in ("likeliest", "log_p")]
    for num, ids, features, *predictions in zip(num_prompt, *columns, strict=True):
        # the position before the first response token predicts it
        likeliest, log_p = (functional.pad(rows, (0, 0, num - 1, 1)) for rows in predictions)
        position = torch.arange(len(ids))
        is_learned = (position >= max(num - 1, NUM_DEPTHS + 1)) & (position < len(ids) - 1)
        yield Reading(ids.long(), features, is_learned, likeliest, log_p)


@torch.inference_mode()
def _shard(target: PreTrainedModel, texts: Sequence[Text], layer_ids: Sequence[int]) -> bytes:
    order = sorted(range(len(texts)), key=lambda index: sum(map(len, texts[index])))  # little padding
    columns: dict[int, tuple[Tensor, ...]] = {}
    for start in range(0, len(order), _BATCH_SIZE):
        rows = {index: torch.tensor([*chain(*texts[index])]) for index in order[start : start + _BATCH_SIZE]}
        # padded on the right, where a causal model cannot see it
        ids = nn.utils.rnn.pad_sequence([*rows.values()], batch_first=True)
        output = target.base_model(input_ids=ids, use_cache=False, output_hidden_states=True)
        features = torch.cat([output.hidden_states[layer_id] for layer_id in layer_ids], -1)
        for number, (index, row) in enumerate(rows.items()):
            states = output.last_hidden_state[number, len(texts[index][0]) - 1 : len(row) - 1]
            logits = target.get_output_embeddings()(states).float()
            log_p, likeliest = logits.log_softmax(-1).topk(min(NUM_LIKELIEST, logits.shape[-1]), -1)
            columns[index] = row.int(), features[number, : len(row)].clone(), likeliest.int(), log_p.half()
    joined = map(torch.cat, zip(*(columns[index] for index in range(len(texts))), strict=True))
    tensors = dict(zip(("ids", "features", "likeliest", "log_p"), joined, strict=True))
    tensors["num_prompt"] = torch.tensor([len(prompt) for prompt, _ in texts])
    return bytes(save(tensors | {"lengths": tensors["num_prompt"] + torch.tensor([len(text) for _, text in texts])}))


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


@runtime_checkable
class Draft(Protocol):
    """A draft that can be trained on readings."""

    module: nn.Module
    index_of: Int[Tensor, " vocab"]
    """Index of each token of the target in the draft's vocabulary; -1: it is not there."""

    def logits(self, batch: Reading, num_depths: int) -> Iterator[Float[Tensor, "learned reduced"]]:
        """Logits at the learned positions, as the first, second, … token of drafts."""

    def save(self, directory: Path) -> None: ...


def divergences_and_rates(
    draft: Draft, batch: Reading, num_depths: int
) -> tuple[Float[Tensor, " depth"], Float[Tensor, " depth"]]:
    """(KL(p' || q) in nats per token, acceptance_rate at temperature 1) of a batch, by depth."""
    p = batch.log_p[batch.is_learned].float().exp()
    indices = draft.index_of[batch.likeliest[batch.is_learned]]
    p = p * (indices >= 0)
    mass = p.sum(-1)
    indices = indices.clamp(min=0)
    is_counted = (mass >= _MIN_MASS).float()
    renormalised = p / mass.clamp(min=1e-6).unsqueeze(-1)
    entropy = -(renormalised * renormalised.clamp(min=1e-9).log()).sum(-1)
    divergences = []
    rates = []
    for logits in draft.logits(batch, num_depths):
        log_q = logits.float().log_softmax(-1).gather(-1, indices)
        divergence = -(renormalised * log_q).sum(-1) - entropy
        divergences.append((divergence * is_counted).sum() / is_counted.sum().clamp(min=1))
        rates.append(torch.minimum(log_q.exp(), p).sum(-1).mean())
    return torch.stack(divergences), torch.stack(rates)


def distil(draft: Draft, paths: Sequence[Path], path: Path, settings: Distillation) -> Json:
    """Train a draft, or resume from the checkpoint `path`; returns its figures on the last shard, which is held out."""
    if len(paths) < 2:
        raise ValueError(f"there are {len(paths)} shards of readings, but 2 are needed; use more responses")
    *training, held_out = paths
    epochs = range(settings.num_epochs)
    num_texts = {shard: read_sidecar(shard, keys=("texts",))["texts"] for shard in training}
    groups = [group for epoch in epochs for group in _groups(training, settings, epoch)]
    num_steps = sum(-(-sum(num_texts[shard] for shard in group) // settings.batch_size) for group in groups)

    def loss(batch_and_depths: tuple[Reading, int]) -> Float[Tensor, ""]:
        with torch.autocast("cpu", torch.bfloat16, enabled=settings.is_mixed):
            divergences, rates = divergences_and_rates(draft, *batch_and_depths)
        weights = torch.tensor([DEPTH_WEIGHT**depth for depth in range(len(rates))])
        return (weights * torch.lerp(divergences, 1 - rates, _ACCEPTANCE_SHARE)).sum()

    key = asdict(settings) | {"readings": [read_sidecar(shard, keys=("key",))["key"] for shard in paths]}
    key["shapes"] = {name: list(tensor.shape) for name, tensor in draft.module.state_dict().items()}
    fit(
        [Pupil(draft.module, loss, has_muon=False)],
        _batches(training, settings, epochs),
        title="train the draft",
        num_steps=num_steps,
        learning_rate=settings.learning_rate,
        path=path,
        key=key,
    )
    return {"steps": num_steps, **_figures(draft, held_out, settings), **asdict(settings)}


def _groups(paths: Sequence[Path], settings: Distillation, epoch: int) -> list[list[Path]]:
    """Shards whose texts are shuffled together in an epoch."""
    order = list(paths)
    random.Random(f"{settings.seed} {epoch}").shuffle(order)
    return [order[start : start + _SHARDS_TOGETHER] for start in range(0, len(order), _SHARDS_TOGETHER)]


def _batches(paths: Sequence[Path], settings: Distillation, epochs: Iterable[int]) -> Iterator[tuple[Reading, int]]:
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
            for part in parts:
                padded = (nn.utils.rnn.pad_sequence([*column], batch_first=True) for column in zip(*part, strict=True))
                yield Reading(*padded), num_depths


@torch.no_grad()
def _figures(draft: Draft, path: Path, settings: Distillation) -> dict[str, list[float]]:
    batches = _batches([path], settings, [0])
    by_batch = zip(*(divergences_and_rates(draft, batch, NUM_DEPTHS) for batch, _ in batches), strict=True)
    means = ([round(mean, 4) for mean in torch.stack(rows).double().mean(0).tolist()] for rows in by_batch)
    return dict(zip(("divergences", "acceptance_rates"), means, strict=True))

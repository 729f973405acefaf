"""Readings: a large target's features and predictions on its own responses, computed once and kept in shards, so that
training a draft costs no forwards of the target.

    features    the residual stream after the layers that the draft reads, at every token
    likeliest   the NUM_LIKELIEST most probable next tokens at temperature 1, and their log-probabilities, at every
                position whose next token belongs to the response

A shard is `readings-NNNNN.safetensors` with its sum and holds a fixed range of texts; a stopped run resumes with the
first missing shard.
"""

import json
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from safetensors.torch import load_file, save
from torch import Tensor
from transformers import PreTrainedModel

from data_gen.prompts.prompt import json_lines
from store.progress import Bar
from store.shards import is_whole, read_sidecar, write_shard

NUM_LIKELIEST = 64
_TEXTS_PER_SHARD = 128
_BATCH_SIZE = 8
_SIGMA_OF_MEDIAN = 1.4826  # standard deviation of a normal over the median of its absolute values


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
        readings |= zip(indices, _read(target, [texts[index] for index in indices], layer_ids), strict=True)
    ids, num_prompt, *columns = zip(*(readings[index] for index in range(len(texts))), strict=True)
    features, likeliest, log_p = map(torch.cat, columns)
    tensors = {"ids": torch.cat(ids).int(), "features": features, "likeliest": likeliest.int(), "log_p": log_p.half()}
    lengths = {"lengths": torch.tensor([len(row) for row in ids]), "num_prompt": torch.tensor(num_prompt)}
    return bytes(save(tensors | lengths))


def _read(target: PreTrainedModel, texts: Sequence[Text], layer_ids: Sequence[int]) -> Iterator[Reading]:
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

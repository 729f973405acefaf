"""A large target read once: what a draft learns from, kept in shards, so that epochs cost the draft alone.

Of every text, a prompt and the target's own response to it, a *reading* holds

    features    the target's residual streams behind the layers that the draft reads, at every token
    likeliest   the NUM_LIKELIEST most probable next tokens at temperature 1 with their log-probabilities, at every
                position whose next token belongs to the response

A shard is `readings-NNNNN.safetensors` with its sum, a fixed run of texts; a run that was stopped goes on with the
first that is missing.
"""

import json
from collections.abc import Iterator, Sequence
from hashlib import sha256
from itertools import accumulate, pairwise
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
_SIGMA_OF_MEDIAN = 1.4826  # standard deviation of a normal over the median of its distances from the mean


class Text(NamedTuple):
    """A prompt and a response of the target, as token ids."""

    prompt_ids: list[int]
    response_ids: list[int]


class Reading(NamedTuple):
    """What the target says along one text."""

    ids: Int[Tensor, " position"]
    num_prompt: int
    features: Float[Tensor, "position feature"]
    likeliest: Int[Tensor, "response top"]
    """At i: the most probable tokens at the place of response token i."""
    log_p: Float[Tensor, "response top"]


def texts_of(path: Path) -> list[Text]:
    """The responses of a file that `acceptance-heads responses` wrote.

    Raises:
        ValueError: a line without ids.
    """
    texts = []
    for number, record in json_lines(path):
        if not record.keys() >= {"prompt_ids", "response_ids"}:
            remedy = f"`acceptance-heads responses --out {path.name}` writes such a file"
            raise ValueError(f"{path}:{number} has no prompt_ids and response_ids; {remedy}")
        texts.append(Text(record["prompt_ids"], record["response_ids"]))
    return [text for text in texts if text.response_ids]


def apart(texts: Sequence[Text]) -> list[Text]:
    """The texts of which the last shard, which is held out, shares no prompt with any other: where several answer one
    of the last prompts, the last of them stays. A second answer to a prompt tells much of the first.
    """
    kept: list[Text] = []
    last: set[tuple[int, ...]] = set()
    for text in reversed(texts):
        prompt = tuple(text.prompt_ids)
        if prompt not in last:
            kept.append(text)
            if len(last) < _TEXTS_PER_SHARD:
                last.add(prompt)
    return kept[::-1]


def read_target(
    target: PreTrainedModel, texts: Sequence[Text], directory: Path, *, layer_ids: Sequence[int]
) -> list[Path]:
    """Read the texts with the target, as far as that is not done; the paths of all shards.

    The residual stream is kept after `layer_ids`, as transformers counts hidden states: 1 is after the first layer.

    Raises:
        ValueError: the folder holds readings of other texts, layers or another target.
    """
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    chunks = [texts[start : start + _TEXTS_PER_SHARD] for start in range(0, len(texts), _TEXTS_PER_SHARD)]
    for index, chunk in enumerate(Bar(chunks, desc="the target reads", unit="shards")):
        path = directory / f"readings-{index:05d}.safetensors"
        key = _key(target, chunk, layer_ids)
        if not is_whole(path):
            write_shard(path, _shard(target, chunk, layer_ids), key=key, texts=len(chunk))
        elif read_sidecar(path, keys=("key",))["key"] != key:
            raise ValueError(
                f"{path} is a reading of other responses, layers or another target; delete the folder, or take another"
            )
        paths.append(path)
    return paths


def readings_in(path: Path) -> Iterator[Reading]:
    """The readings of one shard."""
    tensors = load_file(path)
    ends = [0, *accumulate(tensors["lengths"].tolist())]
    responses = [0, *accumulate((tensors["lengths"] - tensors["num_prompt"]).tolist())]
    spans = zip(pairwise(ends), pairwise(responses), tensors["num_prompt"].tolist(), strict=True)
    for whole, response, num_prompt in spans:
        at, said = slice(*whole), slice(*response)
        likeliest, log_p = tensors["likeliest"][said].long(), tensors["log_p"][said]
        yield Reading(tensors["ids"][at].long(), num_prompt, tensors["features"][at], likeliest, log_p)


def likeliest_tokens(paths: Sequence[Path], num: int, *, vocab_size: int) -> Int[Tensor, " reduced"]:
    """The `num` tokens that have most of the target's probability over all readings, in the order of their ids."""
    mass = torch.zeros(vocab_size, dtype=torch.float64)
    for path in paths:
        tensors = load_file(path)
        mass.index_add_(0, tensors["likeliest"].long().flatten(), tensors["log_p"].double().exp().flatten())
    return mass.topk(num).indices.sort().values


def feature_sizes(path: Path) -> Float[Tensor, " feature"]:
    """The size of each feature in one shard: the standard deviation of a normal of the same median distance from 0,
    which a few huge entries do not move.
    """
    return load_file(path)["features"].float().abs().median(0).values.clamp(min=1e-6) * _SIGMA_OF_MEDIAN


def _key(target: PreTrainedModel, texts: Sequence[Text], layer_ids: Sequence[int]) -> str:
    """What decides the numbers of a shard: the texts, the layers, and some of the target's weights."""
    weights = target.get_output_embeddings().weight[:64].float().sum().item()
    return sha256(json.dumps([texts, list(layer_ids), weights]).encode()).hexdigest()[:16]


@torch.inference_mode()
def _shard(target: PreTrainedModel, texts: Sequence[Text], layer_ids: Sequence[int]) -> bytes:
    order = sorted(range(len(texts)), key=lambda place: sum(map(len, texts[place])))  # little padding
    found: dict[int, Reading] = {}
    for start in range(0, len(order), _BATCH_SIZE):
        places = order[start : start + _BATCH_SIZE]
        found |= dict(zip(places, _read(target, [texts[place] for place in places], layer_ids), strict=True))
    ids, num_prompt, *columns = zip(*(found[place] for place in range(len(texts))), strict=True)
    features, likeliest, log_p = map(torch.cat, columns)
    tensors = {"ids": torch.cat(ids).int(), "features": features, "likeliest": likeliest.int(), "log_p": log_p.half()}
    lengths = {"lengths": torch.tensor([len(row) for row in ids]), "num_prompt": torch.tensor(num_prompt)}
    return bytes(save(tensors | lengths))


def _read(target: PreTrainedModel, texts: Sequence[Text], layer_ids: Sequence[int]) -> Iterator[Reading]:
    rows = [torch.tensor([*text.prompt_ids, *text.response_ids]) for text in texts]
    # padding stands on the right, where a causal model cannot see it
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    output = target.base_model(input_ids=ids, use_cache=False, output_hidden_states=True)
    features = torch.cat([output.hidden_states[layer_id] for layer_id in layer_ids], -1)
    for place, (row, text) in enumerate(zip(rows, texts, strict=True)):
        start, end = len(text.prompt_ids) - 1, len(row) - 1
        logits = target.get_output_embeddings()(output.last_hidden_state[place, start:end])
        log_p, likeliest = logits.float().log_softmax(-1).topk(min(NUM_LIKELIEST, logits.shape[-1]), -1)
        yield Reading(row, len(text.prompt_ids), features[place, : len(row)].clone(), likeliest, log_p)

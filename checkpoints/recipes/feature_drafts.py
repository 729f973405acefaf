"""EAGLE and GliDe drafts for a small target, `checkpoints/tiny/{eagle,glide}`, trained on a frozen target's features.

    eagle   EAGLE-1 (github.com/SafeAILab/EAGLE, train/main.py): SmoothL1(f̂, f) + KL(p || q); and, as in HASS and
            EAGLE-3's "training-time test" (arXiv 2408.15766, 2503.01840), at several depths: depth k + 1 reads the
            outputs of depth k, as in drafting. Departures: divergence and distance have equal weights, not 0.1 and 1;
            no noise on features, since those of deeper positions have errors anyway; depth k weighs 0.8^k as in
            EAGLE-3, which has no distance; no HASS loss on the likeliest tokens alone.
    glide   GliDe (arXiv 2402.02082): cross-attention does not see the newest blocks of the target's keys. Departure:
            KL(p || q) in place of cross-entropy on the text, so that free choices of wording agree.

For large targets use SpecForge or speculators, whose drafts load.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache, LlamaConfig, PreTrainedConfig, PreTrainedModel

from checkpoints.recipes.texts import NUM_DEPTHS, StoryBatch, TargetReading, acceptance_rates
from lm.features.draft import FeatureDraft, Outputs
from lm.features.dspark import DSpark
from lm.features.eagle import Eagle
from lm.features.glide import Glide, delayed
from store.shards import atomic_directory

DEPTH_WEIGHT = 0.8  # of each draft position over the one before
_BLOCK_SIZE = 5  # of GliDe: cross-attention sees the target's keys up to the block before
_NUM_TRAINED_DEPTHS = 3  # of EAGLE
_NO_KEYS = ("architectures", "dtype", "transformers_version")  # of the target's config; its draft has its own


@dataclass(frozen=True, kw_only=True)
class DraftRecipe:
    """What decides the drafts, besides target, texts and seed."""

    batch_size: int = 8
    num_steps: int = 400
    learning_rate: float = 4e-3


def new_feature_draft(kind: str, target: PreTrainedModel) -> FeatureDraft:
    """A draft of the target's width: GliDe's layer is initialised as the target's first, EAGLE's at random."""
    target_config = target.config.get_text_config()
    body: Any = target.base_model
    config = layer_config(target, is_tied=kind == "glide")
    draft: Eagle | Glide
    if kind == "eagle":
        draft, embedding = Eagle(config), body.embed_tokens
    else:
        num_heads = config.large_num_attention_heads = target_config.num_attention_heads
        config.large_hidden_size, config.block_size = num_heads * target_config.head_dim, _BLOCK_SIZE
        draft, embedding = Glide(config, target_config.num_hidden_layers), target.get_output_embeddings()
        draft.norm.load_state_dict(body.norm.state_dict())
        draft.layers[0].load_state_dict(body.layers[0].state_dict(), strict=False)  # all but cross-attention
        torch.nn.init.zeros_(draft.layers[0].get_parameter("cross_attn.o_proj.weight"))
    assert draft.embed_tokens is not None
    draft.embed_tokens.load_state_dict(embedding.state_dict())
    draft.embed_tokens.requires_grad_(kind == "glide")
    return draft.bind(target)


def layer_config(target: PreTrainedModel, *, is_tied: bool) -> LlamaConfig:
    """The config of one Llama layer of the target's width."""
    keys = target.config.get_text_config().to_diff_dict()
    shared = {name: value for name, value in keys.items() if not name.startswith("_") and name not in _NO_KEYS}
    return LlamaConfig(**shared | {"num_hidden_layers": 1, "tie_word_embeddings": is_tied})


def feature_loss(draft: FeatureDraft, reading: TargetReading) -> Float[Tensor, ""]:
    if isinstance(draft, Glide):
        mask = delayed(reading.tokens.shape[1], draft.config.block_size)
        return reading.divergence(_glide_log_q(draft, reading, mask))
    assert isinstance(draft, Eagle)
    is_learned, losses = reading.is_learned[:, 1:], []
    for depth, outputs in enumerate(islice(unrolled(draft, reading.tokens, reading.states), _NUM_TRAINED_DEPTHS)):
        states = outputs.states[is_learned]
        divergence = reading.divergence(draft.logits(states).log_softmax(-1))
        distance = functional.smooth_l1_loss(states, reading.states[:, 1:][is_learned])
        losses.append(DEPTH_WEIGHT**depth * (divergence + distance))
    return torch.stack(losses).sum()


def feature_figures(draft: FeatureDraft, target: PreTrainedModel, batches: Iterable[StoryBatch]) -> dict[str, Any]:
    rates = acceptance_rates(partial(log_q_by_depth, draft), target, batches).mean(-1)
    return {"acceptance_rates": [round(rate, 4) for rate in rates.tolist()]}


def log_q_by_depth(draft: FeatureDraft, reading: TargetReading) -> Iterator[Float[Tensor, "learned vocab"]]:
    """log q at the learned positions, as the first, second, … token of drafts; each draft starts that many tokens
    before.
    """
    if isinstance(draft, Glide):
        position = torch.arange(reading.tokens.shape[1])
        for depth in range(1, NUM_DEPTHS + 1):
            is_seen = (position <= position[:, None] - depth) | (position == 0)
            yield _glide_log_q(draft, reading, is_seen[None, None])
        return
    assert isinstance(draft, Eagle)
    for outputs in islice(unrolled(draft, reading.tokens, reading.states), NUM_DEPTHS):
        yield draft.logits(outputs.hidden[reading.is_learned[:, 1:]]).log_softmax(-1)


def _glide_log_q(
    draft: Glide, reading: TargetReading, cross_mask: Bool[Tensor, "1 1 node seen"]
) -> Float[Tensor, "learned vocab"]:
    layers = [reading.cache.layers[layer_id] for layer_id in draft.cached_layer_ids]
    keys_values = [(layer.keys, layer.values) for layer in layers]
    positions = torch.arange(reading.tokens.shape[1]).expand(len(reading.tokens), -1)
    hidden = draft(reading.tokens, keys_values, positions, cross_mask=cross_mask).hidden
    return draft.logits(hidden[reading.is_learned]).log_softmax(-1)


def unrolled(
    draft: Eagle, tokens: Int[Tensor, "batch position"], states: Float[Tensor, "batch position hidden"]
) -> Iterator[Outputs]:
    """An EAGLE draft's outputs at depth 1, 2, … (endless) of drafts from all entries at once, on the data's tokens.

    Entry t reads token t + 1. At depth k + 1 it is k tokens after a root, the last entry with a state of the target. It
    reads the output of entry t - 1 at depth k. It sees the entries up to t - k at depth 1 and those of its own draft:
    t - k + m at depth m + 1. The first k entries have no root, and their outputs mean nothing.
    """
    cache, positions = DynamicCache(), torch.arange(tokens.shape[1] - 1).expand(len(tokens), -1)
    distance = positions[0][:, None] - positions[0]  # [entry, visible entry]
    inputs = draft.entering(states[:, :-1])
    for depth in count():
        visible = [distance >= depth, *(distance == depth - other for other in range(1, depth + 1))]
        outputs = draft(tokens[:, 1:], inputs, positions, cache=cache, mask=torch.cat(visible, -1)[None, None])
        yield outputs
        inputs = functional.pad(outputs.states[:, :-1], (0, 0, 1, 0))


def save_feature_draft(draft: FeatureDraft, directory: Path) -> None:
    architecture = "Qwen3DSparkModel" if isinstance(draft, DSpark) else "LlamaForCausalLM"
    prefix = "model." if isinstance(draft, Glide) else ""
    tensors = {prefix + name: tensor for name, tensor in draft.state_dict().items()}
    save_draft(directory, draft.config, architecture, tensors, **({"bias": True} if isinstance(draft, Eagle) else {}))


def save_draft(
    directory: Path, config: PreTrainedConfig, architecture: str, tensors: Mapping[str, Tensor], **keys: Any
) -> None:
    """Write config.json, with further `keys`, and model.safetensors in bfloat16; integers keep their type."""
    values = config.to_diff_dict() | {"architectures": [architecture], "dtype": "bfloat16", **keys}
    halved = {
        name: (tensor.bfloat16() if tensor.is_floating_point() else tensor).detach().contiguous()
        for name, tensor in tensors.items()
    }
    with atomic_directory(directory) as folder:
        (folder / "config.json").write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        save_file(halved, folder / "model.safetensors", metadata={"format": "pt"})

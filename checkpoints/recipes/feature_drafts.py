"""EAGLE, GliDe and DSpark drafts for a small target, `checkpoints/tiny/{eagle,glide,dspark}`, trained with the target
frozen.

    eagle   EAGLE-1 (github.com/SafeAILab/EAGLE, train/main.py): SmoothL1(f̂, f) + KL(p || q); and, as in HASS and
            EAGLE-3's "training-time test" (arXiv 2408.15766, 2503.01840), at several depths: depth k + 1 reads the
            outputs of depth k and weighs 0.8^k. Departures: divergence and distance have equal weights, not 0.1 and 1;
            no noise on features, since those of deeper positions have errors; no HASS loss on the likeliest tokens.
    glide   GliDe (arXiv 2402.02082): cross-attention does not see the newest blocks of the target's keys. Departure:
            KL(p || q) instead of cross-entropy on the text, so that free choices of wording agree.
    dspark  One forward drafts a block of tokens. Draft and confidence head are trained together, as the released ones
            (github.com/deepseek-ai/DeepSpec, modeling/dspark/loss.py):

                loss = 0.1 CE(q, text) + 0.9 sum_v |q(v) - p(v)| + BCE(confidence, acceptance_rate)

            each the mean over blocks and their positions i, with weights exp(-i / 4), at temperature 1. Blocks begin
            at random tokens of the response, many per text, and read the text's own tokens. Gradients of the confidence
            head reach the draft; embeddings and output rows are the target's, frozen. Departures: the texts are
            stories, not the target's responses; matrices of the layers are trained with Muon.

For large targets use SpecForge or speculators, whose drafts load.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Bool, Float, Int
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache, LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen3Config

from checkpoints.recipes.texts import NUM_DEPTHS, StoryBatch, TargetReading, acceptance_rates
from lm import acceptance_rate
from lm.features.base import FeatureDraft, Outputs
from lm.features.dspark import DSpark
from lm.features.eagle import Eagle
from lm.features.glide import Glide, delayed
from store.shards import atomic_directory

DEPTH_WEIGHT = 0.8  # of each draft position over the one before
_BLOCK_SIZE = 5  # of GliDe: cross-attention sees the target's keys up to the block before
_NUM_TRAINED_DEPTHS = 3  # of EAGLE
_NO_KEYS = ("architectures", "dtype", "transformers_version")  # of the target's config; its draft has its own
_ENTROPY_WEIGHT = 0.1
_DISTANCE_WEIGHT = 0.9
_DECAY = 4.0  # positions over which the weight falls to 1 / e


@dataclass(frozen=True, kw_only=True)
class DraftRecipe:
    """What decides the drafts, besides target, texts and seed."""

    batch_size: int = 8
    num_steps: int = 400
    learning_rate: float = 4e-3


Figures = dict[str, float | list[float]]


def new_feature_draft(kind: str, target: PreTrainedModel) -> Eagle | Glide:
    """A draft of the target's width: GliDe's layer is initialised as the target's first, EAGLE's at random."""
    target_config = target.config.get_text_config()
    body: Any = target.base_model
    config = layer_config(target, is_tied=kind == "glide")
    draft: Eagle | Glide
    if kind == "eagle":
        draft = Eagle(config)
        embedding = body.embed_tokens
    else:
        num_heads = config.large_num_attention_heads = target_config.num_attention_heads
        config.large_hidden_size = num_heads * target_config.head_dim
        config.block_size = _BLOCK_SIZE
        draft = Glide(config, target_config.num_hidden_layers)
        embedding = target.get_output_embeddings()
        draft.norm.load_state_dict(body.norm.state_dict())
        draft.layers[0].load_state_dict(body.layers[0].state_dict(), strict=False)  # all but cross-attention
        torch.nn.init.zeros_(draft.layers[0].get_parameter("cross_attn.o_proj.weight"))
    assert draft.embed_tokens is not None
    draft.embed_tokens.load_state_dict(embedding.state_dict())
    draft.embed_tokens.requires_grad_(kind == "glide")
    draft.bind(target)
    return draft


def layer_config(target: PreTrainedModel, *, is_tied: bool) -> LlamaConfig:
    """The config of one Llama layer of the target's width."""
    keys = target.config.get_text_config().to_diff_dict()
    shared = {name: value for name, value in keys.items() if not name.startswith("_") and name not in _NO_KEYS}
    return LlamaConfig(**shared | {"num_hidden_layers": 1, "tie_word_embeddings": is_tied})


def feature_loss(draft: Eagle | Glide, reading: TargetReading) -> Float[Tensor, ""]:
    if isinstance(draft, Glide):
        mask = delayed(reading.tokens.shape[1], draft.config.block_size)
        return reading.divergence(_glide_log_q(draft, reading, mask))
    is_learned = reading.is_learned[:, 1:]
    losses = []
    for depth, outputs in enumerate(islice(unrolled(draft, reading.tokens, reading.states), _NUM_TRAINED_DEPTHS)):
        states = outputs.states[is_learned]
        divergence = reading.divergence(draft.logits(states).log_softmax(-1))
        distance = functional.smooth_l1_loss(states, reading.states[:, 1:][is_learned])
        losses.append(DEPTH_WEIGHT**depth * (divergence + distance))
    return torch.stack(losses).sum()


def feature_figures(draft: Eagle | Glide, target: PreTrainedModel, batches: Iterable[StoryBatch]) -> Figures:
    rates = acceptance_rates(partial(log_q_by_depth, draft), target, batches).mean(-1)
    return {"acceptance_rates": [round(rate, 4) for rate in rates.tolist()]}


def log_q_by_depth(draft: Eagle | Glide, reading: TargetReading) -> Iterator[Float[Tensor, "learned vocab"]]:
    """log q at the learned positions as the first, second, … token of drafts, which start that many tokens before."""
    if isinstance(draft, Glide):
        position = torch.arange(reading.tokens.shape[1])
        for depth in range(1, NUM_DEPTHS + 1):
            is_seen = (position <= position[:, None] - depth) | (position == 0)
            yield _glide_log_q(draft, reading, is_seen[None, None])
        return
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
    reads the output of entry t - 1 at depth k. It sees the entries up to t - k at depth 1 and those of its draft:
    t - k + m at depth m + 1. The first k entries have no root, and their outputs mean nothing.
    """
    cache = DynamicCache()
    positions = torch.arange(tokens.shape[1] - 1).expand(len(tokens), -1)
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
    directory: Path, config: PreTrainedConfig, architecture: str, tensors: Mapping[str, Tensor], **keys: object
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


@dataclass(frozen=True, kw_only=True)
class DSparkRecipe(DraftRecipe):
    block_size: int = 7
    num_layers: int = 1
    markov_rank: int = 32
    num_anchors: int = 32
    """Blocks per text and step."""
    num_steps: int = 600


class BlockPredictions(NamedTuple):
    """Both models' predictions for blocks of known texts."""

    log_q: Float[Tensor, "block draft vocab"]
    p: Float[Tensor, "block draft vocab"]
    next_ids: Int[Tensor, "block draft"]
    """Tokens of the texts at these positions."""
    confidence: Float[Tensor, "block draft"]
    """Logits."""
    is_inside: Bool[Tensor, "block draft"]
    """False after the end of a text."""

    @property
    def acceptance_rate(self) -> Float[Tensor, "block draft"]:
        """1 - TV(p, q) at temperature 1."""
        return acceptance_rate(self.log_q.detach().exp(), self.p)


def new_dspark(target: PreTrainedModel, recipe: DSparkRecipe) -> DSpark:
    """A draft with random layers; embeddings, output rows and last norm are the target's."""
    of_target = target.config.get_text_config()
    names = ["vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"]
    names += ["max_position_embeddings", "rms_norm_eps", "pad_token_id", "eos_token_id", "bos_token_id"]
    num_layers = of_target.num_hidden_layers
    values: dict[str, Any] = {name: getattr(of_target, name) for name in names}
    values |= {name: getattr(recipe, name) for name in ("block_size", "num_anchors", "markov_rank")}
    values |= {
        "num_hidden_layers": recipe.num_layers,
        "rope_parameters": dict(of_target.rope_parameters),
        "markov_head_type": "vanilla",
        "mask_token_id": of_target.pad_token_id,  # no text has this token
        "target_layer_ids": [1, num_layers // 2 - 1, num_layers - 2],
        "num_target_layers": num_layers,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    draft: Any = DSpark(Qwen3Config(**values, tie_word_embeddings=False))
    draft.norm.load_state_dict(cast(Any, target.base_model).norm.state_dict())
    draft.embed_tokens.load_state_dict(target.get_input_embeddings().state_dict())
    draft.lm_head.load_state_dict(target.get_output_embeddings().state_dict())
    draft.embed_tokens.requires_grad_(False)
    draft.lm_head.requires_grad_(False)
    return draft.bind(target)


def random_anchors(
    batch: StoryBatch, num: int | None, generator: torch.Generator | None = None
) -> Int[Tensor, "batch block"]:
    """Positions of response tokens that another token follows, all or `num` random ones; 0 is padding."""
    has_next = functional.pad(batch.is_learned[:, :-1] & batch.is_learned[:, 1:], (1, 0))
    num = int(has_next.sum(1).max()) if num is None else min(num, has_next.shape[1])
    order = torch.rand(has_next.shape, generator=generator).masked_fill(~has_next, 2.0)
    positions = order.topk(num, largest=False).indices
    return positions * has_next.gather(1, positions)


def predict_blocks(
    draft: DSpark, target: PreTrainedModel, batch: StoryBatch, anchors: Int[Tensor, "batch block"]
) -> BlockPredictions:
    """Predictions for the blocks that begin at the anchors; blocks at 0 are left out."""
    with torch.no_grad():
        output = target.base_model(input_ids=batch.ids, use_cache=False, output_hidden_states=True)
        features = torch.cat([output.hidden_states[layer_id] for layer_id in draft.target_layer_ids], -1)
    is_block = anchors > 0
    rows = is_block.nonzero()[:, :1]
    positions = anchors[is_block][:, None] + torch.arange(draft.block_size)
    is_inside = positions < batch.is_learned.shape[1]
    positions = positions.clamp(max=batch.is_learned.shape[1] - 1)
    is_inside = (is_inside & batch.is_learned[rows, positions]).cummin(1).values
    hidden = draft.joined(draft.on_text(features, batch.ids, anchors)[is_block], batch.ids[rows, positions])
    with torch.no_grad():
        p = target.get_output_embeddings()(output.last_hidden_state[rows, positions]).softmax(-1)
    log_q = draft.logits(hidden).log_softmax(-1)
    return BlockPredictions(log_q, p, batch.ids[rows, positions + 1], draft.confidence(hidden), is_inside)


def dspark_loss(target: PreTrainedModel, seed: int, draft: DSpark, batch: StoryBatch) -> Float[Tensor, ""]:
    """The loss of random blocks, which seed and batch decide."""
    generator = torch.Generator().manual_seed((seed << 32) + batch.number)
    return loss_of(predict_blocks(draft, target, batch, random_anchors(batch, draft.config.num_anchors, generator)))


def loss_of(blocks: BlockPredictions) -> Float[Tensor, ""]:
    weight = blocks.is_inside * torch.exp(-torch.arange(blocks.is_inside.shape[1]) / _DECAY)
    entropy = functional.nll_loss(blocks.log_q.flatten(0, 1), blocks.next_ids.flatten(), reduction="none")
    distance = (blocks.log_q.exp() - blocks.p).abs().sum(-1)
    confidence = functional.binary_cross_entropy_with_logits(
        blocks.confidence, blocks.acceptance_rate, reduction="none"
    )
    by_position = _ENTROPY_WEIGHT * entropy.view_as(weight) + _DISTANCE_WEIGHT * distance + confidence
    return (by_position * weight).sum() / weight.sum()


@torch.no_grad()
def dspark_figures(draft: DSpark, target: PreTrainedModel, batches: Sequence[StoryBatch]) -> Figures:
    """Mean acceptance_rate, mean confidence and Brier score by position in the block, over every block of some texts at
    temperature 1; and the tokens per round if whole blocks are verified.
    """
    parts = [predict_blocks(draft, target, batch, random_anchors(batch, None)) for batch in batches]
    rate = torch.cat([part.acceptance_rate for part in parts])
    confidence = torch.cat([part.confidence.sigmoid() for part in parts])
    counts = torch.cat([part.is_inside for part in parts])
    columns = {"acceptance_rates": rate, "confidences": confidence, "brier": (confidence - rate) ** 2}
    means = {name: (values * counts).sum(0) / counts.sum(0) for name, values in columns.items()}
    figures: Figures = {name: [round(mean, 4) for mean in row.tolist()] for name, row in means.items()}
    return figures | {"acceptance_length": round(1 + (rate * counts).cumprod(-1).sum(-1).mean().item(), 4)}

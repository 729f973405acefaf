"""A DSpark draft for a small target, `checkpoints/tiny/dspark`: one forward drafts a block of tokens. Draft and
confidence head are trained together, as the released ones (github.com/deepseek-ai/DeepSpec, modeling/dspark/loss.py).

    loss = 0.1 CE(q, text) + 0.9 sum_v |q(v) - p(v)| + BCE(confidence, acceptance_rate)

each the mean over blocks and their positions i, with weights exp(-i / 4). q and p have temperature 1, whatever
`Sampling` the draft is used with later. Blocks begin at random tokens of the response, many per text, and read the
text's own tokens. Gradients of the confidence head reach the draft; embeddings and output rows are the target's,
frozen. Departures: the texts are stories, not the target's responses; matrices of the layers are trained with Muon.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel, Qwen3Config

from checkpoints.recipes.feature_drafts import DraftRecipe
from checkpoints.recipes.texts import StoryBatch
from lm import acceptance_rate
from lm.features.dspark import DSpark

_ENTROPY_WEIGHT, _DISTANCE_WEIGHT = 0.1, 0.9
_DECAY = 4.0  # positions over which the weight falls to 1 / e


@dataclass(frozen=True, kw_only=True)
class DSparkRecipe(DraftRecipe):
    """What decides a draft, besides target, texts and seed."""

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
    config = Qwen3Config(
        **values,
        num_hidden_layers=recipe.num_layers,
        rope_parameters=dict(of_target.rope_parameters),
        tie_word_embeddings=False,
    )
    config.markov_head_type, config.mask_token_id = "vanilla", of_target.pad_token_id  # no text has this token
    config.target_layer_ids, config.num_target_layers = [1, num_layers // 2 - 1, num_layers - 2], num_layers
    config.enable_confidence_head = config.confidence_head_with_markov = True
    draft: Any = DSpark(config)
    draft.norm.load_state_dict(cast(Any, target.base_model).norm.state_dict())
    draft.embed_tokens.load_state_dict(target.get_input_embeddings().state_dict())
    draft.lm_head.load_state_dict(target.get_output_embeddings().state_dict())
    draft.embed_tokens.requires_grad_(False)
    draft.lm_head.requires_grad_(False)
    draft.bind(target)
    return draft


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
def dspark_figures(draft: DSpark, target: PreTrainedModel, batches: Sequence[StoryBatch]) -> dict[str, Any]:
    """Mean acceptance_rate, mean confidence and Brier score by position in the block, over every block of some texts at
    temperature 1; and the tokens per round if whole blocks are verified.
    """
    parts = [predict_blocks(draft, target, batch, random_anchors(batch, None)) for batch in batches]
    rate = torch.cat([part.acceptance_rate for part in parts])
    confidence = torch.cat([part.confidence.sigmoid() for part in parts])
    counts = torch.cat([part.is_inside for part in parts])
    columns = {"acceptance_rates": rate, "confidences": confidence, "brier": (confidence - rate) ** 2}
    means = {name: (values * counts).sum(0) / counts.sum(0) for name, values in columns.items()}
    figures: dict[str, Any] = {name: [round(mean, 4) for mean in row.tolist()] for name, row in means.items()}
    return figures | {"acceptance_length": round(1 + (rate * counts).cumprod(-1).sum(-1).mean().item(), 4)}

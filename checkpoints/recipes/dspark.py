"""A DSpark draft for a small target, `checkpoints/tiny/dspark`: a block of tokens from one forward, and with it the
confidence head that is served today, learned together as the released drafts did (github.com/deepseek-ai/DeepSpec,
modeling/dspark/loss.py, config/dspark).

    loss = 0.1 CE(q, text) + 0.9 sum_v |q(v) - p(v)| + BCE(confidence, acceptance_rate)       i: place in the block
           each the mean over blocks and places, weighed with exp(-i / 4)

q and p are untempered, whatever `Sampling` the draft is used with later. Blocks begin at random tokens of the response,
many of one text at once, and are fed with the text's own tokens; gradients of the confidence head reach the draft, as
theirs do. Embeddings and output rows are the target's own, frozen, as theirs are.

Departures: the texts are stories, not the target's responses; matrices of the layers are trained with Muon, as those of
the embedded trio are.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel, Qwen3Config

from checkpoints.recipes.fit import Pupil
from checkpoints.recipes.saved import save_draft
from checkpoints.recipes.training import StoryBatch
from lm import acceptance_rate
from lm.features.dspark import DSpark

_ENTROPY_WEIGHT, _DISTANCE_WEIGHT = 0.1, 0.9
_DECAY = 4.0  # places over which the weight falls to 1 / e


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Shape of a draft, and what decides how it learns, but for its target and its texts."""

    block_size: int = 7
    num_layers: int = 1
    markov_rank: int = 32
    num_anchors: int = 32
    """Blocks of one text that are learned at once."""
    batch_size: int = 8
    num_steps: int = 600
    learning_rate: float = 4e-3


class Proposed(NamedTuple):
    """What a draft says of some blocks, along texts that are known."""

    log_q: Float[Tensor, "block place vocab"]
    p: Float[Tensor, "block place vocab"]
    following: Int[Tensor, "block place"]
    """Tokens of the texts at these places."""
    confidence: Float[Tensor, "block place"]
    """Logits."""
    counts: Bool[Tensor, "block place"]
    """False behind the end of a text."""

    @property
    def acceptance_rate(self) -> Float[Tensor, "block place"]:
        """1 - TV(p, q) at temperature 1."""
        return acceptance_rate(self.log_q.detach().exp(), self.p)


def new_dspark(target: PreTrainedModel, shape: Blocks) -> DSpark:
    """A draft for a target, whose layers are random; embeddings, output rows and last norm are the target's."""
    of_target = target.config.get_text_config()
    names = ["vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"]
    names += ["max_position_embeddings", "rms_norm_eps", "pad_token_id", "eos_token_id", "bos_token_id"]
    config = Qwen3Config(
        **{name: getattr(of_target, name) for name in names},
        num_hidden_layers=shape.num_layers,
        rope_parameters=dict(of_target.rope_parameters),
        tie_word_embeddings=False,
    )
    depth = of_target.num_hidden_layers
    config.block_size, config.num_anchors, config.markov_rank = shape.block_size, shape.num_anchors, shape.markov_rank
    config.target_layer_ids, config.num_target_layers = [1, depth // 2 - 1, depth - 2], depth
    config.mask_token_id, config.markov_head_type = of_target.pad_token_id, "vanilla"  # no text has this token
    config.enable_confidence_head = config.confidence_head_with_markov = True
    draft, body = DSpark(config), cast(Any, target.base_model)
    frozen = ((draft.embed_tokens, target.get_input_embeddings()), (draft.lm_head, target.get_output_embeddings()))
    for own, given in (*frozen, (draft.norm, body.norm)):
        cast(Any, own).load_state_dict(given.state_dict())
    for own, _ in frozen:
        cast(Any, own).requires_grad_(False)
    draft.bind(target)
    return draft


def dspark_pupil(draft: DSpark, target: PreTrainedModel, *, num_anchors: int, seed: int) -> Pupil:
    """A draft that learns beside a frozen target, with its confidence head; the seed decides which blocks it learns."""

    def lesson(batch: StoryBatch, step: int) -> tuple[Float[Tensor, ""], float]:
        generator = torch.Generator().manual_seed((seed << 32) + step)
        loss = loss_of(proposed(draft, target, batch, drawn_anchors(batch, num_anchors, generator)))
        return loss, loss.item()

    return Pupil(draft, lesson)


def drawn_anchors(
    batch: StoryBatch, num: int | None, generator: torch.Generator | None = None
) -> Int[Tensor, "batch block"]:
    """Places of response tokens that another follows, all of them or so many at random; 0 stands for none."""
    has_next = functional.pad(batch.is_learned[:, :-1] & batch.is_learned[:, 1:], (1, 0))
    num = int(has_next.sum(1).max()) if num is None else min(num, has_next.shape[1])
    order = torch.rand(has_next.shape, generator=generator).masked_fill(~has_next, 2.0)
    places = order.topk(num, largest=False).indices
    return places * has_next.gather(1, places)


def proposed(
    draft: DSpark, target: PreTrainedModel, batch: StoryBatch, anchors: Int[Tensor, "batch block"]
) -> Proposed:
    """What a draft says of the blocks that begin at some places; blocks at place 0 are left out."""
    with torch.no_grad():
        output = target.base_model(input_ids=batch.ids, use_cache=False, output_hidden_states=True)
        features = torch.cat([output.hidden_states[layer_id] for layer_id in draft.target_layer_ids], -1)
    is_block = anchors > 0
    rows = is_block.nonzero()[:, :1]
    starts = anchors[is_block][:, None] + torch.arange(draft.block_size)
    counts = starts < batch.is_learned.shape[1]
    starts = starts.clamp(max=batch.is_learned.shape[1] - 1)
    counts = (counts & batch.is_learned[rows, starts]).cummin(1).values
    hidden = draft.joined(draft.on_text(features, batch.ids, anchors)[is_block], batch.ids[rows, starts])
    with torch.no_grad():
        p = target.get_output_embeddings()(output.last_hidden_state[rows, starts]).softmax(-1)
    return Proposed(
        draft.logits(hidden).log_softmax(-1), p, batch.ids[rows, starts + 1], draft.confidence(hidden), counts
    )


def loss_of(blocks: Proposed) -> Float[Tensor, ""]:
    """The loss of some blocks."""
    weight = blocks.counts * torch.exp(-torch.arange(blocks.counts.shape[1]) / _DECAY)
    entropy = functional.nll_loss(blocks.log_q.flatten(0, 1), blocks.following.flatten(), reduction="none")
    distance = (blocks.log_q.exp() - blocks.p).abs().sum(-1)
    doubt = functional.binary_cross_entropy_with_logits(blocks.confidence, blocks.acceptance_rate, reduction="none")
    of_place = _ENTROPY_WEIGHT * entropy.view_as(weight) + _DISTANCE_WEIGHT * distance + doubt
    return (of_place * weight).sum() / weight.sum()


@torch.no_grad()
def figures_of(draft: DSpark, target: PreTrainedModel, batches: Sequence[StoryBatch]) -> dict[str, Any]:
    """What a draft and its confidence head come to on whole texts at temperature 1, place by place in the block: mean
    acceptance_rate, mean confidence, Brier score; and the tokens of a round that verifies whole blocks.
    """
    parts = [proposed(draft, target, batch, drawn_anchors(batch, None)) for batch in batches]
    rate, said = (
        torch.cat(columns)
        for columns in zip(*((part.acceptance_rate, part.confidence.sigmoid()) for part in parts), strict=True)
    )
    counts = torch.cat([part.counts for part in parts])
    return {
        name: [round(value, 4) for value in ((values * counts).sum(0) / counts.sum(0)).tolist()]
        for name, values in (("acceptance_rates", rate), ("confidences", said), ("brier", (said - rate) ** 2))
    } | {"acceptance_length": round(1 + (rate * counts).cumprod(-1).sum(-1).mean().item(), 4)}


def save_dspark(draft: DSpark, directory: Path, figures: dict[str, Any]) -> None:
    """Write a draft in DeepSpec's layout, and its figures."""
    save_draft(directory, draft.config, "Qwen3DSparkModel", draft.state_dict())
    (directory / "figures.json").write_text(json.dumps(figures, indent=2, sort_keys=True) + "\n", encoding="utf-8")

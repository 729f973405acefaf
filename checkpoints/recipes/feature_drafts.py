"""Feature drafts for a small target, `checkpoints/tiny/{eagle,glide}`: how they learn, and how they are saved, as the
released ones are.

    eagle   EAGLE-1 (github.com/SafeAILab/EAGLE, train/main.py): SmoothL1(f̂, f) and KL(p || q); and, as in HASS and
            EAGLE-3's "training-time test" (arXiv 2408.15766, 2503.01840), at several depths: depth k + 1 reads the
            outputs of depth k, which is what drafting meets. Departures: the divergence weighs as much as the
            distance, not a tenth of it; features are not noised, since deeper ones err by themselves; depths weigh
            .8^k as in EAGLE-3, which has no distance; and HASS's loss on the likeliest tokens alone is left out.
    glide   GliDe (arXiv 2402.02082): cross-attention does not see the newest blocks of the target's keys. Departure:
            KL(p || q) in place of the text's own tokens, which makes free choices of wording agree, as for the draft
            of the trio.

The target is frozen, and reads each batch once for both. This is a recipe for small models and no framework: for large
ones there are SpecForge and speculators, whose drafts load.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache, LlamaConfig, PreTrainedModel

from checkpoints.recipes.fit import Pupil
from checkpoints.recipes.saved import save_draft
from checkpoints.recipes.training import StoryBatch
from lm.features.draft import FeatureDraft, Outputs
from lm.features.eagle import Eagle
from lm.features.glide import Glide, delayed

FEATURE_DRAFTS = ("eagle", "glide")
_BLOCK_SIZE = 5  # tokens per block of GliDe, which is how far the target's keys may lie behind
NUM_DEPTHS = 5  # tokens of a draft that are measured
_NUM_TAUGHT, _DEPTH_WEIGHT = 3, 0.8  # tokens of a draft that EAGLE learns from, and the weight of each over the last
_NO_KEYS = ("architectures", "dtype", "transformers_version")  # of the target's config; its draft has its own


def new_feature_draft(kind: str, target: PreTrainedModel) -> FeatureDraft:
    """A draft of the target's sizes, bound to it; GliDe's begins as the first layer of the target, a Llama, EAGLE's
    layer is random.
    """
    target_config = target.config.get_text_config()
    body: Any = target.base_model
    config = layer_config(target, is_tied=kind == "glide")
    if kind == "eagle":
        eagle = Eagle(config)
        assert eagle.embed_tokens is not None
        eagle.embed_tokens.load_state_dict(body.embed_tokens.state_dict())
        eagle.embed_tokens.requires_grad_(False)
        return eagle.bind(target)
    num_heads = config.large_num_attention_heads = target_config.num_attention_heads
    config.large_hidden_size, config.block_size = num_heads * target_config.head_dim, _BLOCK_SIZE
    glide = Glide(config, target_config.num_hidden_layers)
    assert glide.embed_tokens is not None
    glide.embed_tokens.load_state_dict(target.get_output_embeddings().state_dict())
    glide.norm.load_state_dict(body.norm.state_dict())
    glide.layers[0].load_state_dict(body.layers[0].state_dict(), strict=False)  # all but cross-attention
    torch.nn.init.zeros_(glide.layers[0].get_parameter("cross_attn.o_proj.weight"))
    return glide.bind(target)


def layer_config(target: PreTrainedModel, *, is_tied: bool) -> LlamaConfig:
    """The config of one Llama layer of the target's sizes."""
    of_target = target.config.get_text_config().to_diff_dict()
    keys = {name: value for name, value in of_target.items() if not name.startswith("_") and name not in _NO_KEYS}
    return LlamaConfig(**keys | {"num_hidden_layers": 1, "tie_word_embeddings": is_tied})


def feature_pupil(draft: FeatureDraft) -> Pupil:
    """A draft that learns from a `TargetReading`; its figure is KL(p || q) of first tokens, in nats per token."""
    return Pupil(draft, lambda reading, step: _loss(draft, reading), has_muon=False)


@torch.no_grad()
def acceptance_rates(draft: FeatureDraft, target: PreTrainedModel, batches: Sequence[StoryBatch]) -> list[float]:
    """Mean acceptance_rate of the first, second, … token of drafts along the text, over the learned positions of some
    batches.
    """
    rates = []
    for batch in batches:
        reading = TargetReading.of(target, batch)
        at_depths = [torch.minimum(log_q.exp(), reading.log_p.exp()).sum(-1) for log_q in said(draft, reading)]
        rates.append(torch.stack(at_depths))
    return torch.cat(rates, -1).mean(-1).tolist()


@dataclass(frozen=True)
class TargetReading:
    """Features, keys and likeliest tokens of the target for one batch. Learned positions: their next token is to be
    said, and NUM_DEPTHS or more are before them.
    """

    tokens: Int[Tensor, "batch position"]
    is_learned: Bool[Tensor, "batch position"]
    states: Float[Tensor, "batch position hidden"]
    """After the final norm."""
    log_p: Float[Tensor, "learned vocab"]
    cache: Any

    @classmethod
    @torch.no_grad()
    def of(cls, target: PreTrainedModel, batch: StoryBatch) -> "TargetReading":
        """Run the target's forward over a batch."""
        tokens, is_learned = batch.ids[:, :-1], batch.is_learned.clone()
        is_learned[:, :NUM_DEPTHS] = False  # no draft of so many tokens ends there
        output = target.base_model(input_ids=tokens, use_cache=True)
        log_p = target.get_output_embeddings()(output.last_hidden_state[is_learned]).log_softmax(-1)
        return cls(tokens, is_learned, output.last_hidden_state, log_p, output.past_key_values)

    @property
    def positions(self) -> Int[Tensor, "batch position"]:
        """Positions of the tokens in their texts."""
        return torch.arange(self.tokens.shape[1]).expand(len(self.tokens), -1)

    def divergence(self, log_q: Float[Tensor, "learned vocab"]) -> Float[Tensor, ""]:
        """KL(p || q), in nats per token."""
        return functional.kl_div(log_q, self.log_p, log_target=True, reduction="batchmean")


def said(draft: FeatureDraft, reading: TargetReading) -> Iterator[Float[Tensor, "learned vocab"]]:
    """log q at the learned positions, as the first, second, … token of drafts along the text, each begun so many tokens
    before.
    """
    if isinstance(draft, Glide):
        place = torch.arange(reading.tokens.shape[1])
        for depth in range(1, NUM_DEPTHS + 1):
            is_seen = (place <= place[:, None] - depth) | (place == 0)
            yield _glide_says(draft, reading, is_seen[None, None])
        return
    assert isinstance(draft, Eagle)
    for outputs in islice(unrolled(draft, reading.tokens, reading.states), NUM_DEPTHS):
        yield draft.logits(outputs.hidden[reading.is_learned[:, 1:]]).log_softmax(-1)


def unrolled(
    draft: Eagle, tokens: Int[Tensor, "batch position"], states: Float[Tensor, "batch position hidden"]
) -> Iterator[Outputs]:
    """An EAGLE draft's outputs at depth 1, 2, … of drafts from all entries at once, endlessly; each feeds the data's
    tokens, not its own.

    Entry t reads token t + 1. At depth k + 1 it stands k tokens behind a root whose target state it cannot see past: it
    reads the output of entry t - 1 at depth k, and sees the entries up to t - k at depth 1 and, of the others, those of
    its own draft: t - k + m at depth m + 1. The first k entries have no root, and mean nothing.
    """
    cache, positions = DynamicCache(), torch.arange(tokens.shape[1] - 1).expand(len(tokens), -1)
    behind = positions[0][:, None] - positions[0]  # [entry seen]: how far back
    fed = draft.entering(states[:, :-1])
    for depth in count():
        seen = [behind >= depth, *(behind == depth - other for other in range(1, depth + 1))]
        outputs = draft(tokens[:, 1:], fed, positions, cache=cache, mask=torch.cat(seen, -1)[None, None])
        yield outputs
        fed = functional.pad(outputs.states[:, :-1], (0, 0, 1, 0))


def _loss(draft: FeatureDraft, reading: TargetReading) -> tuple[Float[Tensor, ""], float]:
    """(the loss, the divergence alone for drafts of one token)"""
    if isinstance(draft, Glide):
        divergence = reading.divergence(
            _glide_says(draft, reading, delayed(reading.tokens.shape[1], draft.config.block_size))
        )
        return divergence, divergence.item()
    assert isinstance(draft, Eagle)
    is_learned, losses, divergences = reading.is_learned[:, 1:], [], []
    for depth, outputs in enumerate(islice(unrolled(draft, reading.tokens, reading.states), _NUM_TAUGHT)):
        states = outputs.states[is_learned]
        divergences.append(reading.divergence(draft.logits(states).log_softmax(-1)))
        distance = functional.smooth_l1_loss(states, reading.states[:, 1:][is_learned])
        losses.append(_DEPTH_WEIGHT**depth * (divergences[-1] + distance))
    return torch.stack(losses).sum(), divergences[0].item()


def _glide_says(
    draft: Glide, reading: TargetReading, cross_mask: Bool[Tensor, "1 1 node seen"]
) -> Float[Tensor, "learned vocab"]:
    """log q at the learned positions."""
    layers = [reading.cache.layers[place] for place in draft.cached_layer_ids]
    seen = [(layer.keys, layer.values) for layer in layers]
    hidden = draft(reading.tokens, seen, reading.positions, cross_mask=cross_mask).hidden
    return draft.logits(hidden[reading.is_learned]).log_softmax(-1)


def save_feature_draft(draft: FeatureDraft, directory: Path) -> None:
    """Write a draft in its released layout."""
    is_glide = isinstance(draft, Glide)
    tensors = {("model." if is_glide else "") + name: tensor for name, tensor in draft.state_dict().items()}
    save_draft(directory, draft.config, "LlamaForCausalLM", tensors, **({} if is_glide else {"bias": True}))

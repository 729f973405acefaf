"""Feature drafts for a small target, `checkpoints/tiny/{eagle,glide}`: how they learn, and how they are saved, as the released ones are.

    eagle   EAGLE-1 (github.com/SafeAILab/EAGLE, train/main.py): SmoothL1(f̂, f) and KL(p || q), the target's features noised. Departure: the
            divergence weighs as much as the distance, not a tenth of it.
    glide   GliDe (arXiv 2402.02082): cross-attention does not see the newest blocks of the target's keys. Departure: KL(p || q) in place of
            the text's own tokens, which makes free choices of wording agree, as for the draft of the trio.

The target is frozen, and reads each batch once for both. This is a recipe for small models and no framework: for large ones there are
SpecForge and speculators, whose drafts load.
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, PreTrainedModel

from data_gen.tiny.training import Batch, Optimiser
from lm.features.draft import FeatureDraft
from lm.features.eagle import Eagle
from lm.features.glide import Glide, delayed

FEATURE_DRAFTS = ("eagle", "glide")
_BLOCK_SIZE = 5
"""Of GliDe: tokens per block, which is how far the target's keys may lie behind."""
_NO_KEYS = ("architectures", "dtype", "transformers_version")
"""Of the target's config, what its draft does not share."""
_NOISE = 0.2 * 512
"""Width of the noise on features, times the length of the text."""


def new_feature_draft(kind: str, target: PreTrainedModel) -> FeatureDraft:
    """A draft of the target's sizes, bound to it; GliDe's begins as the first layer of the target, a Llama, EAGLE's layer is random."""
    theirs = target.config.get_text_config()
    body: Any = target.base_model
    keys = {name: value for name, value in theirs.to_diff_dict().items() if not name.startswith("_") and name not in _NO_KEYS}
    config = LlamaConfig(**keys | {"num_hidden_layers": 1, "tie_word_embeddings": kind == "glide"})
    if kind == "eagle":
        eagle = Eagle(config)
        assert eagle.embed_tokens is not None
        eagle.embed_tokens.load_state_dict(body.embed_tokens.state_dict())
        eagle.embed_tokens.requires_grad_(False)
        return eagle.bind(target)
    config.large_hidden_size, config.large_num_attention_heads = theirs.num_attention_heads * theirs.head_dim, theirs.num_attention_heads
    config.block_size = _BLOCK_SIZE
    glide = Glide(config, theirs.num_hidden_layers)
    assert glide.embed_tokens is not None
    glide.embed_tokens.load_state_dict(target.get_output_embeddings().state_dict())
    glide.norm.load_state_dict(body.norm.state_dict())
    glide.layers[0].load_state_dict(body.layers[0].state_dict(), strict=False)  # all but cross-attention
    for name, parameter in glide.layers[0].named_parameters():
        if name == "cross_attn.o_proj.weight":
            torch.nn.init.zeros_(parameter)
    return glide.bind(target)


def teach(
    drafts: Sequence[FeatureDraft], target: PreTrainedModel, source: Iterator[Batch], *, num_steps: int, learning_rate: float
) -> Iterator[list[float]]:
    """Train drafts beside a frozen target; yields KL(p || q) of each, in nats per token, for drafts of one token."""
    target.requires_grad_(False)
    optimisers = [Optimiser(draft, learning_rate, num_steps, has_muon=isinstance(draft, Eagle)) for draft in drafts]
    for batch in islice(source, num_steps):
        told = _Told.of(target, batch)
        losses = []
        for draft, optimiser in zip(drafts, optimisers, strict=True):
            log_q, distance = _said(draft, told)
            divergence = functional.kl_div(log_q, told.log_p, log_target=True, reduction="batchmean")
            optimiser.step(divergence + distance)
            losses.append(divergence.item())
        yield losses
    for draft in drafts:
        draft.eval()


@torch.no_grad()
def acceptance_of(draft: FeatureDraft, target: PreTrainedModel, batches: Sequence[Batch]) -> float:
    """Mean acceptance_rate over the learned positions of some batches, for drafts of one token."""
    rates = []
    for batch in batches:
        told = _Told.of(target, batch)
        rates.append(torch.minimum(_said(draft, told, is_noised=False)[0].exp(), told.log_p.exp()).sum(-1))
    return torch.cat(rates).mean().item()


@dataclass(frozen=True)
class _Told:
    """What the target says of a batch; learned positions are those whose next token is to be said, but for the first of a text."""

    tokens: Int[Tensor, "batch position"]
    is_learned: Bool[Tensor, "batch position"]
    states: Float[Tensor, "batch position hidden"]
    """After the final norm."""
    log_p: Float[Tensor, "learned vocab"]
    cache: Any

    @classmethod
    @torch.no_grad()
    def of(cls, target: PreTrainedModel, batch: Batch) -> "_Told":
        tokens, is_learned = batch.ids[:, :-1], batch.is_learned.clone()
        is_learned[:, 0] = False  # EAGLE's first entry stands for the second token
        output = target.base_model(input_ids=tokens, use_cache=True)
        log_p = target.get_output_embeddings()(output.last_hidden_state[is_learned]).log_softmax(-1)
        return cls(tokens, is_learned, output.last_hidden_state, log_p, output.past_key_values)


def _said(draft: FeatureDraft, told: _Told, *, is_noised: bool = True) -> tuple[Float[Tensor, "learned vocab"], Float[Tensor, ""]]:
    """What a draft says at the learned positions, log q, and how far its features are from the target's."""
    if isinstance(draft, Glide):
        layers = [told.cache.layers[place] for place in draft.cached_layer_ids]
        seen, mask = [(layer.keys, layer.values) for layer in layers], delayed(told.tokens.shape[1], draft.config.block_size)
        hidden = draft(told.tokens, seen, _positions(told.tokens), cross_mask=mask).hidden[told.is_learned]
        return draft.logits(hidden).log_softmax(-1), hidden.new_zeros(())
    assert isinstance(draft, Eagle)
    # entry t reads token t + 1 and the state of token t, and says what the target says after token t + 1
    tokens, states, is_learned = told.tokens[:, 1:], told.states[:, :-1], told.is_learned[:, 1:]
    noise = (torch.rand_like(states) - 0.5) * (_NOISE / states.shape[1] if is_noised else 0.0)
    hidden = draft(tokens, draft.entering(states + noise), _positions(tokens)).hidden[is_learned]
    return draft.logits(hidden).log_softmax(-1), functional.smooth_l1_loss(hidden, told.states[:, 1:][is_learned])


def _positions(tokens: Int[Tensor, "batch position"]) -> Int[Tensor, "batch position"]:
    return torch.arange(tokens.shape[1]).expand(len(tokens), -1)


def save_feature_draft(draft: FeatureDraft, directory: Path) -> None:
    """Write it in bfloat16 in its released layout; the directory appears whole or not at all."""
    partial = directory.with_name(f".{directory.name}.partial")  # a rename is atomic, a directory of files is not
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    is_glide = isinstance(draft, Glide)
    config = draft.config.to_diff_dict() | {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    config |= {} if is_glide else {"bias": True}
    (partial / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    prefix = "model." if is_glide else ""
    tensors = {prefix + name: tensor.detach().bfloat16().contiguous() for name, tensor in draft.state_dict().items()}
    save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
    for file in partial.iterdir():
        file.chmod(0o644)
    shutil.rmtree(directory, ignore_errors=True)
    partial.rename(directory)

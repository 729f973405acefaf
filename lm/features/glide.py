"""GliDe's draft (arXiv 2402.02082): a small decoder with its own embeddings, whose layers also attend to the
target's cache.

    h ← h + self_attn(norm h)      h ← h + cross_attn(h)      h ← h + mlp(norm h)

Cross-attention has its own queries, and the keys and values that the target has cached, RoPE included. Its input
is not normed, its queries are rotated with base 10,000 whatever the target's, and draft layer j of D reads target
layer L - D + j. The newest token is not in the target's cache yet: a query sees what the last verification left
there. Training hides as much (`delayed`).
"""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding, rotate_half

from lm.features.base import FeatureDraft, Mask, Nodes, Outputs, Rotation, States, causal
from lm.masks import visible

KeysValues = tuple[Float[Tensor, "batch heads seen size"], Float[Tensor, "batch heads seen size"]]
"""Cached keys and values of one layer of the target."""
CrossMask = Bool[Tensor, "1 1 node seen"]  # the target's keys that each node sees


class GlideLayer(LlamaDecoderLayer):
    """Llama's layer with cross-attention in the middle."""

    def __init__(self, config: LlamaConfig, index: int) -> None:
        super().__init__(config, index)
        self.num_heads = config.large_num_attention_heads
        width = config.large_hidden_size // self.num_heads * self.num_heads
        sizes = {"q_proj": (config.hidden_size, width), "o_proj": (width, config.hidden_size)}
        self.cross_attn = nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes.items()})

    def forward(  # type: ignore[override]  # it reads the target's cache, too
        self,
        states: States,
        of_target: KeysValues,
        *,
        rotations: tuple[Rotation, Rotation],
        masks: tuple[Mask | None, CrossMask | None],
        cache: Cache | None,
    ) -> States:
        """The residual stream after the layer; rotations and masks are for self-attention and cross-attention."""
        own_mask, cross_mask = masks
        attended, _ = self.self_attn(
            self.input_layernorm(states),
            position_embeddings=rotations[0],
            attention_mask=own_mask,
            past_key_values=cache,
        )
        states = states + attended
        queries = self.cross_attn["q_proj"](states).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        cosines, sines = (part.unsqueeze(1) for part in rotations[1])
        queries = queries * cosines + rotate_half(queries) * sines
        keys, values = (part.to(queries.device, queries.dtype) for part in of_target)
        attended = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=cross_mask, enable_gqa=True)
        states = states + self.cross_attn["o_proj"](attended.transpose(1, 2).flatten(-2))
        return states + self.mlp(self.post_attention_layernorm(states))


class Glide(FeatureDraft):
    """A GliDe draft."""

    target_layer_ids = ()

    def __init__(self, config: LlamaConfig, num_target_layers: int) -> None:
        """`config`: Llama's keys, and the target's `large_hidden_size` and `large_num_attention_heads`."""
        super().__init__(config, has_embedding=True, has_head=not config.tie_word_embeddings)
        self.layers = nn.ModuleList([GlideLayer(config, index) for index in range(config.num_hidden_layers)])
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        rope = {"rope_type": "default", "rope_theta": 10_000.0}
        sizes = {"head_dim": config.large_hidden_size // config.large_num_attention_heads, "rope_parameters": rope}
        of_queries = LlamaConfig(max_position_embeddings=config.max_position_embeddings, **sizes)
        self.cross_rotary_emb = LlamaRotaryEmbedding(of_queries)
        self.cached_layer_ids = tuple(range(num_target_layers - config.num_hidden_layers, num_target_layers))

    def logits(self, hidden: Float[Tensor, "*node hidden"]) -> Float[Tensor, "*node vocab"]:
        if self.lm_head is None and self.embed_tokens is not None:
            return functional.linear(hidden, self.embed_tokens.weight)
        return super().logits(hidden)

    def keys_values(self, cache: Cache, length: int) -> list[KeysValues]:
        """What it reads of the first `length` tokens in a target's cache."""
        layers: list[Any] = [cache.layers[index] for index in self.cached_layer_ids]
        return [(layer.keys[:, :, :length], layer.values[:, :, :length]) for layer in layers]

    def forward(
        self,
        tokens: Nodes,
        keys_values: list[KeysValues],
        positions: Nodes,
        *,
        cache: Cache | None = None,
        mask: Mask | None = None,
        cross_mask: CrossMask | None = None,
    ) -> Outputs:
        """Append tokens to a `lm.cache.growing_cache` (None: nothing comes before, and nothing is kept). Each node sees
        `mask` of the draft's nodes (None: a chain), and `cross_mask` of the target's `keys_values` (None: all).
        """
        states = self.embed(tokens)
        mask = causal(tokens, cache, states.device) if mask is None else mask
        rotations = self.rotary_emb(states, positions), self.cross_rotary_emb(states, positions)
        for layer, of_target in zip(self.layers, keys_values, strict=True):
            states = layer(states, of_target, rotations=rotations, masks=(mask, cross_mask), cache=cache)
        return Outputs(states, self.norm(states))


def delayed(num_tokens: int, block_size: int) -> Bool[Tensor, "1 1 token seen"]:
    """Mask of the target's keys in training: those of the blocks before a token's block, and in the first block
    all up to the token.

    Worked example: 5 tokens in blocks of 2 see 1, 2, 2, 2, 4 of the target's keys.
    """
    positions = torch.arange(num_tokens)
    starts = positions // block_size * block_size
    return visible(torch.where(starts > 0, starts - 1, positions), num_tokens)[None, None]

"""What feature drafts share: embeddings and output head, perhaps the target's own, a reduced vocabulary, and a layer's
second half.

Names of parameters are those of the released checkpoints, so that `load_state_dict` is all that loading takes
(`lm.features.loading`).
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from lm.caches.buffers import BufferLayer

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines of the rotary embedding, one row per position."""


class Outputs(NamedTuple):
    """Outputs of a forward for each node."""

    states: Float[Tensor, "batch node hidden"]
    """States that the nodes that follow are fed in place of the target's features."""
    hidden: Float[Tensor, "batch node hidden"]
    """Input of the output head, and with it of every acceptance head."""


class _Target(NamedTuple):
    """The parts that a draft borrows of its target and must not own: moving the draft would move them too."""

    embedding: nn.Module
    head: nn.Module
    vocab_size: int


class FeatureDraft(nn.Module):
    """A draft for one target. Bind it to the target before use."""

    lag = 0
    """The entry of token t has position t - lag, and reads what the target said up to token t - 1."""
    target_ids: Int[Tensor, " reduced"] | None
    name_or_path = ""
    """Directory or repository that it was loaded from."""

    def __init__(self, config: LlamaConfig, *, has_embedding: bool, num_logits: int | None) -> None:
        """Args:
        config: of the draft's layer.
        has_embedding: its own input embeddings; otherwise the target's serve.
        num_logits: width of its own output head; None: the target's head serves.
        """
        super().__init__()
        config._attn_implementation = "sdpa"
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if has_embedding else None
        self.lm_head = None if num_logits is None else nn.Linear(config.hidden_size, num_logits, bias=False)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.register_buffer("target_ids", None, persistent=False)
        self._target: _Target | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of its weights."""
        return next(self.parameters()).dtype

    @property
    def device(self) -> torch.device:
        """Device that it computes on."""
        return next(self.parameters()).device

    @property
    def num_logits(self) -> int:
        """Width of `logits`."""
        has_own = self.lm_head is not None and self.target_ids is None
        return self.lm_head.out_features if has_own and self.lm_head is not None else self.target.vocab_size

    @property
    def target_layer_ids(self) -> tuple[int, ...] | None:
        """Layers after which it reads the target's residual stream; None: after the final norm."""
        return None

    def reduce(self, target_ids: Int[Tensor, " reduced"]) -> None:
        """Set the target's ids that the draft's own head names, in this order."""
        self.target_ids = target_ids

    def bind(self, target: PreTrainedModel) -> "FeatureDraft":
        """Borrow from this target what the draft has none of; the target's own number of layers is that of its
        config.
        """
        head = target.get_output_embeddings()
        self._target = _Target(target.get_input_embeddings(), head, target.config.get_text_config().vocab_size)
        return self

    def is_bound_to(self, target: PreTrainedModel) -> bool:
        """Whether it borrows from this very model."""
        return self._target is not None and self._target.head is target.get_output_embeddings()

    @property
    def target(self) -> _Target:
        """The borrowed parts of the target."""
        assert self._target is not None, "bind the draft to its target first"
        return self._target

    @property
    def embedding(self) -> nn.Module:
        """The input embeddings."""
        return self.target.embedding if self.embed_tokens is None else self.embed_tokens

    def embed(self, tokens: Int[Tensor, "*node"]) -> Float[Tensor, "*node hidden"]:
        """Input embeddings, where the draft is."""
        embedding = self.embedding
        return embedding(tokens.to(next(embedding.parameters()).device)).to(self.device, self.dtype)

    def logits(self, hidden: Float[Tensor, "*node hidden"]) -> Float[Tensor, "*node vocab"]:
        """Logits over the target's vocabulary; -inf where a reduced one has no entry."""
        head = self.target.head if self.lm_head is None else self.lm_head
        weight = next(head.parameters())
        narrow = head(hidden.to(weight.device, weight.dtype))
        if self.target_ids is None:
            return narrow
        wide = narrow.new_full((*narrow.shape[:-1], self.target.vocab_size), float("-inf"))
        return wide.index_copy_(-1, self.target_ids, narrow)

    def new_cache(self, capacity: int) -> DynamicCache:
        """An empty cache for the draft's layers, which `roll_back` cuts."""
        cache = DynamicCache()
        cache.layers = [BufferLayer(capacity) for _ in range(self.config.num_hidden_layers)]
        return cache


def roll_back(cache: Cache, length: int) -> None:
    """Keep the first `length` entries of a draft's cache."""
    for layer in cache.layers:
        layer.roll_back(length)  # type: ignore[union-attr]  # `new_cache` makes buffers


def causal(num_new: int, num_cached: int, device: torch.device) -> Bool[Tensor, "1 1 new seen"] | None:
    """Whom each of the new entries of a chain sees: all before it and itself; None where attention knows that by
    itself.
    """
    if num_new == 1 or num_cached == 0:
        return None
    return torch.ones(num_new, num_cached + num_new, dtype=torch.bool, device=device).tril(num_cached)[None, None]


class DraftLayer(nn.Module):
    """Llama's layer behind its first norm: attention, whose input may be wider than the residual stream, and the
    MLP.
    """

    def __init__(self, config: LlamaConfig, *, input_size: int, qkv_bias: bool) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(config, 0)
        for name in ("q_proj", "k_proj", "v_proj"):
            width = getattr(self.self_attn, name).out_features
            setattr(self.self_attn, name, nn.Linear(input_size, width, bias=qkv_bias))
        self.mlp = LlamaMLP(config)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        inputs: Float[Tensor, "batch node input"],
        residual: Float[Tensor, "batch node hidden"],
        *,
        rotation: Rotation,
        mask: Bool[Tensor, "1 1 node seen"] | None,
        cache: Cache | None,
    ) -> Float[Tensor, "batch node hidden"]:
        """The residual stream behind the layer."""
        attended, _ = self.self_attn(inputs, position_embeddings=rotation, attention_mask=mask, past_key_values=cache)
        states = residual + attended
        return states + self.mlp(self.post_attention_layernorm(states))

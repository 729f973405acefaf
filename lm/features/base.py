"""What feature drafts share: embeddings and LM head, perhaps those of the target, a reduced vocabulary, Llama's layer.

Parameters have the names of the released checkpoints, so that `load_state_dict` is all that loading takes
(`lm.features.loading`).
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen3Config
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from lm.masks import visible

Nodes = Int[Tensor, "batch node"]  # token ids, or positions
States = Float[Tensor, "batch node hidden"]
Rotation = tuple[Tensor, Tensor]  # cosines and sines of RoPE, one row per position
Mask = Bool[Tensor, "1 1 node cached"]  # the cache entries that each node sees (`lm.masks`)


class Outputs(NamedTuple):
    states: States  # what later nodes read instead of the target's features
    hidden: States  # input of the LM head and of acceptance heads


class FeatureDraft(nn.Module):
    """A draft for one target. Bind it to the target before use."""

    cached_layer_ids: tuple[int, ...] = ()  # layers of the target, from 0, whose cached keys and values it reads
    target_layer_ids: tuple[int, ...] | None = None
    """Layers after which it reads the target's residual stream, 0 for its embedding; None: after the final norm."""
    lag = 0
    """The entry of token t has position t - lag, and reads the target's states up to token t - 1."""
    target_ids: Int[Tensor, " reduced"] | None
    """The target's ids that a reduced vocabulary's logits are for, in their order; None: all."""
    name_or_path = ""  # directory or repository that it was loaded from

    def __init__(
        self, config: PreTrainedConfig, *, has_embedding: bool, has_head: bool, rotary: nn.Module | None = None
    ) -> None:
        """`config` is of the draft's layer, with the target's vocabulary. Without `has_embedding` or `has_head`
        the target's input embeddings or LM head are used; `rotary` None: Llama's.
        """
        super().__init__()
        config._attn_implementation = "sdpa"
        self.config = config
        self.hidden_size: int = config.hidden_size  # width of the input of its LM head and of acceptance heads
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if has_embedding else None
        self._has_head = has_head
        self.lm_head = nn.Linear(config.hidden_size, draft_vocab_size(config), bias=False) if has_head else None
        # other families have all keys that Llama's reads
        self.rotary_emb = LlamaRotaryEmbedding(config) if rotary is None else rotary  # type: ignore[arg-type]
        self.register_buffer("target_ids", None, persistent=False)
        # Once bound, the target's input embeddings and LM head. A tuple hides them from torch, which would
        # otherwise move, save and count them with the draft.
        self._borrowed: tuple[nn.Module, ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def bind(self, target: PreTrainedModel) -> "FeatureDraft":
        """Use the target's embeddings or LM head where the draft has none; for a reduced vocabulary, copy its rows."""
        self._borrowed = target.get_input_embeddings(), target.get_output_embeddings()
        if self.target_ids is not None and not self._has_head:
            weight = target.get_output_embeddings().weight.detach().to_dense()  # it may be packed
            rows = weight[self.target_ids.to(target.device)]
            self.lm_head = nn.Linear(rows.shape[1], rows.shape[0], bias=False, device=self.device, dtype=self.dtype)
            self.lm_head.weight = nn.Parameter(rows.to(self.device, self.dtype), requires_grad=False)
        return self

    def is_bound_to(self, target: PreTrainedModel) -> bool:
        """True if it is bound to this very model."""
        return self._borrowed[1:] == (target.get_output_embeddings(),)

    @property
    def embedding(self) -> nn.Module:
        return self._borrowed[0] if self.embed_tokens is None else self.embed_tokens

    def embed(self, tokens: Int[Tensor, "*node"]) -> Float[Tensor, "*node hidden"]:
        """Input embeddings, on the draft's device."""
        embedding = self.embedding
        return embedding(tokens.to(next(embedding.parameters()).device)).to(self.device, self.dtype)

    def logits(self, hidden: Float[Tensor, "*node hidden"]) -> Float[Tensor, "*node vocab"]:
        """Logits over the target's vocabulary; -inf for ids that a reduced one lacks."""
        head = self._borrowed[1] if self.lm_head is None else self.lm_head
        weight = next(head.parameters())
        return self.widened(head(hidden.to(weight.device, weight.dtype)), float("-inf"))

    def widened(self, narrow: Float[Tensor, "*node reduced"], fill: float) -> Float[Tensor, "*node vocab"]:
        """Numbers of the draft's vocabulary over the target's; `fill` for ids that a reduced one lacks."""
        if self.target_ids is None:
            return narrow
        wide = narrow.new_full((*narrow.shape[:-1], self.config.vocab_size), fill)
        return wide.index_copy_(-1, self.target_ids, narrow)


def draft_vocab_size(config: PreTrainedConfig) -> int:
    """Entries of a draft's vocabulary, which may be a reduced one."""
    return getattr(config, "draft_vocab_size", None) or config.vocab_size


def causal(tokens: Nodes, cache: Cache | None, device: torch.device) -> Mask | None:
    """Mask of new entries of a chain, each of which sees all before it; None if attention does so without a mask."""
    num_new = tokens.shape[1]
    num_cached = 0 if cache is None else cache.get_seq_length()
    if num_new == 1 or num_cached == 0:
        return None
    end = num_cached + num_new
    return visible(torch.arange(num_cached, end, device=device), end)[None, None]


def decoder_layer(config: LlamaConfig | Qwen3Config, index: int) -> Qwen3DecoderLayer | LlamaDecoderLayer:
    """Llama's or Qwen3's layer."""
    return Qwen3DecoderLayer(config, index) if isinstance(config, Qwen3Config) else LlamaDecoderLayer(config, index)


class DraftLayer(nn.Module):
    """Llama's or Qwen3's layer after its first norm; its attention's input may be wider than the residual stream."""

    def __init__(self, config: LlamaConfig | Qwen3Config, *, input_size: int, qkv_bias: bool) -> None:
        super().__init__()
        layer = decoder_layer(config, 0)
        self.self_attn = layer.self_attn
        self.mlp = layer.mlp
        self.post_attention_layernorm = layer.post_attention_layernorm
        for name in ("q_proj", "k_proj", "v_proj"):
            width = getattr(self.self_attn, name).out_features
            setattr(self.self_attn, name, nn.Linear(input_size, width, bias=qkv_bias))

    def forward(
        self,
        inputs: Float[Tensor, "batch node _"],
        residual: States,
        *,
        rotation: Rotation,
        mask: Mask | None,
        cache: Cache | None,
    ) -> States:
        """The residual stream after the layer."""
        attended, _ = self.self_attn(inputs, position_embeddings=rotation, attention_mask=mask, past_key_values=cache)
        states = residual + attended
        return states + self.mlp(self.post_attention_layernorm(states))

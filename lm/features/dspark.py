"""DSpark drafts (arXiv 2607.05147), as DeepSpec has them (github.com/deepseek-ai/DeepSpec): a block of tokens
from one forward. DFlash is the same without a Markov head. Where `sample_from_anchor` is false, h_0 is dropped:
h_{i+1} gives x_{i+1}.

With the anchor x_0, the newest token of the text, state i of a block gives x_{i+1}:

    c_t = hidden_norm(fc(features_t))                 context, of each token before the anchor: every layer makes a key
                                                      and a value of it by its own k_proj, k_norm and v_proj, at t
    h_0 … h_{B-1} = norm(layers(embed(x_0), embed(mask), …))   from the anchor's position on; all see the context and
                                                      the whole block, both ways
    q_i = softmax(lm_head(h_i) + W2 z_i)              z_i: vanilla W1[x_i]; gated sigmoid(gate [h_i; W1[x_i]]) W1[x_i];
        rnn tanh(o_i), where [g_i; c_i; o_i] = joint [s_i; W1[x_i]; h_i], s_0 = 0 and
        s_{i+1} = sigmoid(g_i) s_i + (1 - sigmoid(g_i)) tanh(c_i)
    confidence_i = proj [h_i; W1[x_i]], or proj h_i   logit of the acceptance rate of x_{i+1}, known before it is drawn

So tokens are drawn one after another without another forward. Heads and LM head read `hidden` of a token: [h_i;
W1[x_i]], and z_i where that is not W1[x_i]; `joined` makes it of known texts, `follow` token by token.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.cache_utils import Cache, DynamicCache
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm, apply_rotary_pos_emb

from lm.features.base import FeatureDraft, draft_vocab_size
from lm.features.released import markov_width
from lm.masks import visible
from lm.signals import upcast

Positions = Int[Tensor, "batch block"]
Blocks = Float[Tensor, "batch block draft hidden"]
Masks = Bool[Tensor, "batch 1 node cached"]
Hidden = Float[Tensor, "*block hidden"]
Previous = Int[Tensor, "*block"]
Wide = Float[Tensor, "*draft wide"]
Memory = Tensor | None
"""What a Markov head carries from token to token; None before the first, and if it carries nothing."""


class MarkovHead(nn.Module):
    """A bias from the previous token (vanilla), also from the state (gated), or from all of the block so far (rnn)."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.kind = config.markov_head_type
        self.rank = config.markov_rank
        self.markov_w1 = nn.Embedding(config.vocab_size, self.rank)
        self.markov_w2 = nn.Linear(self.rank, draft_vocab_size(config), bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(config.hidden_size + self.rank, self.rank)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * self.rank + config.hidden_size, 3 * self.rank)

    def step(self, states: Hidden, previous: Previous, memory: Memory) -> tuple[Float[Tensor, "*block parts"], Memory]:
        """(what `hidden` has beside the state, memory for the next token)."""
        embedded = self.markov_w1(previous)
        if self.kind == "vanilla":
            return embedded, None
        if self.kind == "gated":
            gate = self.gate_proj(torch.cat([states, embedded], -1)).sigmoid()
            return torch.cat([embedded, gate * embedded], -1), None
        memory = torch.zeros_like(embedded) if memory is None else memory
        gate, candidate, output = self.joint_proj(torch.cat([memory, embedded, states], -1)).chunk(3, -1)
        gate = gate.sigmoid()
        return torch.cat([embedded, output.tanh()], -1), gate * memory + (1 - gate) * candidate.tanh()

    def bias(self, parts: Float[Tensor, "*draft parts"]) -> Float[Tensor, "*draft vocab"]:
        """W2 z, which is added to the logits."""
        return self.markov_w2(parts[..., -self.rank :])


class DSpark(FeatureDraft):
    """A DSpark draft, or a DFlash one."""

    config: Qwen3Config
    target_layer_ids: tuple[int, ...]
    confidence_head: Any
    """DSpark's own acceptance head, a prefix head of depth 0 (law 4.8c); None: it has none."""

    def __init__(self, config: Qwen3Config, *, has_embedding: bool = True, has_head: bool = True) -> None:
        """`config`: Qwen3's keys, and `block_size`, `target_layer_ids` (0 is after the target's first layer, -1
        its embedding), `mask_token_id`, `markov_rank` (0: no Markov head), `markov_head_type`,
        `enable_confidence_head`, `confidence_head_with_markov`; `sample_from_anchor` is true where absent.
        `window_mask` says what `layer_types` with sliding_attention see.
        """
        super().__init__(config, has_embedding=has_embedding, has_head=has_head)
        size = config.hidden_size
        self.num_inputs: int = config.block_size  # tokens of a block that the layers read
        self.block_size = self.num_inputs - (not getattr(config, "sample_from_anchor", True))  # tokens that it drafts
        self.fc = nn.Linear(len(config.target_layer_ids) * size, size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(size, eps=config.rms_norm_eps)
        self.norm = Qwen3RMSNorm(size, eps=config.rms_norm_eps)
        self.target_layer_ids = tuple(layer_id + 1 for layer_id in config.target_layer_ids)
        rank = config.markov_rank or 0
        kind = config.markov_head_type if rank else None
        self.hidden_size = size + markov_width(rank, kind)
        layers = [Qwen3DecoderLayer(config, index) for index in range(config.num_hidden_layers)]
        for layer in layers:
            layer.self_attn.is_causal = False  # a block sees itself both ways
        self.layers = nn.ModuleList(layers)
        self.markov_head = MarkovHead(config) if kind else None
        self._confidence_size = size + (rank if config.confidence_head_with_markov else 0)
        proj = nn.Linear(self._confidence_size, 1)
        self.confidence_head = nn.ModuleDict({"proj": proj}) if config.enable_confidence_head else None

    def remember(self, features: Float[Tensor, "batch token feature"], cache: Cache) -> None:
        """Append context to the cache: keys and values of the text's next tokens, from the target's features."""
        context = self.hidden_norm(self.fc(features.to(self.device, self.dtype)))
        start = cache.get_seq_length()
        rotation = self.rotary_emb(context, torch.arange(start, start + context.shape[1], device=self.device)[None])
        for layer in self.layers:
            attention: Any = layer.self_attn
            shape = (*context.shape[:-1], -1, attention.head_dim)
            keys = attention.k_norm(attention.k_proj(context).view(shape)).transpose(1, 2)
            values = attention.v_proj(context).view(shape).transpose(1, 2)
            _, keys = apply_rotary_pos_emb(keys, keys, *rotation)
            cache.update(keys, values, attention.layer_idx)

    def block(self, anchors: Positions, positions: Positions, *, cache: Cache, mask: Masks | None = None) -> Blocks:
        """The states of blocks with these first tokens, in one forward, which appends them to the cache, after the
        context (`remember`). `mask` has the entries that each token sees, block after block; None: everything.
        """
        tokens = torch.full((*anchors.shape, self.num_inputs), self.config.mask_token_id, device=self.device)
        tokens[..., 0] = anchors
        states = self.embed(tokens.flatten(1))
        steps = torch.arange(self.num_inputs, device=self.device)
        rotation = self.rotary_emb(states, (positions[..., None] + steps).flatten(1))
        types = self.config.layer_types or ["full_attention"] * len(self.layers)
        masks = {"full_attention": mask}
        if "sliding_attention" in types:
            within = window_mask(self.config, positions, cache.get_seq_length())
            masks["sliding_attention"] = within if mask is None else mask & within
        for layer, kind in zip(self.layers, types, strict=True):
            states = layer(states, position_embeddings=rotation, attention_mask=masks[kind], past_key_values=cache)
        return self.norm(states).unflatten(1, (-1, self.num_inputs))[..., -self.block_size :, :]

    def on_text(
        self, features: Float[Tensor, "batch token feature"], tokens: Int[Tensor, "batch token"], positions: Positions
    ) -> Blocks:
        """The states of blocks of whole texts, as training needs them; a block sees only the text before its
        anchor. `positions` are those of the anchors.
        """
        cache = DynamicCache()  # gradients pass through what it holds
        self.remember(features, cache)
        mask = block_mask(positions, features.shape[1], self.num_inputs)
        return self.block(tokens.gather(1, positions), positions, cache=cache, mask=mask)

    def joined(self, states: Hidden, previous: Previous) -> Float[Tensor, "*block wide"]:
        """`hidden` of whole blocks; `previous`: the token before each drafted one."""
        if self.markov_head is None or self.markov_head.kind != "rnn":
            return self.follow(states, previous, None)[0]
        hidden = []
        memory: Memory = None
        for state, token in zip(states.unbind(-2), previous.unbind(-1), strict=True):
            wide, memory = self.follow(state, token, memory)
            hidden.append(wide)
        return torch.stack(hidden, -2)

    def follow(self, states: Hidden, previous: Previous, memory: Memory) -> tuple[Float[Tensor, "*block wide"], Memory]:
        """(`hidden` of one token of some blocks, memory for the next token)."""
        if self.markov_head is None:
            return states, None
        parts, memory = self.markov_head.step(states, previous, memory)
        return torch.cat([states, parts], -1), memory

    def base(self, states: Float[Tensor, "*draft hidden"]) -> Float[Tensor, "*draft vocab"]:
        """Logits without the previous token's bias."""
        return super().logits(states)

    def bias(self, hidden: Wide) -> Float[Tensor, "*draft vocab"]:
        """What the previous token adds to the logits."""
        if self.markov_head is None:
            return hidden.new_zeros(()).expand(*hidden.shape[:-1], self.config.vocab_size)
        return self.widened(self.markov_head.bias(hidden), 0.0)

    def logits(self, hidden: Wide) -> Float[Tensor, "*draft vocab"]:
        return self.base(hidden[..., : self.config.hidden_size]) + self.bias(hidden)

    def confidence(self, hidden: Wide) -> Float[Tensor, "*draft"]:
        """The draft's own logit of each token's acceptance rate, in float32 or wider."""
        assert self.confidence_head is not None, "this draft has no confidence head"
        return upcast(self.confidence_head["proj"](hidden[..., : self._confidence_size]).squeeze(-1))


def block_mask(positions: Positions, num_text: int, block_size: int) -> Masks:
    """Mask of blocks after the context of a text: each sees the text before its anchor, and itself.

    Worked example: with a text of 3 and blocks of 2 at positions 1 and 2, the rows are 1001100 twice and 1100011 twice.
    """
    owners = torch.arange(positions.shape[1], device=positions.device).repeat_interleave(block_size)
    in_block = (owners[:, None] == owners).expand(len(positions), -1, -1)
    return visible(positions.repeat_interleave(block_size, 1) - 1, num_text, in_block)[:, None]


def window_mask(config: Qwen3Config, positions: Positions, num_text: int) -> Masks:
    """Mask of what a sliding layer may see of a text and of all blocks, beside the block's own limits.

    A block sees the last `sliding_window` tokens before its anchor (speculators); with `window_follows_token`,
    each of its tokens sees so many up to itself (SpecForge). Inside a block a token sees later ones only with
    `sliding_window_non_causal`.
    """
    assert config.sliding_window is not None, "loading refuses sliding layers without a window"
    steps = torch.arange(config.block_size, device=positions.device)
    first = positions[..., None] - config.sliding_window + (steps + 1) * getattr(config, "window_follows_token", False)
    in_text = torch.arange(num_text, device=positions.device) >= first.flatten(1)[..., None]
    in_block = (steps <= steps[:, None]) | bool(getattr(config, "sliding_window_non_causal", False))
    num_blocks = positions.shape[1]
    in_blocks = in_block.repeat(num_blocks, num_blocks).expand(len(positions), -1, -1)
    return torch.cat([in_text, in_blocks], -1)[:, None]

"""EAGLE-1/2 and EAGLE-3 drafts (arXiv 2401.15077, 2406.16858, 2503.01840): a layer that reads the target's
features, perhaps with ordinary layers after it.

Entry t represents token x_{t+1} and has position t. It reads the token's embedding and a state s_t, and its
output gives q(x_{t+2}):

    EAGLE-1/2   f_{t+1} = layer(fc[embed(x_{t+1}); s_t])      q = softmax(head f)         (no norm before or after)
    EAGLE-3     a_{t+1} = layers([norm(embed(x_{t+1})); norm(s_t)]), residual s_t         q = softmax(head norm(a))

Where the target has read the text, `entering` makes s_t of its features: f_t, the state after its final norm, as it is;
or, for EAGLE-3, fc of three of its layers' outputs. Deeper in a draft s_t is the parent's `Outputs.states`. EAGLE-2 is
the tree that is grown from EAGLE-1's weights, with a mask (`lm.masks`), so both have one class.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import LlamaConfig, Qwen3Config
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from lm.features.base import DraftLayer, FeatureDraft, Mask, Nodes, Outputs, States, causal, decoder_layer


class Eagle(FeatureDraft):
    """An EAGLE-1 draft, whose weights are also EAGLE-2's."""

    lag = 1

    def __init__(self, config: LlamaConfig, *, has_embedding: bool = True, has_fc_bias: bool = True) -> None:
        super().__init__(config, has_embedding=has_embedding, has_head=False)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=has_fc_bias)
        qkv_bias = getattr(config, "qkv_bias", config.attention_bias)
        self.layers = nn.ModuleList([DraftLayer(config, input_size=config.hidden_size, qkv_bias=qkv_bias)])

    def entering(self, features: Float[Tensor, "batch node feature"]) -> States:
        """The states that nodes read where the target has read the text."""
        return features.to(self.device, self.dtype)

    def forward(
        self, tokens: Nodes, states: States, positions: Nodes, *, cache: Cache | None = None, mask: Mask | None = None
    ) -> Outputs:
        """Append entries with the tokens x_{t+1}, the states s_t and the positions t to a `lm.cache.growing_cache`;
        None: nothing comes before, and nothing is kept. `mask`: the entries that each entry sees; None: a chain.
        """
        inputs, residual = self._inputs(self.embed(tokens), states)
        mask = causal(tokens, cache, inputs.device) if mask is None else mask
        rotation = self.rotary_emb(inputs, positions)
        first, *further = self.layers
        states = first(inputs, residual, rotation=rotation, mask=mask, cache=cache)
        for layer in further:
            states = layer(states, position_embeddings=rotation, attention_mask=mask, past_key_values=cache)
        return self._outputs(states)

    def _inputs(self, embedded: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """(input of attention, the stream that it adds to)."""
        inputs = self.fc(torch.cat([embedded, states], -1))
        return inputs, inputs

    def _outputs(self, states: Tensor) -> Outputs:
        return Outputs(states, states)


class Eagle3(Eagle):
    """An EAGLE-3 draft. `layers.0` is what SafeAILab's checkpoints call `midlayer`."""

    def __init__(
        self,
        config: LlamaConfig | Qwen3Config,
        layer_ids: tuple[int, ...],
        *,
        target_size: int,
        has_embedding: bool = False,
        has_head: bool = False,
    ) -> None:
        """`config` is that of the layers: `norm_before_residual`, `norm_before_fc`, `fc_norm` and `norm_output`
        (speculators) are off where absent, `norm_logits` (SpecForge's `norm_output`) is on. `layer_ids`: layers of the
        target, of width `target_size`, after which its residual stream is read, as transformers counts hidden states.
        """
        FeatureDraft.__init__(self, config, has_embedding=has_embedding, has_head=has_head)
        self.target_layer_ids = layer_ids
        width = len(layer_ids) * target_size
        eps = config.rms_norm_eps
        self.input_norm = LlamaRMSNorm(width, eps=eps) if getattr(config, "norm_before_fc", False) else None
        norms = [LlamaRMSNorm(target_size, eps=eps) for _ in layer_ids] if getattr(config, "fc_norm", False) else []
        self.fc_norm = nn.ModuleList(norms)
        self.fc = nn.Linear(width, config.hidden_size, bias=False)
        first = DraftLayer(config, input_size=2 * config.hidden_size, qkv_bias=config.attention_bias)
        first.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=eps)
        first.hidden_norm = LlamaRMSNorm(config.hidden_size, eps=eps)
        further = (decoder_layer(config, index) for index in range(1, config.num_hidden_layers))
        self.layers = nn.ModuleList([first, *further])
        self.norm = LlamaRMSNorm(config.hidden_size, eps=eps)

    def entering(self, features: Float[Tensor, "batch node feature"]) -> States:
        features = features.to(self.device, self.dtype)
        features = features if self.input_norm is None else self.input_norm(features)
        if self.fc_norm:
            parts = features.chunk(len(self.fc_norm), -1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        return self.fc(features)

    def _inputs(self, embedded: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        layer: Any = self.layers[0]
        normed = layer.hidden_norm(states)
        inputs = torch.cat([layer.input_layernorm(embedded), normed], -1)
        return inputs, normed if getattr(self.config, "norm_before_residual", False) else states

    def _outputs(self, states: Tensor) -> Outputs:
        normed = self.norm(states)
        return Outputs(
            states=normed if getattr(self.config, "norm_output", False) else states,
            hidden=normed if getattr(self.config, "norm_logits", True) else states,
        )

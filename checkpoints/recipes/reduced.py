"""An EAGLE-3 draft with a reduced vocabulary (arXiv 2503.01840), taught on readings of its target.

It reads three of the target's layers and is taught several depths on its own outputs (`checkpoints.recipes.learning`).
Departures, for a small target and few texts: the output head is the target's own rows, frozen, so that what is trained,
and saved, is one layer; this layer begins as the target's last and reads the highest of the three as that one does; and
features are divided by their sizes while it learns, which the saved weights take in: a few of a residual stream are
hundreds of times as large as the rest.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from checkpoints.recipes.feature_drafts import layer_config, unrolled
from checkpoints.recipes.learning import Batch
from checkpoints.recipes.saved import save_draft
from lm.features.eagle import Eagle3

_SHARE_OF_OTHERS = 0.3  # of torch's random weights


class Reduced:
    """A draft, the vocabulary it draws from, and how it learns."""

    def __init__(
        self,
        target: PreTrainedModel,
        layer_ids: Sequence[int],
        target_ids: Int[Tensor, " reduced"],
        sizes: Float[Tensor, " feature"],
    ) -> None:
        """Args:
        target: whose embeddings, output rows, last layer and last norm it begins with.
        layer_ids: layers of the target that it reads.
        target_ids: the target's ids of its vocabulary.
        sizes: of each feature (`checkpoints.recipes.readings.feature_sizes`).
        """
        of_target = target.config.get_text_config()
        config = layer_config(target, is_tied=False)
        config.draft_vocab_size, config.eagle_aux_hidden_state_layer_ids = len(target_ids), list(layer_ids)
        self.draft = Eagle3(config, tuple(layer_ids), target_size=of_target.hidden_size)
        body: Any = target.base_model
        self.draft.norm.load_state_dict(body.norm.state_dict())
        self.draft.reduce(target_ids)
        self.draft.bind(target)
        self.module: nn.Module = self.draft
        self._sizes = sizes
        self._begin_as(body.layers[-1], of_target.hidden_size)
        self._places = torch.full((of_target.vocab_size,), -1)
        self._places[target_ids] = torch.arange(len(target_ids))

    @torch.no_grad()
    def _begin_as(self, last: Any, width: int) -> None:
        """Take over a layer of the target, which the highest of the features enters as they are; the token and the
        other features begin with random weights, smaller than torch's.
        """
        layer: Any = self.draft.layers[0]
        for name, begun in (("mlp", layer.mlp), ("input_layernorm", layer.hidden_norm)):
            begun.load_state_dict(getattr(last, name).state_dict())
        layer.post_attention_layernorm.load_state_dict(last.post_attention_layernorm.state_dict())
        layer.self_attn.o_proj.load_state_dict(last.self_attn.o_proj.state_dict())
        for name in ("q_proj", "k_proj", "v_proj"):
            getattr(layer.self_attn, name).weight[:, width:] = getattr(last.self_attn, name).weight
        self.draft.fc.weight.mul_(_SHARE_OF_OTHERS)
        self.draft.fc.weight[:, -width:] += self._sizes[-width:].diag()

    def said(self, batch: Batch, num_depths: int) -> Iterator[Float[Tensor, "learned vocab"]]:
        """Logits of its vocabulary at each depth."""
        is_learned = batch.is_learned[:, 1:]  # entry t says token t + 2, of which the target speaks at t + 1
        for outputs in islice(unrolled(self.draft, batch.ids, batch.features / self._sizes), num_depths):
            assert self.draft.lm_head is not None
            yield self.draft.lm_head(outputs.hidden[is_learned])

    def places(self, tokens: Int[Tensor, "learned top"]) -> Int[Tensor, "learned top"]:
        """Where its vocabulary has the target's tokens; -1: nowhere."""
        return self._places[tokens]

    def save(self, directory: Path) -> None:
        """Write the draft in the layout of EAGLE-3; rows that are the target's own are left out."""
        target_ids = self.draft.target_ids
        assert target_ids is not None
        state = {name: tensor for name, tensor in self.draft.state_dict().items() if not name.startswith("lm_head.")}
        tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in state.items()}
        tensors["fc.weight"] = self.draft.fc.weight / self._sizes
        tensors["d2t"] = target_ids - torch.arange(len(target_ids))
        save_draft(directory, self.draft.config, "LlamaForCausalLMEagle3", tensors)

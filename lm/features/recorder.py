"""Records the states of a target that a feature draft reads: what a verification computes anyway, at no extra forward.

Features follow law 4.5 as the cache does, in a layer of the same kind: one entry for every token that was fed and
not rolled back. All of them are kept, since a draft may be rolled back far; they take a few percent of the
cache's memory. A cache may go back further than requested (`lm.cache.Snapshots`) and is then fed some tokens a
second time. Until then their features stay.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from lm.cache import CAPACITY, BufferLayer, make_cache
from lm.features.base import FeatureDraft
from lm.forwards import body_of, recorded

_REMEDY = "a draft that reads the target's states needs them; use a draft that is a language model"


class FeatureRecorder:
    """The features of one sequence; `buffer` holds them as the keys of a layer whose values have width 0."""

    def __init__(self, model: PreTrainedModel, draft: FeatureDraft) -> None:
        """What `draft` reads of `model`, its target; ValueError if the target has no such states, keys or values."""
        self._modules = modules_read_by(draft, model)
        layers = make_cache(model, CAPACITY).layers
        for index in draft.cached_layer_ids:
            if not isinstance(layers[index], BufferLayer):
                kind = type(layers[index]).__name__
                raise ValueError(
                    f"the draft reads keys and values of the target's layer {index}, which keeps a {kind}; {_REMEDY}"
                )
        self._draft = draft
        self.buffer = BufferLayer(CAPACITY)

    def reset(self, num_tokens: int) -> None:
        """Drop all features, and make room for those of `num_tokens`."""
        if num_tokens > self.buffer.capacity:
            self.buffer = BufferLayer(num_tokens)
        self.buffer.roll_back(0)

    @property
    def num_features(self) -> int:
        """Tokens whose features are held: as many as are cached, or more."""
        return self.buffer.length

    def features(self, start: int, end: int) -> Float[Tensor, "1 token feature"]:
        """Features of the tokens from index `start` up to, but not including, `end`."""
        assert end <= self.num_features, f"features up to {end} requested of {self.num_features}"
        assert self.buffer.keys is not None, "nothing has been fed yet"
        return self.buffer.keys[0, :, start:end]

    def watching(self, *, has_body: bool) -> AbstractContextManager[dict[int, Tensor] | None]:
        """Outputs of a forward inside; None if its final hidden states, which a body returns, are all that is read."""
        return nullcontext() if self._draft.target_layer_ids is None and has_body else recorded(self._modules)

    def append(self, start: int, outputs: dict[int, Tensor] | None, states: Float[Tensor, "fed _"]) -> None:
        """Append features from index `start` on: `outputs` of `watching`, or if None the final hidden states."""
        self.buffer.roll_back(start)
        features = features_of(outputs, states) if outputs is not None else states
        self.buffer.update(features[None, None], features.new_empty(1, 1, len(features), 0))


def features_of(outputs: dict[int, Tensor], states: Float[Tensor, "token _"]) -> Float[Tensor, "token feature"]:
    """Recorded outputs side by side, on the device of the first; of width 0 and like `states` if there are none."""
    parts = [outputs[index] for index in sorted(outputs)] or [states[:, :0]]
    return torch.cat([part.to(parts[0].device) for part in parts], -1)


def modules_read_by(draft: FeatureDraft, model: PreTrainedModel) -> list[nn.Module]:
    """Layers of a target, its embedding or its body, whose outputs its draft reads; ValueError if it has no such."""
    layer_ids = draft.target_layer_ids
    if layer_ids is None:
        return [body_of(model)]
    length = model.config.get_text_config().num_hidden_layers
    # the outermost list that is as long as the config says
    lists = (part for part in body_of(model).modules() if isinstance(part, nn.ModuleList) and len(part) == length)
    layers = next(lists, nn.ModuleList())
    if max(layer_ids, default=0) > len(layers):
        raise ValueError(
            f"the draft reads the target after layers {layer_ids}, and {len(layers)} are found in it; {_REMEDY}"
        )
    return [layers[index - 1] if index else model.get_input_embeddings() for index in layer_ids]

"""A target whose states are kept for a draft that reads them: what a verification computes anyway, at no extra forward.

Features follow law 4.5 as the cache does, in a layer of the same kind: one row for every token that was fed and not
rolled back. They stay as long as the cache does, at a few percent of its size, since an outer level may roll a draft
back to a token whose features it read long ago. A cache that goes back further than asked (`lm.caches.snapshots`)
leaves the features where they are, until the tokens in between are fed again.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from lm.caches.buffers import BufferLayer
from lm.features.draft import FeatureDraft
from lm.features.glide import Glide, KeysValues, cached_keys_values
from lm.forwards import body_of
from lm.models.cached import CachedModel
from lm.trees.cached import TreeModel

_CAPACITY = 256
"""Rows that features start with room for."""
_REMEDY = "a draft that reads the target's states needs them; use a draft that is a model of its own"


class TappedModel(CachedModel):
    """A `CachedModel` of the target of one feature draft."""

    def __init__(
        self, model: PreTrainedModel, draft: FeatureDraft, *, vocab_size: int | None = None, with_hidden: bool = False
    ) -> None:
        """Args:
        model: the target.
        draft: the draft, which says what it reads.
        vocab_size: width that logits are cut to; None keeps all.
        with_hidden: also keep the final hidden states, for heads.

        Raises:
            ValueError: what the draft reads cannot be had of this model.
        """
        self._read = read_modules(model, draft)
        self._reads_states = draft.target_layer_ids is None
        self._cached_layer_ids = draft.cached_layer_ids if isinstance(draft, Glide) else ()
        self._features = BufferLayer(_CAPACITY)
        super().__init__(model, vocab_size=vocab_size, with_hidden=with_hidden)
        for place in self._cached_layer_ids:
            if not isinstance(self._cache.layers[place], BufferLayer):
                kind = type(self._cache.layers[place]).__name__
                raise ValueError(
                    f"the draft reads keys and values of the target's layer {place}, which keeps a {kind}; {_REMEDY}"
                )

    @property
    def num_features(self) -> int:
        """Tokens whose features are kept: as many as are cached, or more."""
        return self._features.length

    def features(self, start: int, end: int) -> Float[Tensor, "1 token feature"]:
        """Features of the tokens from place `start` up to, but not including, `end`."""
        assert end <= self.num_features, f"features up to {end} asked of {self.num_features}"
        assert self._features.keys is not None, "nothing has been fed yet"
        return self._features.keys[0, :, start:end]

    def keys_values(self) -> list[KeysValues]:
        """Cached keys and values of the layers that the draft attends to."""
        return cached_keys_values(self._cache, self._cached_layer_ids, len(self))

    def reset(self) -> None:
        self._features.reset()
        super().reset()

    def roll_back(self, length: int) -> None:
        super().roll_back(length)
        self._features.roll_back(length)

    def _logits_at(
        self, placed: Mapping[str, Tensor], ids: Int[Tensor, "1 fed"], num_rows: int
    ) -> Float[Tensor, "rows vocab"]:
        start = len(self)
        has_states = self._reads_states and self._halves is not None  # the body runs in two halves, and leaves them
        with watched([] if has_states else self._read) as seen:
            logits = super()._logits_at(placed, ids, num_rows)
        parts: list[Any] = [self.states] if has_states else [seen[place] for place in sorted(seen)]
        features = torch.cat([part.to(parts[0].device) for part in parts] or [logits.new_empty(ids.shape[1], 0)], -1)
        self._features.roll_back(start)
        self._features.update(features[None, None], features.new_empty(1, 1, len(features), 0))
        return logits


class TappedTreeModel(TappedModel, TreeModel):
    """A target that verifies trees and keeps what one feature draft reads: the features of a tree's nodes as it keeps
    their keys and values, and it moves those of the accepted path together with them.
    """

    def roll_back(self, length: int) -> None:
        super().roll_back(min(length, len(self) - len(self._tree)))

    @torch.inference_mode()
    def keep(self, path: Sequence[int]) -> None:
        start = len(self) - len(self._tree)
        self._features.gather(start, torch.tensor(path, dtype=torch.long) + start)
        super().keep(path)


def read_modules(model: PreTrainedModel, draft: FeatureDraft) -> list[nn.Module]:
    """The parts of a target whose outputs are what its draft reads: some layers and the embedding, or the body, whose
    output follows the final norm.

    Raises:
        ValueError: the target has no such layers.
    """
    layer_ids = draft.target_layer_ids
    if layer_ids is None:
        return [body_of(model)]
    layers = layers_of(model) or nn.ModuleList()
    if max(layer_ids, default=0) > len(layers):
        raise ValueError(
            f"the draft reads the target behind layers {layer_ids}, and {len(layers)} are found in it; {_REMEDY}"
        )
    return [layers[place - 1] if place else model.get_input_embeddings() for place in layer_ids]


def layers_of(model: PreTrainedModel) -> nn.ModuleList | None:
    """The list of the model's layers: the outermost that is as long as the config says, if there is one."""
    length = model.config.get_text_config().num_hidden_layers
    found = (
        module for module in body_of(model).modules() if isinstance(module, nn.ModuleList) and len(module) == length
    )
    return next(found, None)


@contextmanager
def watched(modules: Sequence[nn.Module]) -> Iterator[dict[int, Float[Tensor, "token hidden"]]]:
    """Outputs of these parts of a model, by their place in the list, while one sequence runs through it."""
    seen: dict[int, Tensor] = {}
    # only while it is needed: a hook that stayed would keep what it notes as long as the model lives
    hooks = [
        module.register_forward_hook(partial(_note, seen, place, get_ident())) for place, module in enumerate(modules)
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _note(seen: dict[int, Tensor], place: int, thread: int, module: nn.Module, inputs: Any, output: Any) -> None:
    """A forward hook that notes the output's rows for the one sequence of the batch, in forwards of its own thread."""
    if get_ident() != thread:
        return
    output = getattr(output, "last_hidden_state", output)
    seen[place] = (output[0] if isinstance(output, tuple) else output)[0]

"""A KV cache for batched generation that never copies what it holds.

transformers' `DynamicCache` concatenates: every step copies every key and value, which at batch 64 costs more than the forward itself. Here
a layer writes into one buffer made for the whole generation and hands out a view. Layers of another kind (sliding window, recurrent) stay
transformers' own.
"""

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer


class BufferLayer(DynamicLayer):
    """One attention layer's keys and values, [batch, head, capacity, dim], of which the first `length` positions are filled."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self._keys, self._values = (
            states.new_empty(states.shape[0], states.shape[1], self.capacity, states.shape[3]) for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, self.length = self.length, self.length + key_states.shape[-2]
        self._keys[:, :, start : self.length] = key_states
        self._values[:, :, start : self.length] = value_states
        return self._view()

    def get_seq_length(self) -> int:
        return self.length

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these sequences of the batch; only what is filled is copied."""
        if self.is_initialized:
            self._keys, self._values = (self._kept(buffer, indices) for buffer in (self._keys, self._values))
            self._view()

    def _kept(self, buffer: Tensor, indices: Tensor) -> Tensor:
        smaller = buffer.new_empty(len(indices), *buffer.shape[1:])
        smaller[:, :, : self.length] = buffer[indices, :, : self.length]
        return smaller

    def _view(self) -> tuple[Tensor, Tensor]:
        self.keys, self.values = self._keys[:, :, : self.length], self._values[:, :, : self.length]
        return self.keys, self.values


def make_cache(model: PreTrainedModel, capacity: int) -> DynamicCache:
    """An empty cache for `model` whose plain attention layers hold up to `capacity` positions."""
    cache = DynamicCache(config=model.config)
    cache.layers = [BufferLayer(capacity) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def keep(cache: DynamicCache, rows: Tensor) -> None:
    """Drop every sequence of the batch but `rows`."""
    cache.batch_select_indices(rows.to(torch.long))

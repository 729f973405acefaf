"""A KV cache that never copies what it holds, and rolls back by counting.

transformers' `DynamicCache` concatenates: every step copies every key and value, which at batch 64 costs more than the forward itself, and
with one sequence a few percent of it. Here a layer writes into one buffer and hands out a view of what is filled; rolling back is a smaller
number, and what lies beyond it is overwritten. Layers of another kind (sliding window, recurrent) stay transformers' own.
"""

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer


class BufferLayer(DynamicLayer):
    """One attention layer's keys and values, [batch, head, capacity, dim], of which the first `length` positions are filled."""

    def __init__(self, capacity: int) -> None:
        """Args:
        capacity: positions to begin with; doubled whenever it does not suffice.
        """
        super().__init__()
        self.capacity = capacity
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self._keys, self._values = (_buffer(states, self.capacity) for states in (key_states, value_states))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, self.length = self.length, self.length + key_states.shape[-2]
        if self.length > self.capacity:
            self._grow(start)
        num_new = self.length - start
        self._keys.narrow(2, start, num_new).copy_(key_states)
        self._values.narrow(2, start, num_new).copy_(value_states)
        return self._view()

    def get_seq_length(self) -> int:
        return self.length

    def roll_back(self, length: int) -> None:
        """Keep the first `length` positions."""
        self.length = min(self.length, length)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these sequences of the batch; only what is filled is copied."""
        if self.is_initialized:
            self._keys, self._values = (self._kept(buffer, indices) for buffer in (self._keys, self._values))
            self._view()

    def _kept(self, buffer: Tensor, indices: Tensor) -> Tensor:
        smaller = buffer.new_empty(len(indices), *buffer.shape[1:])
        smaller[:, :, : self.length] = buffer[indices, :, : self.length]
        return smaller

    def _grow(self, filled: int) -> None:
        while self.capacity < self.length:
            self.capacity *= 2
        larger = [_buffer(buffer, self.capacity) for buffer in (self._keys, self._values)]
        for new, old in zip(larger, (self._keys, self._values), strict=True):
            new[:, :, :filled] = old[:, :, :filled]
        self._keys, self._values = larger

    def _view(self) -> tuple[Tensor, Tensor]:
        self.keys, self.values = self._keys.narrow(2, 0, self.length), self._values.narrow(2, 0, self.length)
        return self.keys, self.values


def make_cache(model: PreTrainedModel, capacity: int) -> DynamicCache:
    """An empty cache for `model` whose plain attention layers start with room for `capacity` positions."""
    cache = DynamicCache(config=model.config)
    cache.layers = [BufferLayer(capacity) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def keep(cache: DynamicCache, rows: Tensor) -> None:
    """Drop every sequence of the batch but `rows`."""
    cache.batch_select_indices(rows.to(torch.long))


def _buffer(like: Tensor, capacity: int) -> Tensor:
    return like.new_empty(*like.shape[:2], capacity, like.shape[3])

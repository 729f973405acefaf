"""Attention layers that never copy what they hold, and roll back by counting.

transformers' `DynamicLayer` concatenates: every step copies every key and value, which at batch 64 costs more than the
forward itself, and with one sequence a few percent of it. Here a layer writes into one buffer and hands out a view of
what is filled; rolling back is a smaller number, and what lies beyond it is overwritten. Positions that no sequence
needs are forgotten at the front by counting too, and a sequence may take the place of one that has ended: a batch whose
sequences come and go copies little but what is new. A layer with a window (sliding or chunked attention) keeps
everything too, and hands out the last of it: transformers' own drops what left the window, which a rejection may need
again.
"""

from itertools import pairwise

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer


class BufferLayer(DynamicLayer):
    """One attention layer's keys and values, [batch, head, capacity, dim], of which `length` positions from `first` on
    are filled.
    """

    def __init__(self, capacity: int) -> None:
        """Args:
        capacity: positions to begin with; doubled whenever it does not suffice.
        """
        super().__init__()
        self.capacity = capacity
        self.first = self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self._keys, self._values = (_buffer(states, self.capacity) for states in (key_states, value_states))
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        filled, num_new = self.length, key_states.shape[-2]
        if filled == 0 and not self._fits(key_states):
            self.lazy_initialization(key_states, value_states)
        self.length += num_new
        if self.first + self.length > self.capacity:
            self._make_room(filled)
        start = self.first + filled
        self._keys.narrow(2, start, num_new).copy_(key_states)
        self._values.narrow(2, start, num_new).copy_(value_states)
        return self._view()

    def get_seq_length(self) -> int:
        return self.length

    def roll_back(self, length: int) -> None:
        """Keep the first `length` positions."""
        self.length = min(self.length, length)

    def crop(self, tokens_to_remove: int) -> None:
        """Roll back as transformers says it: by minus the number of tokens to forget."""
        self.roll_back(max(self.length - abs(tokens_to_remove), 0))

    def reset(self) -> None:
        """Forget everything; the memory stays."""
        self.first = self.length = 0

    def forget(self, count: int) -> None:
        """Forget the first positions of every sequence."""
        self.first, self.length = self.first + count, self.length - count

    def gather(self, length: int, places: Tensor) -> None:
        """Keep the first `length` positions, and behind them those at these places, moved together."""
        for buffer in (self._keys, self._values):
            start = self.first + length
            buffer[:, :, start : start + len(places)] = buffer[:, :, self.first + places.to(buffer.device)]
        self.length = length + len(places)

    def seat(self, other: "BufferLayer", rows: Tensor, num_rows: int) -> None:
        """Write the sequences of another layer over `rows`, their last positions at this layer's last. What stands to
        the left of a shorter one is 0, and the mask has to hide it; what stood there may be NaN, which no mask hides,
        as 0 * NaN is NaN.

        Args:
            other: a layer of at most as many positions, unless this one is empty.
            rows: the sequences of this layer that are overwritten, one for each of the other.
            num_rows: sequences of this layer, if it is empty.
        """
        if not self.is_initialized:
            self.dtype, self.device = other.dtype, other.device
            shape = (num_rows, other._keys.shape[1], self.capacity, other._keys.shape[3])
            self._keys, self._values = (buffer.new_empty(shape) for buffer in (other._keys, other._values))
            for buffer in (self._keys, self._values):
                buffer[:, :, : other.length] = 0
            self.is_initialized = True
        if self.length < other.length:
            assert self.length == 0, "sequences that are there would have to move"
            self.length = other.length
        end, rows = self.first + self.length, rows.to(self._keys.device)
        for buffer in (self._keys, self._values):
            buffer[rows, :, self.first : end - other.length] = 0
        self._keys[rows, :, end - other.length : end], self._values[rows, :, end - other.length : end] = other._view()
        self._view()

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these sequences of the batch; only what is filled is copied."""
        if self.is_initialized:
            indices = indices.to(self._keys.device)  # layers of a model that is spread over devices sit on several
            self._keys, self._values = (self._kept(buffer, indices) for buffer in (self._keys, self._values))
            self._view()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            self.batch_select_indices(torch.arange(len(self._keys)).repeat_interleave(repeats))

    def _fits(self, states: Tensor) -> bool:
        """Can the buffer take them? Not if the model has changed its dtype or device, or the batch its size, since it
        was made.
        """
        return (
            self.is_initialized
            and self._keys.dtype == states.dtype
            and self._keys.device == states.device
            and len(self._keys) == len(states)
        )

    def _kept(self, buffer: Tensor, indices: Tensor) -> Tensor:
        filled = slice(self.first, self.first + self.length)
        rows = indices.tolist() if buffer.is_cpu else []
        # in place, as fresh memory costs a CPU more than the copy
        if rows and all(row < other for row, other in pairwise(rows)):
            for place, row in enumerate(rows):
                if place != row:
                    buffer[place, :, filled] = buffer[row, :, filled]
            return buffer[: len(rows)]
        smaller = buffer.new_empty(len(indices), *buffer.shape[1:])
        smaller[:, :, filled] = buffer[indices, :, filled]
        return smaller

    def _make_room(self, filled: int) -> None:
        """Move what is filled to the front, into larger buffers if need be."""
        while self.capacity < self.length:
            self.capacity *= 2
        self._keys, self._values = (self._moved(buffer, filled) for buffer in (self._keys, self._values))
        self.first = 0

    def _moved(self, buffer: Tensor, filled: int) -> Tensor:
        larger = _buffer(buffer, self.capacity)
        larger[:, :, :filled] = buffer[:, :, self.first : self.first + filled]
        return larger

    def _view(self) -> tuple[Tensor, Tensor]:
        self.keys, self.values = (buffer.narrow(2, self.first, self.length) for buffer in (self._keys, self._values))
        return self.keys, self.values


class WindowLayer(BufferLayer):
    """A layer whose queries see `sliding_window` positions, their own included; masks are transformers' own, for that
    view.
    """

    is_sliding = True

    def __init__(self, capacity: int, sliding_window: int) -> None:
        """Args:
        capacity: positions to begin with; doubled whenever it does not suffice.
        sliding_window: the window of sliding attention, or the chunk of chunked attention.
        """
        super().__init__(capacity)
        self.sliding_window = sliding_window

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        _, first = self.get_mask_sizes(0)
        keys, values = super().update(key_states, value_states)
        return keys[:, :, first:], values[:, :, first:]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many positions the next queries are shown, and which is the first: what the earliest of them sees begins
        there.
        """
        first = max(self.length - self.sliding_window + 1, 0)
        return self.length + query_length - first, first


def _buffer(like: Tensor, capacity: int) -> Tensor:
    return like.new_empty(*like.shape[:2], capacity, like.shape[3])

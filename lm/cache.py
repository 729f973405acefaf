"""KV caches that roll back exactly and do not copy what they hold.

transformers' `DynamicLayer` copies every key and value in every step: at batch 64 that costs more than the
forward. Here a layer writes into one buffer and returns a view of it. Attention rolls back by counting. Recurrent
and convolutional layers, which cannot forget a token, return to a copy of an earlier state (`Snapshots`).
"""

from functools import partial
from itertools import pairwise
from typing import NamedTuple

from jaxtyping import Int
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_map_only
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

CAPACITY = 256  # positions that a cache of unknown length has room for at first
_MAX_STEP = 4096  # positions by which a cache grows at most: doubling a long one would take too much memory
# Copies kept, more than any draft has tokens. The first two, of nothing and of the prompt, always stay: going
# back further than the others means going back to the prompt.
_MAX_SNAPSHOTS = 48


class RowFeed(NamedTuple):
    """Where a forward of rows of different lengths writes, the same in every layer."""

    rows: Int[Tensor, " row"]  # row of the buffer of each sequence that is fed
    are_first: bool  # they are the buffer's first rows, in order, which need not be copied
    positions: Int[Tensor, "row fed"]  # of each token, padding included
    end: int  # positions that the queries are shown; the mask hides those beyond a row's own length
    num_padded: int  # positions that are written, padding included
    num_rows: int  # of the buffer


class BufferLayer(DynamicLayer):
    """One attention layer's keys and values, [row, head, position, dim].

    All rows hold the `length` positions from `first` on. While `feed` is set, rows have different lengths instead: they
    are filled from position 0; what lies beyond a row's length is hidden by each forward's mask, and overwritten.
    """

    feed: RowFeed | None = None
    _keys: Tensor
    _values: Tensor

    def __init__(self, capacity: int) -> None:
        """`capacity`: positions to begin with; doubled when it does not suffice, or raised by `_MAX_STEP`."""
        super().__init__()
        self.capacity = capacity
        self.first = self.length = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if self.feed is not None:
            return self._update_rows(self.feed, key_states, value_states)
        filled = self.length
        num_new = key_states.shape[-2]
        if filled == 0:
            self._prepare(len(key_states), key_states, value_states)
        self.length += num_new
        if self.first + self.length > self.capacity:
            self._make_room(self.length, filled)
        start = self.first + filled
        self._keys.narrow(2, start, num_new).copy_(key_states)
        self._values.narrow(2, start, num_new).copy_(value_states)
        return self._view()

    def _update_rows(self, feed: RowFeed, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        self._prepare(feed.num_rows, key_states, value_states)
        if feed.num_padded > self.capacity:
            self._make_room(feed.num_padded, self.capacity)
        rows = feed.rows.to(key_states.device)
        positions = feed.positions.to(key_states.device)
        for buffer, states in ((self._keys, key_states), (self._values, value_states)):
            buffer[rows[:, None], :, positions] = states.transpose(1, 2)
        shown = slice(len(rows)) if feed.are_first else rows  # a slice copies nothing
        return self._keys[shown, :, : feed.end], self._values[shown, :, : feed.end]

    def get_seq_length(self) -> int:
        """Positions held; 0 while rows differ in length, since models are then given positions and a mask."""
        return self.length

    def roll_back(self, length: int) -> None:
        """Keep the first `length` positions."""
        self.length = min(self.length, length)

    def drop_first(self, count: int) -> None:
        """Forget the first positions of every row."""
        self.first += count
        self.length -= count

    def keep_entries(self, length: int, positions: Tensor) -> None:
        """Keep the first `length` positions and, moved together after them, the entries at these positions."""
        for buffer in (self._keys, self._values):
            start = self.first + length
            buffer[:, :, start : start + len(positions)] = buffer[:, :, self.first + positions.to(buffer.device)]
        self.length = length + len(positions)

    def insert_rows(self, other: "BufferLayer", rows: Tensor, num_rows: int) -> None:
        """Overwrite these rows of the `num_rows` with the rows of another layer, aligned at their right ends.

        The other layer may be longer only if this one is empty (`widen` makes it as long). Positions left of a shorter
        row become 0: a NaN there would survive the mask that must hide them, since 0 * NaN is NaN.
        """
        self._prepare(num_rows, other._keys, other._values)
        if self.length < other.length:
            assert self.length == 0, "a layer with shorter rows must be widened first"
            self.length = other.length
        end = self.first + self.length
        rows = rows.to(self._keys.device)
        for buffer, held in zip((self._keys, self._values), other._view(), strict=True):
            buffer[rows, :, self.first : end - other.length] = 0
            buffer[rows, :, end - other.length : end] = held
        self._view()

    def widen(self, length: int, capacity: int) -> None:
        """Extend every row to the left to `length` positions, of zeros, in buffers of at least `capacity` positions."""
        num_new = length - self.length
        if self.first < num_new or self.capacity < capacity:
            self._move(self.length, max(self.capacity, capacity), num_before=num_new)
        else:
            self.first -= num_new
            for buffer in (self._keys, self._values):
                buffer[:, :, self.first : self.first + num_new] = 0
        self.length = length
        self._view()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep these rows, which may be on any device; only what is filled is copied."""
        if self.is_initialized:
            rows = beam_idx.long().to(self._keys.device)  # a model's layers may be on several devices
            self._keys, self._values = (self._selected(buffer, rows) for buffer in (self._keys, self._values))
            self._view()

    def _prepare(self, num_rows: int, *states: Tensor) -> None:
        """Allocate the buffers, unless they have this many rows, and the dtype and the device of the states."""
        self.dtype = states[0].dtype
        self.device = states[0].device
        like = self.dtype, self.device, num_rows
        if self.is_initialized and (self._keys.dtype, self._keys.device, len(self._keys)) == like:
            return
        # zeros, because a masked entry has weight 0, and 0 * NaN is NaN
        shapes = [(num_rows, state.shape[1], self.capacity, state.shape[3]) for state in states]
        self._keys, self._values = (state.new_zeros(shape) for state, shape in zip(states, shapes, strict=True))
        self.is_initialized = True

    def _selected(self, buffer: Tensor, indices: Tensor) -> Tensor:
        filled = slice(self.first, self.first + self.length)
        rows = indices.tolist() if buffer.is_cpu else []
        # in place: on a CPU, fresh memory costs more than the copy
        if rows and all(row < other for row, other in pairwise(rows)):
            for index, row in enumerate(rows):
                if index != row:
                    buffer[index, :, filled] = buffer[row, :, filled]
            return buffer[: len(rows)]
        smaller = buffer.new_zeros(len(indices), *buffer.shape[1:])
        smaller[:, :, filled] = buffer[indices, :, filled]
        return smaller

    def _make_room(self, needed: int, filled: int) -> None:
        """Move the `filled` positions to the front, into larger buffers if they must hold more than their capacity."""
        capacity = self.capacity
        while capacity < needed:
            capacity += min(capacity, _MAX_STEP)
        self._move(filled, capacity)

    def _move(self, filled: int, capacity: int, *, num_before: int = 0) -> None:
        """Copy the `filled` positions into buffers of this capacity, after `num_before` positions of zeros."""
        parts = [buffer.narrow(2, self.first, filled) for buffer in (self._keys, self._values)]
        padding = (0, 0, num_before, capacity - num_before - filled)
        self._keys, self._values = (functional.pad(part, padding) for part in parts)
        self.first = 0
        self.capacity = capacity  # only now: the buffers stay as they were if there is no memory for larger ones

    def _view(self) -> tuple[Tensor, Tensor]:
        self.keys = self._keys.narrow(2, self.first, self.length)
        self.values = self._values.narrow(2, self.first, self.length)
        return self.keys, self.values


class WindowLayer(BufferLayer):
    """A layer with sliding or chunked attention. It keeps every position, since a rejection may need again what
    left the window, and returns a view of the last ones; masks are transformers' own, for that view.
    """

    is_sliding = True

    def __init__(self, capacity: int, sliding_window: int) -> None:
        """`sliding_window`: the window of sliding attention, the query included, or the chunk of chunked attention."""
        super().__init__(capacity)
        self.sliding_window = sliding_window

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        _, first = self.get_mask_sizes(0)
        keys, values = super().update(key_states, value_states)
        return keys[:, :, first:], values[:, :, first:]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(number of positions that the next queries are shown, the first of them)."""
        first = max(self.length - self.sliding_window + 1, 0)
        return self.length + query_length - first, first


class Snapshots:
    """Earlier states of those layers of a cache that cannot roll back by counting.

    A copy is taken before every forward. Rolling back restores the last copy that is early enough, perhaps
    earlier than requested; the tokens in between are then fed again.
    """

    def __init__(self, cache: DynamicCache) -> None:
        self._layers = [layer for layer in cache.layers if not isinstance(layer, BufferLayer)]
        # (length, state of each layer), the shortest first
        self._copies: list[tuple[int, list[dict[str, object]]]] = []

    def take(self, length: int) -> None:
        """Copy the state of the cache, which holds `length` tokens."""
        if len(self._copies) == _MAX_SNAPSHOTS:
            del self._copies[2]
        self._copies.append((length, [_state_of(layer) for layer in self._layers]))

    def forget(self, length: int) -> None:
        """Drop the copies that only a return to fewer than `length` tokens would need."""
        while len(self._copies) > 1 and self._copies[1][0] <= length:
            del self._copies[0]

    def restore(self, length: int) -> int | None:
        """Restore the last copy of at most `length` tokens: its length, or None if there is no such copy."""
        while self._copies:
            num_held, states = self._copies.pop()
            if num_held <= length:
                for layer, state in zip(self._layers, states, strict=True):
                    for name, value in state.items():
                        setattr(layer, name, vars(layer)[name][:, :, value] if isinstance(value, slice) else value)
                return num_held
        return None


def _state_of(layer: object) -> dict[str, object]:
    """A copy of the layer's attributes; for keys and values that only grow, a slice of their current length."""
    growing = ("keys", "values") if isinstance(layer, DynamicLayer) and not layer.is_sliding else ()
    state = {}
    for name, value in vars(layer).items():
        grows = name in growing and isinstance(value, Tensor) and value.dim() == 4
        state[name] = slice(value.shape[-2]) if grows else tree_map_only(Tensor, Tensor.clone, value)
    return state


def make_cache(model: PreTrainedModel, capacity: int) -> DynamicCache:
    """An empty cache; attention layers have room for `capacity` positions at first, other layers are transformers'."""
    cache = DynamicCache(config=model.config)
    for index, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:
            cache.layers[index] = BufferLayer(capacity)
        elif type(layer) is DynamicSlidingWindowLayer:
            cache.layers[index] = WindowLayer(capacity, layer.sliding_window)
    return cache


def growing_cache(capacity: int) -> DynamicCache:
    """An empty cache of `BufferLayer`s, as many as a model writes to."""
    cache = DynamicCache()
    cache.layer_class_to_replicate = partial(BufferLayer, capacity)  # type: ignore[assignment]  # makes one, too
    return cache


def roll_back(cache: DynamicCache, length: int) -> None:
    """Keep the first `length` positions of a cache of `growing_cache`."""
    for layer in cache.layers:
        layer.roll_back(length)  # type: ignore[union-attr]  # a `BufferLayer`


def is_attention(cache: DynamicCache) -> bool:
    """True if all layers are attention: they roll back by counting, and rows can be overwritten (`insert_rows`)."""
    return all(isinstance(layer, BufferLayer) for layer in cache.layers)


def insert_rows(cache: DynamicCache, other: DynamicCache, rows: Tensor, num_rows: int) -> None:
    """`BufferLayer.insert_rows` in every layer."""
    for layer, new in zip(cache.layers, other.layers, strict=True):
        layer.insert_rows(new, rows, num_rows)  # type: ignore[union-attr]  # `is_attention`


def widen(cache: DynamicCache, length: int, capacity: int) -> None:
    """`BufferLayer.widen` in every layer."""
    for layer in cache.layers:
        layer.widen(length, capacity)  # type: ignore[union-attr]  # `is_attention`

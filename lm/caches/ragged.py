"""Attention layers of many sequences of different lengths: a row of the buffer for each, filled from the left, rolled
back by counting.

Tokens of all sequences are written where each sequence ends, so position and place in the buffer are one number, and no
sequence is padded by another's length. What lies beyond a sequence's end (rejected tokens, padding of a feed) is hidden
by the mask that comes with every forward (`lm.models.seats`), and overwritten by the tokens that come next.
"""

from typing import NamedTuple

from jaxtyping import Int
from torch import Tensor
from transformers.cache_utils import DynamicLayer


class RaggedFeed(NamedTuple):
    """Places that the tokens of one forward go to, the same in every layer."""

    rows: Int[Tensor, " fed_rows"]
    """Row of the buffer of each sequence that is fed."""
    are_first: bool
    """Are these the first rows, in their order? Then they need not be gathered."""
    places: Int[Tensor, "fed_rows width"]
    """Place of each token in its row, padding included."""
    end: int
    """Places that the queries are shown."""


class RaggedLayer(DynamicLayer):
    """One attention layer's keys and values, [row, place, head, dim]."""

    feed: RaggedFeed
    """Set before every forward."""

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self._num_rows = num_rows
        self._capacity = 0
        self._keys: Tensor
        self._values: Tensor

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        feed = self.feed
        needed = int(feed.end) + feed.places.shape[1]  # padding is written too, at most a width beyond the last token
        if needed > self._capacity or self._keys.dtype != key_states.dtype or self._keys.device != key_states.device:
            self._grow(needed, key_states, value_states)
        rows, places = feed.rows.to(key_states.device), feed.places.to(key_states.device)
        shown = []
        for buffer, states in ((self._keys, key_states), (self._values, value_states)):
            buffer[rows[:, None], places] = states.transpose(1, 2)
            filled = buffer[:, : feed.end]
            shown.append((filled[: len(rows)] if feed.are_first else filled.index_select(0, rows)).transpose(1, 2))
        return shown[0], shown[1]

    def get_seq_length(self) -> int:
        """Always 0, since rows differ in length: models are given positions and mask instead."""
        return 0

    def _grow(self, needed: int, *states: Tensor) -> None:
        """Room for twice as much as is needed; zeros, since a mask hides a place by a weight of 0, which NaN would
        survive.
        """
        self._capacity = 2 * needed
        larger = [state.new_zeros(self._num_rows, self._capacity, state.shape[1], state.shape[3]) for state in states]
        if self.is_initialized:
            for new, old in zip(larger, (self._keys, self._values), strict=True):
                new[:, : old.shape[1]] = old
        self._keys, self._values = larger
        self.is_initialized = True

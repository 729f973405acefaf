"""The positions of each row in a shard's flat [token] tensors."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from data_gen.responses.exchange import Exchange


@dataclass(frozen=True)
class Layout:
    """Rows of `lengths` positions, one after the other.

    Worked example: lengths (2, 3) have offsets (0, 2, 5); `positions([1, 0])` is 2 3 4 0 1, `order(2)` is 0 1 0 1 2 3 4
    2 3 4.
    """

    lengths: tuple[int, ...]

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Row i covers offsets[i] to offsets[i + 1]; rows + 1 numbers."""
        return tuple(accumulate(self.lengths, initial=0))

    @property
    def num_tokens(self) -> int:
        """Number of positions in all rows."""
        return self.offsets[-1]

    def positions(self, rows: Sequence[int]) -> Int[Tensor, " token"]:
        """Flat positions of some rows, in the order of `rows`."""
        parts = [torch.arange(self.offsets[row], self.offsets[row + 1]) for row in rows]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)

    def order(self, times: int) -> Int[Tensor, " token"]:
        """Flat positions such that values[order] holds each row `times` times before the next."""
        rows = [row for row in range(len(self.lengths)) for _ in range(times)]
        return self.positions(rows)

    def rows_with(self, mask: Bool[Tensor, " token"]) -> dict[int, int]:
        """Row with a true position -> the first such position, counted from the row's start."""
        first: dict[int, int] = {}
        for position in mask.nonzero().squeeze(-1).tolist():
            row = bisect_right(self.offsets, position) - 1
            first.setdefault(row, position - self.offsets[row])
        return first

    def repeated(self, times: int) -> "Layout":
        """Each row `times` times before the next: the layout of several mixings."""
        return Layout(tuple(length for length in self.lengths for _ in range(times)))


def layout_of(exchanges: Sequence[Exchange]) -> Layout:
    """The layout of some exchanges, with one position per response token."""
    return Layout(tuple(len(exchange.response_ids) for exchange in exchanges))

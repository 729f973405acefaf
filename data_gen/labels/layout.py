"""Where each row's positions lie in a shard's flat [token] tensors, and how rows are grouped into forwards."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from jaxtyping import Int
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Rows of `lengths` positions, one after the other."""

    lengths: tuple[int, ...]

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Row i covers offsets[i] to offsets[i + 1]; rows + 1 numbers."""
        return tuple(accumulate(self.lengths, initial=0))

    @property
    def num_tokens(self) -> int:
        """Positions of all rows."""
        return self.offsets[-1]

    def positions(self, rows: Sequence[int]) -> Int[Tensor, " token"]:
        """Flat positions of some rows, in the order of `rows`."""
        return torch.cat([torch.arange(self.offsets[row], self.offsets[row + 1]) for row in rows])

    def batches(self, costs: Sequence[int], size: int) -> Iterator[list[int]]:
        """Rows in groups of `size`, longest first, so that padding is small and a lack of memory shows at once.

        Args:
            costs: length of each row's forward, prompt included.
        """
        order = sorted(range(len(self.lengths)), key=lambda row: (-costs[row], row))
        return (order[start : start + size] for start in range(0, len(order), size))

    def order(self, times: int) -> Int[Tensor, " token"]:
        """Flat positions such that values[order] repeats each row `times` times in a row."""
        rows = [row for row in range(len(self.lengths)) for _ in range(times)]
        return self.positions(rows) if rows else torch.empty(0, dtype=torch.int64)

    def repeated(self, times: int) -> "Layout":
        """Each row `times` times in a row: the layout of `mixes`."""
        return Layout(tuple(length for length in self.lengths for _ in range(times)))

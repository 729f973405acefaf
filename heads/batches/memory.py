"""Memory of batches, used again as soon as nobody holds the batch that it was made for.

A system hands out memory page by page, each cleared at its first use: on a virtual machine that takes 4 times as long
as to copy hidden states into it. torch keeps page-locked memory by itself, and knows when copies to a GPU have ended.
"""

import math
import weakref

import numpy as np
import torch
from torch import Tensor

_SLACK = 1.25
"""Size of a new piece over what is asked for, since no two batches have as many tokens."""
_MOST_PIECES = 16
"""Pieces that are kept while nobody uses them; beyond that the oldest go."""


class BatchMemory:
    """Pieces of memory; threads may share them."""

    def __init__(self) -> None:
        self._free: list[np.ndarray] = []

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """A tensor whose values are whatever was there; page-locked where there is a GPU."""
        if torch.cuda.is_available():
            return torch.empty(shape, dtype=dtype, pin_memory=True)
        num_bytes = math.prod(shape) * dtype.itemsize
        piece = self._piece(num_bytes)
        lent = piece[:num_bytes]
        weakref.finalize(lent, self._give_back, piece).atexit = False  # the tensor's memory holds `lent`, no one else
        return torch.from_numpy(lent).view(dtype).view(shape)

    def _piece(self, num_bytes: int) -> np.ndarray:
        while True:
            try:
                piece = self._free.pop()
            except IndexError:
                return np.empty(int(num_bytes * _SLACK), np.uint8)
            if len(piece) >= num_bytes:
                return piece

    def _give_back(self, piece: np.ndarray) -> None:
        self._free.append(piece)
        del self._free[:-_MOST_PIECES]

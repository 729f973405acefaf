"""How long data takes, from two small runs of unlike shapes.

    T = step_s * (decoding steps) + token_s * (response tokens)

A step of a batch takes about as long however few sequences are left in it, so that seconds per prompt of a small
sample, whose one batch waits for its longest response, say little of a large run, in which another prompt takes the
place of each that has ended.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls


class Effort(NamedTuple):
    """What a run of responses is made of."""

    num_steps: float
    """Decoding steps of the target; 0 where another program writes the responses."""
    num_tokens: float
    """Tokens of the responses."""

    @classmethod
    def of(
        cls,
        num_rows: Sequence[int],
        *,
        longest: int | float,
        mean: int | float,
        batch_size: int,
        is_decoded: bool = True,
    ) -> "Effort":
        """The effort of shards of so many rows.

        A shard's first batch goes on until its longest response ends, and every further row takes the place of one that
        has ended.

        Args:
            num_rows: rows of each shard.
            longest: tokens of the longest response.
            mean: tokens of a response on average.
            batch_size: sequences that are decoded at once.
            is_decoded: whether the target writes the responses in this process.
        """
        num_joining = sum(max(0, rows - batch_size) for rows in num_rows)
        num_steps = len(num_rows) * longest + math.ceil(num_joining * mean / batch_size)
        return cls(is_decoded * num_steps, sum(num_rows) * mean)


class Pace(NamedTuple):
    """Seconds of the parts of an effort."""

    step_s: float
    token_s: float

    @classmethod
    def of(cls, efforts: Sequence[Effort], seconds: Sequence[float]) -> "Pace":
        """The pace at which these efforts took these seconds, neither part of it below 0 (least squares)."""
        scale = np.array(efforts).max(0)
        scale[scale == 0] = 1.0
        step_s, token_s = nnls(np.array(efforts) / scale, np.array(seconds))[0] / scale
        return cls(float(step_s), float(token_s))

    def seconds(self, effort: Effort) -> float:
        """Seconds of an effort."""
        return self.step_s * effort.num_steps + self.token_s * effort.num_tokens

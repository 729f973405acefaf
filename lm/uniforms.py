"""Chance for work that is done in shards (data, traces): seeds from names, uniforms all at once, tokens from uniforms
by inversion.

A shard's uniforms are made on the CPU in float64, one per (row, position), before any model runs. So its draws do not
depend on the device, on the order of shards, nor on how its rows are batched, and an interrupted run resumes to the
same bytes. A generation, whose length nobody knows beforehand, draws from `lm.draws` instead.
"""

import hashlib
import math

import numpy as np
import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

BELOW_ONE = 1.0 - 2.0**-40
"""Keeps uniform * total below total in float64, so that the inverse of the distribution function never runs off its
end.
"""

GENERATOR = np.random.PCG64DXSM.__name__
"""The source of every uniform number here and in `lm.draws`, and an entry of manifests: data of another generator is
not added to.
"""


def seed_of(*parts: object) -> int:
    """63 bits of a sha256 over the parts: a seed of its own for every name, such as seed_of(run_seed, "response",
    "train", 7).
    """
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def uniforms(seed: int, *shape: int) -> Float[Tensor, "..."]:
    """Independent uniforms in [0, 1), float64, on the CPU."""
    return torch.from_numpy(Bits(seed).uniforms(math.prod(shape))).reshape(shape)


class Bits:
    """A stream of random numbers that depends on every bit of its seed; torch's CPU generator reads the lower 32 only.

    numpy promises that a seed gives these bits for good (NEP 19), and does not promise it of the distributions that it
    makes of them.
    """

    def __init__(self, seed: int) -> None:
        """Args:
        seed: a number of any size from 0 on; two seeds below 2^128 give different streams.
        """
        self._bits = np.random.PCG64DXSM(seed)

    def uniforms(self, count: int) -> Float64[np.ndarray, " count"]:
        """The next uniforms in [0, 1): multiples of 2^-53, each equally probable."""
        return (self._bits.random_raw(count) >> np.uint64(11)) * 2.0**-53


def draw(probs: Float[Tensor, "position vocab"], uniform: Float[Tensor, " position"]) -> Int[Tensor, " position"]:
    """One token per row: the id at which the distribution function first exceeds the row's uniform; probability 0 is
    never drawn.

    Worked example: probs (.5, .3, .2) and uniform .79 give id 1, uniform .8 gives id 2.
    """
    if probs.device.type == "mps":  # which has no float64
        return draw(probs.cpu(), uniform).to(probs.device)
    # Scaled by the last entry, which rounding keeps from being exactly 1; right=True steps over ids of probability 0.
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    level = cumulative[:, -1:] * (uniform.to(probs.device).unsqueeze(-1) * BELOW_ONE)
    return torch.searchsorted(cumulative, level, right=True).squeeze(-1)

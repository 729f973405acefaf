"""Chance for work that is done in shards (data, traces): seeds from names, uniforms all at once, tokens from uniforms by inversion.

A shard's uniforms are made on the CPU in float64, one per (row, position), before any model runs. So its draws do not depend on the device,
on the order of shards, nor on how its rows are batched, and an interrupted run resumes to the same bytes. A generation, whose length nobody
knows beforehand, draws from `lm.draws` instead.
"""

import hashlib

import torch
from jaxtyping import Float, Int
from torch import Tensor

BELOW_ONE = 1.0 - 2.0**-40
"""Keeps uniform * total below total in float64, so that the inverse of the distribution function never runs off its end."""


def seed_of(*parts: object) -> int:
    """63 bits of a sha256 over the parts: a seed of its own for every name, such as seed_of(run_seed, "response", "train", 7)."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def uniforms(seed: int, *shape: int) -> Float[Tensor, "..."]:
    """Independent uniforms in [0, 1), float64, on the CPU."""
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def draw(probs: Float[Tensor, "position vocab"], uniform: Float[Tensor, " position"]) -> Int[Tensor, " position"]:
    """One token per row: the id at which the distribution function first exceeds the row's uniform; probability 0 is never drawn.

    Worked example: probs (.5, .3, .2) and uniform .79 give id 1, uniform .8 gives id 2.
    """
    if probs.device.type == "mps":  # which has no float64
        return draw(probs.cpu(), uniform).to(probs.device)
    # Scaled by the last entry, which rounding keeps from being exactly 1; right=True steps over ids of probability 0.
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    level = cumulative[:, -1:] * (uniform.to(probs.device).unsqueeze(-1) * BELOW_ONE)
    return torch.searchsorted(cumulative, level, right=True).squeeze(-1)

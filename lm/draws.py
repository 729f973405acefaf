"""Random draws. Loops draw through a `Sampler`; work in shards (data, traces) draws from uniforms made in advance.

A *distribution* is a row over the vocabulary: probabilities for `RandomSampler`; for `GreedySampler`, which takes
the largest entry, logits serve and save a softmax. The samplers of the tests walk every branch with its
probability, which gives the exact distribution of the output.

A shard's uniforms are made on the CPU in float64, one per (row, position), before any model runs. So its draws depend
neither on the device, nor on the order of shards, nor on how rows are batched, and a resumed run gives the same bytes.
"""

import hashlib
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

BELOW_ONE = 1.0 - 2.0**-40
"""Keeps uniform * total below total in float64, so that inversion never runs off the end of the vocabulary."""
GENERATOR = np.random.PCG64DXSM.__name__
"""The generator of all uniforms, recorded in manifests: data of another one cannot be extended."""
_BLOCK = 256  # numbers that are made, or added up, at once
_MIN_WIDTH_OF_BLOCKS = 8192  # vocabulary from which sums of blocks are faster


@runtime_checkable
class Sampler(Protocol):
    """The random draws of one generation."""

    def token(self, dist: Float[Tensor, " vocab"]) -> int:
        """A token id drawn from the distribution."""

    def draw(self, dist: Float[Tensor, " vocab"]) -> Int[Tensor, " 1"]:
        """Draw a token id without leaving the device of the distribution; NaN gives its width."""
        return torch.tensor([self.token(dist)], device=dist.device)

    def num_accepted(self, acceptance_probs: Iterable[float]) -> int:
        """Length of the accepted prefix: token i passes with probability acceptance_probs[i], independently,
        until one fails; those after it may stay unread.
        """


class RandomSampler(Sampler):
    """Draws by inversion of two independent streams of uniforms, for tokens and for acceptance, as law 4.2 needs."""

    def __init__(self, source: torch.Generator | int | None = None) -> None:
        """`source`: a torch generator, which moves on; None: torch's global one; or an integer seed of at least 0, all
        of whose bits count. A stream gets 124 bits of a generator, so that those seeded one after another from one do
        not coincide; but `manual_seed` on the CPU reads 32 bits, so 5 and 5 + 2^32 give the same draws.
        """
        if source is None or isinstance(source, torch.Generator):
            device = "cpu" if source is None else source.device
            halves = torch.randint(2**62, (2, 2), generator=source, device=device).tolist()
            seeds = [high << 62 | low for high, low in halves]
        else:
            seeds = [2 * source, 2 * source + 1]
        self._tokens, self._accepts = map(_stream, seeds)

    def token(self, dist: Float[Tensor, " vocab"]) -> int:
        """The id at which the distribution function first exceeds a uniform; ValueError for NaN (`inverted`)."""
        token = _inverted_on_cpu(dist, self.uniform()) if dist.is_cpu else int(self.draw(dist))
        return refuse_no_token(token, dist)

    def draw(self, dist: Float[Tensor, " vocab"]) -> Int[Tensor, " 1"]:
        return inverted(dist, self.uniform())

    def uniform(self) -> float:
        """The uniform that decides the next token."""
        return next(self._tokens)

    def num_accepted(self, acceptance_probs: Iterable[float]) -> int:
        """Length of the accepted prefix; token i passes while uniform < acceptance_probs[i] (strict: 0 never does)."""
        return sum(1 for _ in takewhile(lambda prob: next(self._accepts) < prob, acceptance_probs))


class GreedySampler:
    """Temperature 0: the most probable token, the first of equals; no random number is used."""

    def token(self, dist: Float[Tensor, " vocab"]) -> int:
        """The most probable token; ValueError for NaN."""
        if not dist.is_cpu:
            return refuse_no_token(int(self.draw(dist)), dist)
        row = array_of(dist)
        token = int(row.argmax())
        # argmax stops at the first NaN, the only number unequal to itself
        return token if row[token] == row[token] else refuse_no_token(len(row), dist)

    @staticmethod
    def draw(dist: Float[Tensor, "*rows vocab"]) -> Int[Tensor, "*rows 1"]:
        """Index of the largest entry of each row; the width, which is no token, for NaN."""
        best, token = dist.max(-1, keepdim=True)
        return torch.where(best.isnan(), dist.shape[-1], token)

    def num_accepted(self, acceptance_probs: Iterable[float]) -> int:
        return sum(1 for _ in takewhile(bool, acceptance_probs))


def inverted(dist: Float[Tensor, "*rows vocab"], uniform: float | Float[Tensor, "*rows 1"]) -> Int[Tensor, "*rows 1"]:
    """First id of each row where the distribution function exceeds the uniform, never one of probability 0; the
    width, which is no token, for NaN.

    Worked example: (.5, .3, .2) and uniform .79 give id 1, uniform .8 gives id 2.
    """
    if dist.device.type == "mps":  # has no float64
        return inverted(dist.cpu(), uniform).to(dist.device)
    uniform = uniform.to(dist.device) if isinstance(uniform, Tensor) else uniform
    cumulative = dist.cumsum(-1, dtype=torch.float64)
    level = cumulative[..., -1:] * (uniform * BELOW_ONE)  # rounding keeps the last entry from being exactly 1
    return torch.searchsorted(cumulative, level, right=True)


def _inverted_on_cpu(dist: Float[Tensor, " vocab"], uniform: float) -> int:
    """`inverted` of one row. Python's search in it costs half of what numpy's does, and a third of what torch's does.

    A running sum of float64 numbers adds them one by one. In a wide row sums of blocks find the block, and its
    own sums the token: 158 µs for 151,936 numbers instead of 311.
    """
    dist = dist.detach() if dist.requires_grad else dist
    if len(dist) < _MIN_WIDTH_OF_BLOCKS:
        numbers = dist.cumsum(-1, dtype=torch.float64).numpy().data
        return bisect_right(numbers, numbers[-1] * (uniform * BELOW_ONE))
    row = dist.double()
    num_whole = len(row) // _BLOCK
    sums = torch.cat([row[: num_whole * _BLOCK].view(num_whole, _BLOCK).sum(-1), row[num_whole * _BLOCK :].sum()[None]])
    cumulative = sums.cumsum(0).numpy()
    level = cumulative[-1] * (uniform * BELOW_ONE)
    if np.isnan(level):
        return len(row)
    block = int(cumulative.searchsorted(level, side="right"))
    within = row[block * _BLOCK : (block + 1) * _BLOCK].cumsum(0).numpy() + (cumulative[block - 1] if block else 0.0)
    index = int(within.searchsorted(level, side="right"))
    if index == len(within):  # both sums are rounded: the block's last token that has a probability
        index = int(within.searchsorted(within[-1]))
    return block * _BLOCK + index


def draw_rows(
    dists: Sequence[Float[Tensor, " vocab"]] | Float[Tensor, "rows vocab"], draws: Sequence[Sampler]
) -> Int[Tensor, " rows"]:
    """One token of each distribution, each by its own draws, on the device of the distributions; the width, which
    is no token, for NaN.
    """
    if not dists[0].is_cpu:
        random = [each for each in draws if isinstance(each, RandomSampler)]
        if len(draws) == len(random) > 1:
            uniform = torch.tensor([[each.uniform()] for each in random], dtype=torch.float64)
            return inverted(torch.stack([*dists]), uniform).flatten()
        return torch.cat([each.draw(dist) for each, dist in zip(draws, dists, strict=True)])
    return torch.tensor([each.token(dist) for each, dist in zip(draws, dists, strict=True)])


def draw(probs: Float[Tensor, "position vocab"], uniform: Float[Tensor, " position"]) -> Int[Tensor, " position"]:
    """One token per row (`inverted`)."""
    return inverted(probs, uniform.unsqueeze(-1)).squeeze(-1)


def refuse_no_token(token: int, dist: Float[Tensor, " vocab"]) -> int:
    """The token; ValueError if it is the id beyond the last, which a distribution with NaN gives."""
    if token == dist.shape[-1]:
        raise ValueError("a distribution to draw from is not finite; load the model in float32 or check its weights")
    return token


def array_of(tensor: Tensor) -> np.ndarray:
    """A tensor on the CPU as an array, whose calls on single rows are faster; in float32 if numpy lacks its dtype."""
    tensor = tensor.detach() if tensor.requires_grad else tensor
    return (tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()).numpy()


def seed_of(*parts: object) -> int:
    """63 bits of a sha256 over the parts, such as seed_of(run_seed, "response", "train", 7)."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def uniforms(seed: int, *shape: int) -> Float[Tensor, "..."]:
    """Independent uniforms in [0, 1), float64, on the CPU; two seeds below 2^128 (torch: 2^32) give two streams."""
    return torch.from_numpy(_next_uniforms(np.random.PCG64DXSM(seed), math.prod(shape))).reshape(shape)


def _next_uniforms(bits: np.random.PCG64DXSM, count: int) -> Float64[np.ndarray, " count"]:
    """Multiples of 2^-53, each equally probable; numpy promises the bits of a seed (NEP 19), not its distributions."""
    return (bits.random_raw(count) >> np.uint64(11)) * 2.0**-53


def _stream(seed: int) -> Iterator[float]:
    """Endless uniforms in [0, 1), made in blocks; each block is read from its end."""
    bits = np.random.PCG64DXSM(seed)
    while True:
        yield from reversed(_next_uniforms(bits, _BLOCK).tolist())

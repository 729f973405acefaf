"""Sampling of tokens: every random draw of the project's loops goes through a `Sampler`.

A loop needs two things: a token from a law, and the number of drafted tokens that are accepted. A *law* is a row over
the vocabulary: probabilities for `RandomSampler`; for `GreedySampler`, which takes the largest entry, logits will do
and save a softmax. The tests' samplers walk every branch with its probability, which gives the exact law of the output.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import takewhile
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from lm.arrays import array_of
from lm.uniforms import BELOW_ONE, Bits

_BLOCK = 256
"""Numbers that are made, or added up, at once."""
_WIDE = 8192
"""Vocabulary from which two steps find a token faster than one (`inverted_by_blocks`)."""


@runtime_checkable
class Sampler(Protocol):
    """The source of chance of one generation."""

    def token(self, law: Float[Tensor, " vocab"]) -> int:
        """A token id drawn from the law."""
        ...

    def draw(self, law: Float[Tensor, " vocab"]) -> Int[Tensor, " 1"]:
        """A token id as `token` draws it, on the device of the law, for a loop that reads it with other numbers."""
        return torch.tensor([self.token(law)], device=law.device)

    def num_accepted(self, acceptance_probs: Iterable[float]) -> int:
        """Length of the accepted prefix: token i passes with probability acceptance_probs[i], independently, until the
        first that fails; probabilities after that one need not be asked for.
        """
        ...


@runtime_checkable
class UniformSource(Protocol):
    """Draws whose random number a compiled step can turn into a token by itself."""

    def uniform(self) -> tuple[float, int]:
        """(a uniform in [0, 1) for the next token, the token's id where it is settled already, else -1); greedy steps
        read neither.
        """
        ...


class RandomSampler(Sampler):
    """Draws from random numbers, by inversion; two independent streams, one for tokens and one for acceptance.

    The streams are seeded once and never reseeded, so the acceptance uniforms are independent of the drafted tokens,
    which verification (law 4.2) needs. Uniforms are float64, made on the CPU in blocks.

    Each stream has 124 bits of a generator of torch, so that streams seeded one after another from one generator do not
    coincide. Draws from two generators differ as far as the generators do: `manual_seed` of torch's CPU generator reads
    the lower 32 bits of its seed, and 5 and 5 + 2^32 give the same draws there. A seed given as an integer counts with
    all its bits.
    """

    def __init__(self, source: torch.Generator | int | None = None) -> None:
        """Args:
        source: what seeds both streams: a generator of torch, which moves on; a seed of at least 0; None: torch's
            global generator.
        """
        if source is None or isinstance(source, torch.Generator):
            halves = torch.randint(
                2**62, (2, 2), generator=source, device="cpu" if source is None else source.device
            ).tolist()
            seeds = [high << 62 | low for high, low in halves]
        else:
            seeds = [2 * source, 2 * source + 1]
        self._tokens, self._accepts = map(_stream, seeds)
        self._cumulative: dict[int, tuple[Tensor, memoryview]] = {}
        """For each width of a vocabulary, memory for a distribution function, and the same for Python to read."""

    def token(self, law: Float[Tensor, " vocab"]) -> int:
        """The token id at which the distribution function first exceeds a uniform; a token of probability 0 is never
        drawn.

        Raises:
            ValueError: a law with NaN in it.
        """
        if law.is_cpu and law.shape[-1] >= _WIDE:
            token = inverted_by_blocks(law, next(self._tokens))
        elif law.is_cpu:  # Python's search in one row costs half of what numpy's does, and a third of what torch's does
            rising, numbers = self._cumulative.get(law.shape[-1]) or self._prepared(law.shape[-1])
            torch.cumsum(law.detach() if law.requires_grad else law, -1, dtype=torch.float64, out=rising)
            token = bisect_right(numbers, numbers[-1] * (next(self._tokens) * BELOW_ONE))
        else:
            token = int(self.draw(law))
        return refuse_no_token(token, law)

    def draw(self, law: Float[Tensor, " vocab"]) -> Int[Tensor, " 1"]:
        """A token id as `token` draws it, without a transfer to the host; len(law), which is no token, where the law
        has NaN.
        """
        if law.device.type == "mps":  # which has no float64
            return self.draw(law.cpu()).to(law.device)
        return inverted(law, next(self._tokens))

    def uniform(self) -> tuple[float, int]:
        """The uniform that `token` would have used."""
        return next(self._tokens), -1

    def _prepared(self, width: int) -> tuple[Tensor, memoryview]:
        with torch.inference_mode(False):  # one made in inference mode could not be written to outside it
            rising = torch.empty(width, dtype=torch.float64)
        self._cumulative[width] = rising, rising.numpy().data
        return self._cumulative[width]

    def num_accepted(self, acceptance_probs: Iterable[float]) -> int:
        """Length of the accepted prefix; token i passes while uniform < acceptance_probs[i] (strict: 0 never
        passes).
        """
        count = 0
        for acceptance_prob in acceptance_probs:
            if not next(self._accepts) < acceptance_prob:
                break
            count += 1
        return count


class GreedySampler:
    """Temperature 0: the most probable token, the first of equals; no random number is used."""

    def token(self, law: Float[Tensor, " vocab"]) -> int:
        """Token of the largest probability.

        Raises:
            ValueError: a law with NaN in it.
        """
        if law.is_cpu:
            row = array_of(law)
            token = int(row.argmax())
            # argmax stops at the first NaN, the only number unequal to itself
            token = token if row[token] == row[token] else row.shape[-1]
        else:
            token = int(self.draw(law))
        return refuse_no_token(token, law)

    def draw(self, law: Float[Tensor, " vocab"]) -> Int[Tensor, " 1"]:
        """The most probable token, with no transfer to the host; len(law), which is no token, if the law has NaN."""
        return greedy_token(law)

    def uniform(self) -> tuple[float, int]:
        """Numbers that a greedy law does not read."""
        return 0.0, -1

    def num_accepted(self, acceptance_probs: Iterable[float]) -> int:
        """Length of the accepted prefix; between one-hot distributions every probability is 0 or 1."""
        return sum(1 for _ in takewhile(bool, acceptance_probs))


def inverted(law: Float[Tensor, " vocab"], uniform: float | Float[Tensor, " 1"]) -> Int[Tensor, " 1"]:
    """First place where the distribution function exceeds the uniform; len(law), which is no token, where the law has
    NaN.
    """
    cumulative = law.cumsum(-1, dtype=torch.float64)
    # entries that do not exceed it are counted, since compiled code has no search; beside NaN nothing is less or more
    return (~(cumulative > cumulative[-1:] * (uniform * BELOW_ONE))).sum(-1, keepdim=True)


def inverted_by_blocks(law: Float[Tensor, " vocab"], uniform: float) -> int:
    """`inverted` of a wide law on the CPU: sums of blocks find the block, and its own sums the token.

    A running sum of float64 numbers adds them one by one: 311 µs for 151,936 of them, and 158 in these two steps.
    """
    row = law.detach().double()
    num_whole = len(row) // _BLOCK
    sums = torch.cat([row[: num_whole * _BLOCK].view(num_whole, _BLOCK).sum(-1), row[num_whole * _BLOCK :].sum()[None]])
    cumulative = sums.cumsum(0).numpy()
    level = cumulative[-1] * (uniform * BELOW_ONE)
    if np.isnan(level):
        return len(row)
    block = int(cumulative.searchsorted(level, side="right"))
    within = row[block * _BLOCK : (block + 1) * _BLOCK].cumsum(0).numpy() + (cumulative[block - 1] if block else 0.0)
    place = int(within.searchsorted(level, side="right"))
    if place == len(within):  # both sums are rounded: the block's last token that has a probability
        place = int(within.searchsorted(within[-1]))
    return block * _BLOCK + place


def greedy_token(law: Float[Tensor, " vocab"]) -> Int[Tensor, " 1"]:
    """Place of the largest probability; len(law), which is no token, where it has NaN."""
    best, token = law.max(-1, keepdim=True)
    return torch.where(best.isnan(), law.shape[-1], token)


def refuse_no_token(token: int, law: Float[Tensor, " vocab"]) -> int:
    """The token, if it is one.

    Raises:
        ValueError: it is the id beyond the last, which a law with NaN in it draws.
    """
    if token == law.shape[-1]:
        raise ValueError("a distribution to draw from is not finite; load the model in float32 or check its weights")
    return token


def _stream(seed: int) -> Iterator[float]:
    """Uniforms in [0, 1) without end, made in blocks because one at a time costs an array each; each block is read from
    its end.
    """
    bits = Bits(seed)
    while True:
        yield from reversed(bits.uniforms(_BLOCK).tolist())

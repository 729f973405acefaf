"""Tokens per target forward of the real loop under i.i.d. acceptance.

Models that give the same distribution after every prefix make acceptance i.i.d.: a token drawn from q passes with
probability sum_v min(p, q). Nothing of the loop is replaced, only the models:

    two levels, Chen      p = (1/2, 1/2, 0, 0), q = (a/2, a/2, (1-a)/2, (1-a)/2):  sum_v min = a
    pre-verified          tokens are pairs (u, v). Micro and draft differ in u alone, draft and target in v alone, so
                          that the draft's verdict says nothing about the target's
"""

from collections.abc import Sequence
from itertools import islice
from math import sqrt
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from decode.drafters.hierarchies import InnerRounds, InterleavedDrafter, PreVerifiedDrafter
from decode.loop.decoder import SpeculativeDecoder
from decode.loop.drafter import Drafter, ModelDrafter
from decode.policies.base import Policy
from decode.policies.plain import FixedLength
from lm import CachedModel
from tests.toys.enumeration import ToyModel

_ROUNDS_PER_GENERATION = 200
"""Every round copies the sequence, which is cheap while it is short."""


class ConstantModel(ToyModel):
    """The same next-token distribution after every prefix."""

    def __init__(self, probs: Sequence[float] | Float[Tensor, " vocab"]) -> None:
        self.log_probs = torch.as_tensor(probs, dtype=torch.float64).log()
        super().__init__(seed=0, vocab_size=len(self.log_probs))

    def feed(self, new_tokens: Sequence[int], num_rows: int = 1) -> Float[Tensor, "rows vocab"]:
        assert 1 <= num_rows <= len(new_tokens), "a forward feeds at least the tokens of its rows"
        self.fed += new_tokens
        return self.log_probs.expand(num_rows, -1)


class Simulated(NamedTuple):
    """A mean over rounds of the real loop."""

    mean: float
    standard_error: float

    def z_score(self, expected: float) -> float:
        """How many standard errors the mean lies from `expected`; 0 where both agree and nothing varies."""
        difference = self.mean - expected
        if not self.standard_error:
            return 0.0 if abs(difference) < 1e-9 else float("inf")
        return difference / self.standard_error


def tokens_per_round(target: CachedModel, drafter: Drafter, *, num_rounds: int) -> Simulated:
    """Mean emitted tokens per target forward over `num_rounds` rounds of the real loop."""
    decoder = SpeculativeDecoder(target, drafter, eos_ids=frozenset(), max_draft_length=10_000)
    generator, emitted = torch.Generator().manual_seed(0), []
    while len(emitted) < num_rounds:
        most = min(_ROUNDS_PER_GENERATION, num_rounds - len(emitted))
        rounds = islice(decoder.stream([0], 10**9, generator=generator), most)
        emitted += [float(len(round_.emitted)) for round_ in rounds]
    values = torch.tensor(emitted, dtype=torch.float64)
    return Simulated(float(values.mean()), float(values.std()) / sqrt(num_rounds))


def two_level_rounds(rate: float, draft_length: int, *, num_rounds: int) -> Simulated:
    drafter = ModelDrafter(_accepted_at(rate), FixedLength(draft_length))
    return tokens_per_round(_accepted_at(1.0), drafter, num_rounds=num_rounds)


def interleaved_rounds(rates: tuple[float, float], *, m: int, n: int, num_rounds: int) -> Simulated:
    drafter = InterleavedDrafter(*(_accepted_at(rate) for rate in rates), m=m, n=n)
    return tokens_per_round(_accepted_at(1.0), drafter, num_rounds=num_rounds)


def pre_verified_rounds(rates: tuple[float, float], *, m: int, n: int, num_rounds: int) -> Simulated:
    (draft_u, micro_u), (target_v, draft_v) = (_overlapping(rate) for rate in rates)
    pairs = (micro_u, draft_v), (draft_u, draft_v), (draft_u, target_v)
    micro, draft, target = (ConstantModel(torch.outer(u, v).flatten()) for u, v in pairs)
    rounds = InnerRounds(window=n, max_rounds=m)
    drafter = PreVerifiedDrafter(ModelDrafter(micro, FixedLength(n)), draft, Policy(), rounds=rounds)
    return tokens_per_round(target, drafter, num_rounds=num_rounds)


def acceptance_rounds(q: Sequence[float], p: Sequence[float], *, num_rounds: int) -> Simulated:
    drafter = ModelDrafter(ConstantModel(q), FixedLength(1))
    tokens = tokens_per_round(ConstantModel(p), drafter, num_rounds=num_rounds)
    return tokens._replace(mean=tokens.mean - 1)


def _accepted_at(rate: float) -> ConstantModel:
    """A model whose tokens pass a target `_accepted_at(1)` with probability `rate`."""
    return ConstantModel([rate / 2, rate / 2, (1 - rate) / 2, (1 - rate) / 2])


def _overlapping(rate: float) -> tuple[Tensor, Tensor]:
    """Two distributions over two values with sum of minima `rate`."""
    first = torch.tensor([rate / 2, 1 - rate / 2], dtype=torch.float64)
    return first, first.flip(0)

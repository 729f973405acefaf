"""Tokens per target forward of the real loop under i.i.d. acceptance.

Models that give the same distribution after every prefix make acceptance i.i.d.: a token drawn from q passes with
probability sum_v min(p, q). Nothing of the loop is replaced, only the models:

    two levels, Chen      p = (1/2, 1/2, 0, 0), q = (a/2, a/2, (1-a)/2, (1-a)/2):  sum_v min = a
    pre-verified          tokens are pairs (u, v). Micro and draft differ in u alone, draft and target in v alone, so
                          that the draft's verdict says nothing about the target's
"""

from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor

from decode.drafters.hierarchies import InnerRounds, InterleavedDrafter, PreVerifiedDrafter
from decode.loop.decoder import SpeculativeDecoder
from decode.loop.drafter import Drafter, ModelDrafter
from decode.policies.base import Policy
from decode.policies.plain import FixedLength
from tests.toys.enumeration import ToyModel

NUM_ROUNDS = 300


class ConstantModel(ToyModel):
    """The same next-token distribution after every prefix."""

    def __init__(self, probs: Sequence[float] | Tensor) -> None:
        self.log_probs = torch.as_tensor(probs, dtype=torch.float64).log()
        super().__init__(seed=0, vocab_size=len(self.log_probs))

    def feed(self, new_tokens: Sequence[int], num_rows: int = 1) -> Tensor:
        assert 1 <= num_rows <= len(new_tokens), "a forward feeds at least the tokens of its rows"
        self.fed += new_tokens
        return self.log_probs.expand(num_rows, -1)


def z_score(target: ConstantModel, drafter: Drafter, expected: float) -> float:
    """How many standard errors the mean of emitted tokens per target forward lies from `expected`."""
    decoder = SpeculativeDecoder(target, drafter, eos_ids=frozenset(), max_draft_length=10_000)
    generator, emitted = torch.Generator().manual_seed(0), []
    while len(emitted) < NUM_ROUNDS:  # every round copies the sequence, which is cheap while it is short
        rounds = islice(decoder.stream([0], 10**9, generator=generator), min(200, NUM_ROUNDS - len(emitted)))
        emitted += [float(len(round_.emitted)) for round_ in rounds]
    values = torch.tensor(emitted, dtype=torch.float64)
    difference, error = float(values.mean()) - expected, float(values.std()) / NUM_ROUNDS**0.5
    return difference / error if error else 0.0 if abs(difference) < 1e-9 else float("inf")


def two_levels(rate: float, draft_length: int) -> tuple[ConstantModel, Drafter]:
    return accepted_at(1.0), ModelDrafter(accepted_at(rate), FixedLength(draft_length))


def interleaved(rates: tuple[float, float], *, m: int, n: int) -> tuple[ConstantModel, Drafter]:
    return accepted_at(1.0), InterleavedDrafter(*map(accepted_at, rates), m=m, n=n)


def pre_verified(rates: tuple[float, float], *, m: int, n: int) -> tuple[ConstantModel, Drafter]:
    # two distributions over two values with sum of minima `rate`
    halves = [torch.tensor([rate / 2, 1 - rate / 2], dtype=torch.float64) for rate in rates]
    (draft_u, micro_u), (target_v, draft_v) = ((half, half.flip(0)) for half in halves)
    pairs = (micro_u, draft_v), (draft_u, draft_v), (draft_u, target_v)
    micro, draft, target = (ConstantModel(torch.outer(u, v).flatten()) for u, v in pairs)
    rounds = InnerRounds(window=n, max_rounds=m)
    return target, PreVerifiedDrafter(ModelDrafter(micro, FixedLength(n)), draft, Policy(), rounds=rounds)


def accepted_at(rate: float) -> ConstantModel:
    """A model whose tokens pass a target `accepted_at(1)` with probability `rate`."""
    return ConstantModel([rate / 2, rate / 2, (1 - rate) / 2, (1 - rate) / 2])

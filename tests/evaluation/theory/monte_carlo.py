"""Tokens per target forward of the real loop under i.i.d. acceptance.

Models that give the same distribution after every prefix make acceptance i.i.d.: a token drawn from q passes with
probability sum_v min(p, q). Nothing of the loop is replaced, only the models:

    two levels, Chen      p = (1/2, 1/2, 0, 0), q = (a/2, a/2, (1-a)/2, (1-a)/2):  sum_v min = a
    pre-verified          tokens are pairs (u, v). Micro and draft differ in u alone, draft and target in v alone, so
                          that the draft's verdict says nothing about the target's
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from math import sqrt

import torch
from jaxtyping import Float
from torch import Tensor

from decode.drafters.hierarchies.interleaved import InterleavedDrafter
from decode.drafters.hierarchies.pre_verified import InnerRounds, PreVerifiedDrafter
from decode.loop.decoder import SpeculativeDecoder
from decode.loop.drafter import Drafter, ModelDrafter
from decode.policies.base import Policy
from decode.policies.plain import FixedLength
from lm import CachedModel

_ROUNDS_PER_GENERATION = 200
"""The sequence is a list that every round copies: short ones keep that cheap."""


class ConstantModel(CachedModel):
    """The same next-token distribution after every prefix; feeding is remembered, so that cache errors would show as
    assertions.
    """

    def __init__(self, probs: Sequence[float] | Float[Tensor, " vocab"]) -> None:
        self.probs = torch.as_tensor(probs, dtype=torch.float64)
        self.vocab_size = len(self.probs)
        self.hidden = None
        self.reset()

    def __len__(self) -> int:
        return self._length

    @property
    def device(self) -> torch.device:
        return self.probs.device

    @property
    def max_length(self) -> float:
        return float("inf")

    @property
    def num_logits(self) -> int:
        return len(self.probs)

    num_embeddings = num_logits

    def check_mode(self) -> None:
        return

    def reset(self) -> None:
        self._length = 0

    def roll_back(self, length: int) -> None:
        self._length = min(self._length, length)

    def forward(self, token_ids: Sequence[int], num_rows: int = 1) -> Float[Tensor, "rows vocab"]:
        assert 1 <= num_rows <= len(token_ids) - self._length, (
            "a forward must feed at least the tokens whose rows it returns"
        )
        self._length = len(token_ids)
        return self.probs.log().expand(num_rows, -1)


@dataclass(frozen=True)
class Simulated:
    """A mean over rounds of the real loop."""

    mean: float
    standard_error: float
    num_rounds: int

    def z_score(self, expected: float) -> float:
        """How many standard errors the mean lies from `expected`; 0 where both agree and nothing varies."""
        difference = self.mean - expected
        if not self.standard_error:
            return 0.0 if abs(difference) < 1e-9 else float("inf")
        return difference / self.standard_error


def tokens_per_round(target: CachedModel, drafter: Drafter, *, num_rounds: int, seed: int = 0) -> Simulated:
    """Mean emitted tokens per target forward over `num_rounds` rounds of the real loop."""
    decoder = SpeculativeDecoder(target, drafter, eos_ids=frozenset(), max_draft_length=10_000)
    generator = torch.Generator().manual_seed(seed)
    emitted: list[float] = []
    while len(emitted) < num_rounds:
        rounds = decoder.stream([0], 10**9, generator=generator)
        emitted += [
            len(round_.emitted) for round_ in islice(rounds, min(_ROUNDS_PER_GENERATION, num_rounds - len(emitted)))
        ]
    values = torch.tensor(emitted, dtype=torch.float64)
    return Simulated(float(values.mean()), float(values.std()) / sqrt(num_rounds), num_rounds)


def two_level_rounds(rate: float, draft_length: int, *, num_rounds: int, seed: int = 0) -> Simulated:
    drafter = ModelDrafter(_accepted_at(rate), FixedLength(draft_length))
    return tokens_per_round(_accepted_at(1.0), drafter, num_rounds=num_rounds, seed=seed)


def interleaved_rounds(rates: tuple[float, float], *, m: int, n: int, num_rounds: int, seed: int = 0) -> Simulated:
    drafter = InterleavedDrafter(*(_accepted_at(rate) for rate in rates), m=m, n=n)
    return tokens_per_round(_accepted_at(1.0), drafter, num_rounds=num_rounds, seed=seed)


def pre_verified_rounds(rates: tuple[float, float], *, m: int, n: int, num_rounds: int, seed: int = 0) -> Simulated:
    (draft_u, micro_u), (target_v, draft_v) = (_overlapping(rate) for rate in rates)
    pairs = (micro_u, draft_v), (draft_u, draft_v), (draft_u, target_v)
    micro, draft, target = (ConstantModel(torch.outer(u, v).flatten()) for u, v in pairs)
    rounds = InnerRounds(window=n, max_rounds=m)
    drafter = PreVerifiedDrafter(ModelDrafter(micro, FixedLength(n)), draft, Policy(), rounds=rounds)
    return tokens_per_round(target, drafter, num_rounds=num_rounds, seed=seed)


def acceptance_rounds(q: Sequence[float], p: Sequence[float], *, num_rounds: int, seed: int = 0) -> Simulated:
    tokens = tokens_per_round(
        ConstantModel(p), ModelDrafter(ConstantModel(q), FixedLength(1)), num_rounds=num_rounds, seed=seed
    )
    return Simulated(tokens.mean - 1, tokens.standard_error, tokens.num_rounds)


def _accepted_at(rate: float) -> ConstantModel:
    """A model whose tokens pass a target `_accepted_at(1)` with probability `rate`."""
    return ConstantModel([rate / 2, rate / 2, (1 - rate) / 2, (1 - rate) / 2])


def _overlapping(rate: float) -> tuple[Tensor, Tensor]:
    """Two distributions over two values with sum of minima `rate`."""
    first = torch.tensor([rate / 2, 1 - rate / 2], dtype=torch.float64)
    return first, first.flip(0)

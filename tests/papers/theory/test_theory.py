"""The closed forms are what the real loop does under i.i.d. acceptance, and their limits are the known ones.

Models that give the same distribution after every prefix make acceptance i.i.d.: a token drawn from q passes with
probability sum_v min(p, q). Nothing of the loop is replaced, only the models. Monte Carlo is seeded, so a test that
passed passes again; for a fresh seed |z| > 4 has probability 6e-5 per check.
"""

import math
from collections.abc import Sequence
from itertools import islice, product

import pytest
import torch
from torch import Tensor

from decode import ModelDrafter, SpeculativeDecoder
from decode.drafters.hierarchies import InnerRounds, InterleavedDrafter, PreVerifiedDrafter
from decode.loop.drafter import Drafter
from decode.policies import FixedLength, Policy
from lm import acceptance_rate
from papers.theory import closed_forms as theory
from tests.toys.enumeration import ToyModel

NUM_ROUNDS = 300
RATES = (0.5, 0.8), (0.9, 0.4)


class ConstantModel(ToyModel):
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


def accepted_at(rate: float) -> ConstantModel:
    """A model whose tokens pass a target `accepted_at(1)` with probability `rate` (Chen's two levels)."""
    return ConstantModel([rate / 2, rate / 2, (1 - rate) / 2, (1 - rate) / 2])


def interleaved(rates: tuple[float, float], *, m: int, n: int) -> tuple[ConstantModel, Drafter]:
    return accepted_at(1.0), InterleavedDrafter(*map(accepted_at, rates), m=m, n=n)


def pre_verified(rates: tuple[float, float], *, m: int, n: int) -> tuple[ConstantModel, Drafter]:
    """Tokens are pairs (u, v). Micro and draft differ in u alone, draft and target in v alone, so that the draft's
    verdict says nothing about the target's.
    """
    halves = [torch.tensor([rate / 2, 1 - rate / 2], dtype=torch.float64) for rate in rates]
    (draft_u, micro_u), (target_v, draft_v) = ((half, half.flip(0)) for half in halves)
    pairs = (micro_u, draft_v), (draft_u, draft_v), (draft_u, target_v)
    micro, draft, target = (ConstantModel(torch.outer(u, v).flatten()) for u, v in pairs)
    rounds = InnerRounds(window=n, max_rounds=m)
    return target, PreVerifiedDrafter(ModelDrafter(micro, FixedLength(n)), draft, Policy(), rounds=rounds)


SCHEDULED = {interleaved: theory.interleaved_tokens, pre_verified: theory.pre_verified_tokens}


def test_leviathans_expected_tokens_are_those_of_the_loop_and_the_rate_is_the_sum_of_minima():
    for rate, length in ((0.0, 3), (0.3, 2), (0.7, 5), (1.0, 4), (0.5, 0)):
        two_levels = accepted_at(1.0), ModelDrafter(accepted_at(rate), FixedLength(length))
        assert abs(z_score(*two_levels, theory.expected_tokens(rate, length))) < 4
    q, p = ConstantModel((0.7, 0.2, 0.1)), ConstantModel((0.3, 0.4, 0.3))
    assert abs(z_score(p, ModelDrafter(q, FixedLength(1)), 1.6)) < 4


@pytest.mark.parametrize(("m", "n"), [(1, 2), (2, 1), (2, 3), (3, 0)])
@pytest.mark.parametrize("rates", RATES)
@pytest.mark.parametrize("loop", SCHEDULED)
def test_expected_tokens_of_hierarchies_are_those_of_the_loop(loop, rates, m, n):
    assert abs(z_score(*loop(rates, m=m, n=n), SCHEDULED[loop](rates, m=m, n=n))) < 4


def test_a_wrong_formula_is_seen_by_the_monte_carlo_check():
    assert abs(z_score(*interleaved((0.5, 0.8), m=2, n=1), theory.expected_tokens(0.5, 2))) > 4
    assert abs(z_score(*pre_verified(RATES[0], m=2, n=4), theory.pre_verified_tokens(RATES[0], m=1, n=4))) > 4


@pytest.mark.parametrize(("m", "n"), [(1, 2), (2, 1), (3, 0), (4, 5)])
@pytest.mark.parametrize(("alpha", "beta"), [(0.8, 0.5), (0.4, 0.9), (0.75, 0.75), (0.0, 0.3), (0.6, 0.0)])
def test_chens_expected_tokens_are_the_mean_of_his_table_a1_and_his_theorems_hold(alpha, beta, m, n):
    survival = beta**n * alpha
    table = {block * (n + 1) + j + 1: survival**block * beta**j * (1 - beta) for block in range(m) for j in range(n)}
    table |= {(block + 1) * (n + 1): survival**block * beta**n * (1 - alpha) for block in range(m)}
    table[m * (n + 1) + 1] = survival**m
    assert sum(table.values()) == pytest.approx(1.0)
    tokens = theory.interleaved_tokens((beta, alpha), m=m, n=n)
    assert tokens == pytest.approx(sum(count * probability for count, probability in table.items()))
    blocks = (1 - survival**m) / (1 - survival)
    assert tokens == pytest.approx((1 - beta ** (n + 1)) / (1 - beta) * blocks + survival**m)
    c, c_s = 0.2, 0.1
    speed = theory.schedule_speedup(theory.interleaved_tokens, (beta, alpha), (c * c_s, c), m=m, n=n)
    assert speed == pytest.approx(tokens / (1 + m * c + m * n * c * c_s))


@pytest.mark.parametrize("rate", [0.0, 0.35, 1.0])
def test_levels_that_add_nothing_give_back_leviathans_form(rate):
    for tokens, rates, (m, n), length in (
        (theory.interleaved_tokens, (0.9, rate), (4, 0), 4),
        (theory.interleaved_tokens, (rate, rate), (2, 3), 8),
        (theory.pre_verified_tokens, (0.5, rate), (4, 0), 4),
        (theory.pre_verified_tokens, (1.0, rate), (2, 3), 8),
    ):
        assert tokens(rates, m=m, n=n) == pytest.approx(theory.expected_tokens(rate, length))


def test_the_best_draft_length_beats_its_neighbours_and_drafting_may_not_pay():
    for rate, cost in product([0.1, 0.5, 0.8, 0.95], [0.01, 0.1, 0.5]):
        best = theory.best_draft_length(rate, cost)
        speeds = [theory.speedup(theory.expected_tokens(rate, k), cost * k) for k in range(65)]
        assert speeds[best] == max(speeds)
        assert (best == 0) == (rate <= cost)  # Leviathan, Corollary 3.9: there is a gain exactly if a > c


def test_svips_bounds_hold_for_every_pair_of_distributions_and_cross_where_they_should():
    generator = torch.Generator().manual_seed(0)
    q, p = (3 * torch.randn(2, 2000, 6, generator=generator, dtype=torch.float64)).softmax(-1)
    divergences = (q * (q / p).log()).sum(-1).clamp(min=0)
    for rate, divergence in zip(acceptance_rate(q, p).tolist(), divergences.tolist(), strict=True):
        assert rate >= max(theory.pinsker(divergence), theory.bretagnolle_huber(divergence)) - 1e-12
    assert theory.pinsker(1.5) > theory.bretagnolle_huber(1.5)
    assert theory.pinsker(1.7) < theory.bretagnolle_huber(1.7)


def test_what_is_no_rate_or_cost_is_refused():
    cases = [(theory.expected_tokens, (1.1, 2)), (theory.expected_tokens, (math.nan, 2)), (theory.speedup, (0.5, -0.1))]
    for of, values in cases:
        with pytest.raises(ValueError, match="is"):
            of(*values)

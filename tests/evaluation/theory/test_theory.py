"""The closed forms are what the real loop does under i.i.d. acceptance, and their limits are the known ones.

Monte Carlo here is seeded, so a test that passed passes again; for a fresh seed |z| > 4 has probability 6e-5 per check.
"""

import math
from itertools import product

import pytest
import torch

from decode.loop.drafter import ModelDrafter
from decode.policies.plain import FixedLength
from evaluation.theory import closed_forms as theory
from lm import acceptance_rate
from tests.evaluation.theory.monte_carlo import ConstantModel, interleaved, pre_verified, two_levels, z_score

RATES = (0.5, 0.8), (0.9, 0.4)
SCHEDULED = {interleaved: theory.interleaved_tokens, pre_verified: theory.pre_verified_tokens}


@pytest.mark.parametrize(("rate", "draft_length"), [(0.0, 3), (0.3, 2), (0.7, 5), (1.0, 4), (0.5, 0)])
def test_leviathans_expected_tokens_are_those_of_the_loop(rate, draft_length):
    assert abs(z_score(*two_levels(rate, draft_length), theory.expected_tokens(rate, draft_length))) < 4


@pytest.mark.parametrize(("m", "n"), [(1, 2), (2, 1), (2, 3), (3, 0)])
@pytest.mark.parametrize("rates", RATES)
@pytest.mark.parametrize("loop", SCHEDULED)
def test_expected_tokens_of_hierarchies_are_those_of_the_loop(loop, rates, m, n):
    assert abs(z_score(*loop(rates, m=m, n=n), SCHEDULED[loop](rates, m=m, n=n))) < 4


def test_a_wrong_formula_is_seen_by_the_monte_carlo_check():
    """Chen's form without the medium's token, and one inner round too few, both fail."""
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
    assert tokens == pytest.approx(
        (1 - beta ** (n + 1)) / (1 - beta) * (1 - survival**m) / (1 - survival) + survival**m
    )
    c, c_s = 0.2, 0.1
    speed = theory.schedule_speedup(theory.interleaved_tokens, (beta, alpha), (c * c_s, c), m=m, n=n)
    assert speed == pytest.approx(tokens / (1 + m * c + m * n * c * c_s))


@pytest.mark.parametrize("rate", [0.0, 0.35, 1.0])
def test_levels_that_add_nothing_give_back_leviathans_form(rate):
    for tokens, rates, schedule, length in (
        (theory.interleaved_tokens, (0.9, rate), (4, 0), 4),
        (theory.interleaved_tokens, (rate, rate), (2, 3), 8),
        (theory.pre_verified_tokens, (0.5, rate), (4, 0), 4),
        (theory.pre_verified_tokens, (1.0, rate), (2, 3), 8),
    ):
        m, n = schedule
        assert tokens(rates, m=m, n=n) == pytest.approx(theory.expected_tokens(rate, length))


@pytest.mark.parametrize(("rate", "cost"), [*product([0.1, 0.5, 0.8, 0.95], [0.01, 0.1, 0.5])])
def test_the_best_draft_length_beats_its_neighbours_and_drafting_may_not_pay(rate, cost):
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


def test_the_measured_acceptance_rate_is_the_sum_of_minima():
    q, p = ConstantModel((0.7, 0.2, 0.1)), ConstantModel((0.3, 0.4, 0.3))
    assert abs(z_score(p, ModelDrafter(q, FixedLength(1)), 1.6)) < 4


@pytest.mark.parametrize(
    ("of", "values"),
    [
        (theory.expected_tokens, (1.1, 2)),
        (theory.expected_tokens, (math.nan, 2)),
        (theory.expected_tokens, (0.5, -1)),
        (theory.speedup, (0.5, -0.1)),
        (theory.pinsker, (-0.1,)),
        (theory.bretagnolle_huber, (math.nan,)),
    ],
)
def test_what_is_no_rate_length_cost_or_divergence_is_refused(of, values):
    with pytest.raises(ValueError, match="is"):
        of(*values)

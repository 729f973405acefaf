"""The closed forms are what the real loop does under i.i.d. acceptance, and their limits are the known ones.

Monte Carlo here is seeded, so a test that passed passes again; for a fresh seed |z| > 4 has probability 6e-5 per check.
"""

import math
from itertools import product

import pytest
import torch

from evaluation.theory import closed_forms as theory
from lm import acceptance_rate
from tests.evaluation.theory.monte_carlo import (
    acceptance_rounds,
    interleaved_rounds,
    pre_verified_rounds,
    two_level_rounds,
)

NUM_ROUNDS = 300


@pytest.mark.parametrize(("rate", "draft_length"), [(0.0, 3), (0.3, 2), (0.7, 5), (1.0, 4), (0.5, 0)])
def test_leviathans_expected_tokens_are_those_of_the_loop(rate, draft_length):
    measured = two_level_rounds(rate, draft_length, num_rounds=NUM_ROUNDS)
    assert abs(measured.z_score(theory.expected_tokens(rate, draft_length))) < 4


@pytest.mark.parametrize(("m", "n"), [(1, 2), (2, 1), (3, 0)])
@pytest.mark.parametrize("rates", [(0.5, 0.8), (0.9, 0.4)])
def test_chens_expected_tokens_are_those_of_the_loop(rates, m, n):
    measured = interleaved_rounds(rates, m=m, n=n, num_rounds=NUM_ROUNDS)
    assert abs(measured.z_score(theory.interleaved_tokens(*rates, m=m, n=n))) < 4


@pytest.mark.parametrize(("m", "n"), [(1, 2), (2, 1), (3, 0), (4, 5)])
@pytest.mark.parametrize(("alpha", "beta"), [(0.8, 0.5), (0.4, 0.9), (0.75, 0.75), (0.0, 0.3), (0.6, 0.0)])
def test_chens_expected_tokens_are_the_mean_of_his_table_a1_and_his_theorems_hold(alpha, beta, m, n):
    survival = beta**n * alpha
    table = {block * (n + 1) + j + 1: survival**block * beta**j * (1 - beta) for block in range(m) for j in range(n)}
    table |= {(block + 1) * (n + 1): survival**block * beta**n * (1 - alpha) for block in range(m)}
    table[m * (n + 1) + 1] = survival**m
    assert sum(table.values()) == pytest.approx(1.0)
    tokens = theory.interleaved_tokens(beta, alpha, m=m, n=n)
    assert tokens == pytest.approx(sum(count * probability for count, probability in table.items()))
    assert tokens == pytest.approx(
        (1 - beta ** (n + 1)) / (1 - beta) * (1 - survival**m) / (1 - survival) + survival**m
    )
    c, c_s = 0.2, 0.1
    assert theory.interleaved_speedup((beta, alpha), (c * c_s, c), m=m, n=n) == pytest.approx(
        tokens / (1 + m * c + m * n * c * c_s)
    )


def test_chens_special_cases_are_as_printed():
    alpha, beta = 0.8, 0.6
    assert theory.interleaved_tokens(beta, alpha, m=5, n=0) == pytest.approx((1 - alpha**6) / (1 - alpha))
    assert theory.interleaved_tokens(beta, beta, m=1, n=4) == pytest.approx((1 - beta**6) / (1 - beta))
    assert theory.interleaved_tokens(beta, alpha, m=3, n=200) == pytest.approx(1 / (1 - beta))


@pytest.mark.parametrize(("m", "n"), [(1, 2), (2, 3), (3, 0)])
@pytest.mark.parametrize("rates", [(0.5, 0.8), (0.9, 0.4)])
def test_pre_verified_expected_tokens_are_those_of_the_loop(rates, m, n):
    measured = pre_verified_rounds(rates, m=m, n=n, num_rounds=NUM_ROUNDS)
    assert abs(measured.z_score(theory.pre_verified_tokens(*rates, m=m, n=n))) < 4


def test_a_wrong_formula_is_seen_by_the_monte_carlo_check():
    """The tests above have the power to tell: Chen's form without the medium's token, and one inner round too few, both
    fail.
    """
    interleaved = interleaved_rounds((0.5, 0.8), m=2, n=1, num_rounds=NUM_ROUNDS)
    assert abs(interleaved.z_score(theory.expected_tokens(0.5, 2))) > 4
    pre_verified = pre_verified_rounds((0.5, 0.8), m=2, n=4, num_rounds=NUM_ROUNDS)
    assert abs(pre_verified.z_score(theory.pre_verified_tokens(0.5, 0.8, m=1, n=4))) > 4


@pytest.mark.parametrize("rate", [0.0, 0.35, 1.0])
def test_levels_that_add_nothing_give_back_leviathans_form(rate):
    assert theory.interleaved_tokens(0.9, rate, m=4, n=0) == pytest.approx(theory.expected_tokens(rate, 4))
    assert theory.interleaved_tokens(rate, rate, m=2, n=3) == pytest.approx(theory.expected_tokens(rate, 8))
    assert theory.pre_verified_tokens(0.5, rate, m=4, n=0) == pytest.approx(theory.expected_tokens(rate, 4))
    assert theory.pre_verified_tokens(1.0, rate, m=2, n=3) == pytest.approx(theory.expected_tokens(rate, 8))


@pytest.mark.parametrize(("rate", "cost"), [*product([0.1, 0.5, 0.8, 0.95], [0.01, 0.1, 0.5])])
def test_the_best_draft_length_beats_its_neighbours_and_drafting_may_not_pay(rate, cost):
    best = theory.best_draft_length(rate, cost)
    speed = theory.speedup(rate, best, cost)
    assert all(speed >= theory.speedup(rate, other, cost) for other in (max(best - 1, 0), best + 1, 30))
    assert (best == 0) == (rate <= cost)  # Leviathan, Corollary 3.9: there is a gain exactly if a > c


def test_the_length_of_an_inner_round_has_a_generating_function_of_total_mass_one():
    phi = theory.inner_length_generating(0.6, 4)
    assert phi(1.0) == pytest.approx(1.0)
    mean = (phi(1 + 1e-6) - phi(1 - 1e-6)) / 2e-6
    assert mean == pytest.approx(theory.expected_tokens(0.6, 4), rel=1e-6)


def test_svips_bounds_hold_for_every_pair_of_distributions_and_cross_where_they_should():
    generator = torch.Generator().manual_seed(0)
    q, p = (3 * torch.randn(2, 2000, 6, generator=generator, dtype=torch.float64)).softmax(-1)
    divergences = (q * (q / p).log()).sum(-1).clamp(min=0)
    for rate, divergence in zip(acceptance_rate(q, p).tolist(), divergences.tolist(), strict=True):
        assert rate >= theory.pinsker(divergence) - 1e-12
        assert rate >= theory.bretagnolle_huber(divergence) - 1e-12
    assert theory.pinsker(1.5) > theory.bretagnolle_huber(1.5)
    assert theory.pinsker(1.7) < theory.bretagnolle_huber(1.7)


def test_the_measured_acceptance_rate_is_the_sum_of_minima():
    q, p = (0.7, 0.2, 0.1), (0.3, 0.4, 0.3)
    assert abs(acceptance_rounds(q, p, num_rounds=NUM_ROUNDS).z_score(0.6)) < 4


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: theory.expected_tokens(1.1, 2),
        lambda: theory.expected_tokens(math.nan, 2),
        lambda: theory.expected_tokens(0.5, -1),
        lambda: theory.speedup(0.5, 2, -0.1),
        lambda: theory.pinsker(-0.1),
        lambda: theory.bretagnolle_huber(math.nan),
    ],
)
def test_what_is_no_rate_length_cost_or_divergence_is_refused(wrong):
    with pytest.raises(ValueError, match="is"):
        wrong()

"""Sampled sequences follow the target's law: a chi-square test of the loop with its real random numbers.

Enumeration (test_losslessness) proves the loop given independent draws; this sees the draws themselves.

    statistic   sum over outcomes (observed - expected)^2 / expected, outcomes expected under 5 times pooled, from
                NUM_SAMPLES runs
    alarm       when the statistic exceeds the chi-square quantile of FALSE_ALARM: a lossless loop fails with that
                probability per seed (seeds are fixed, so a pass stays a pass)
    power       of a mutant with exact law m: noncentral chi-square, noncentrality NUM_SAMPLES * sum (m - p)^2 / p
"""

from collections import Counter

import pytest
import torch
from scipy.stats import chi2, ncx2

from decode.policies import Entropy, FixedLength
from lm import RandomSampler, Sampling
from tests.decode.mutants import MUTANTS
from tests.toys.enumeration import ToyModel, law_of, seeded
from tests.toys.loop import PROMPT, SAMPLINGS, Law, decoder_of

NUM_SAMPLES = 2000
FALSE_ALARM = 1e-6


def expected_law(sampling: Sampling) -> Law:
    return ToyModel(1).law(PROMPT, 3, sampling=sampling, eos_ids=frozenset({2}))


def statistic(observed: Law, expected: Law) -> tuple[float, int]:
    """The chi-square statistic and its degrees of freedom; impossible outcomes make it infinite."""
    if observed.keys() - expected.keys():
        return float("inf"), 1
    rare = [tokens for tokens, prob in expected.items() if prob * NUM_SAMPLES < 5]
    cells = [[tokens] for tokens in expected if tokens not in rare] + ([rare] if rare else [])
    total = 0.0
    for cell in cells:
        aim = NUM_SAMPLES * sum(expected[tokens] for tokens in cell)
        total += (sum(observed.get(tokens, 0) for tokens in cell) - aim) ** 2 / aim
    return total, len(cells) - 1


def assert_sampled_law(sampling: Sampling, policy=FixedLength(2)) -> None:  # noqa: B008
    """No alarm on NUM_SAMPLES sequences."""
    decoder, generator = decoder_of(policy, sampling=sampling), seeded()
    observed = Counter(decoder.generate(PROMPT, 3, generator=generator).token_ids for _ in range(NUM_SAMPLES))
    value, freedom = statistic(observed, expected_law(sampling))
    assert chi2.sf(value, freedom) > FALSE_ALARM, f"chi-square {value:.1f} with {freedom} degrees of freedom"


def test_sampled_sequences_follow_the_target_law():
    assert_sampled_law(SAMPLINGS["plain"], Entropy(0.3))


@pytest.mark.parametrize("mutant", ["residual_sign", "q_before_warping", "drop_by_value", "accept_by_target_prob"])
def test_the_chi_square_test_has_power_against_mutants(mutant, monkeypatch):
    sampling = SAMPLINGS["top_k"]
    expected = expected_law(sampling)
    monkeypatch.setattr(*MUTANTS[mutant])
    decoder = decoder_of(FixedLength(2), sampling=sampling)
    # without the independent counts that `law` checks: they notice some mutants before the law is known
    mutated = law_of(lambda draws: decoder.generate(PROMPT, 3, generator=draws).token_ids)
    if mutated.keys() - expected.keys():
        seen = sum(mutated[tokens] for tokens in mutated.keys() - expected.keys())
        assert (1 - seen) ** NUM_SAMPLES < 1e-3
        return
    noncentrality, freedom = statistic({tokens: NUM_SAMPLES * prob for tokens, prob in mutated.items()}, expected)
    assert ncx2.sf(chi2.isf(FALSE_ALARM, freedom), freedom, noncentrality) > 0.999


def test_both_streams_of_random_draws_are_uniform_and_independent_and_never_the_impossible():
    draws, probs, table = RandomSampler(seeded()), torch.full((10,), 0.1), torch.zeros(10, 2)
    for _ in range(20000):
        table[draws.token(probs), draws.num_accepted([0.5])] += 1
    assert chi2.sf(((table - 1000) ** 2 / 1000).sum().item(), 19) > FALSE_ALARM
    probs = torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0])
    assert {draws.token(probs) for _ in range(500)} == {1, 3}
    assert {draws.num_accepted([1.0, 0.0]) for _ in range(500)} == {1}

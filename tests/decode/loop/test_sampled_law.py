"""Sampled sequences follow the target's law: a chi-square test of the loop with its real random numbers.

Enumeration (test_losslessness) proves the loop given independent draws; this sees the draws themselves.

    statistic   sum over outcomes (observed - expected)^2 / expected, outcomes expected under 5 times pooled, from
                NUM_SAMPLES runs
    alarm       when the statistic exceeds the chi-square quantile of FALSE_ALARM: a lossless loop fails with that
                probability per seed (seeds are fixed, so a pass stays a pass)
    power       test_mutants has mutants of the draws that raise the alarm
"""

from collections import Counter

import torch
from scipy.stats import chi2, chisquare

from decode.policies import Entropy, FixedLength
from lm import RandomSampler, Sampling
from tests.toys.enumeration import ToyModel, seeded
from tests.toys.loop import PROMPT, SAMPLINGS, decoder_of

NUM_SAMPLES = 2000
FALSE_ALARM = 1e-6


def assert_sampled_law(sampling: Sampling, policy=FixedLength(2)) -> None:  # noqa: B008
    """No alarm on NUM_SAMPLES sequences, and none of them is impossible."""
    decoder, generator = decoder_of(policy, sampling=sampling), seeded()
    observed = Counter(decoder.generate(PROMPT, 3, generator=generator).token_ids for _ in range(NUM_SAMPLES))
    expected = ToyModel(1).law(PROMPT, 3, sampling=sampling, eos_ids=frozenset({2}))
    assert observed.keys() <= expected.keys()
    rare = [tokens for tokens, prob in expected.items() if prob * NUM_SAMPLES < 5]
    cells = [[tokens] for tokens in expected if tokens not in rare] + [rare] * bool(rare)
    aims = [NUM_SAMPLES * sum(expected[tokens] for tokens in cell) for cell in cells]
    nums = [sum(observed[tokens] for tokens in cell) for cell in cells]
    assert chisquare(nums, aims).pvalue > FALSE_ALARM


def test_sampled_sequences_follow_the_target_law():
    assert_sampled_law(SAMPLINGS["plain"], Entropy(0.3))


def test_both_streams_of_random_draws_are_uniform_and_independent_and_never_the_impossible():
    draws, probs, table = RandomSampler(seeded()), torch.full((10,), 0.1), torch.zeros(10, 2)
    for _ in range(20000):
        table[draws.token(probs), draws.num_accepted([0.5])] += 1
    assert chi2.sf(((table - 1000) ** 2 / 1000).sum().item(), 19) > FALSE_ALARM
    probs = torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0])
    assert {draws.token(probs) for _ in range(500)} == {1, 3}
    assert {draws.num_accepted([1.0, 0.0]) for _ in range(500)} == {1}

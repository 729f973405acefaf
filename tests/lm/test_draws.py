"""Streams of uniforms: as many as their seeds have bits, and uniform."""

import pytest
import torch
from scipy.stats import kstest

from lm import RandomSampler
from lm.draws import uniforms
from tests.toys.enumeration import seeded


@pytest.mark.parametrize("bit", [0, 31, 32, 33, 48, 62])
def test_every_bit_of_a_seed_counts(bit):
    other = 5 ^ 1 << bit
    assert not torch.isin(uniforms(5, 100), uniforms(other, 100)).any()
    draws, others = RandomSampler(5), RandomSampler(other)
    assert draws.uniform() != others.uniform()
    probs = torch.arange(1, 100).div(100).tolist()
    assert [draws.num_accepted(probs[::-1]) for _ in range(20)] != [others.num_accepted(probs[::-1]) for _ in range(20)]


@pytest.mark.slow
def test_no_two_streams_of_one_generator_coincide():
    """Of 70,000 seeds of 32 bits two are equal with probability 0.43, as here; of 124 bits with probability 1e-28."""
    generator = seeded(1)
    assert len({RandomSampler(generator).uniform() for _ in range(70_000)}) == 70_000


def test_draws_are_those_of_their_seed_and_those_of_tokens_and_acceptance_differ():
    """A generator of torch on the CPU reads the lower 32 bits of its seed; the limit is that of its `manual_seed`."""
    first, *others = (RandomSampler(seeded(seed)).uniform() for seed in (5, 5 + 2**32, 6))
    assert [other == first for other in others] == [True, False]
    draws, again = RandomSampler(7), RandomSampler(7)
    tokens = [draws.uniform() for _ in range(600)]
    assert tokens == [again.uniform() for _ in range(600)]
    accepted = [draws.num_accepted([uniform]) for uniform, _ in tokens]
    assert 0 < sum(accepted) < 600  # of equal streams none would pass: uniform < uniform is false
    assert accepted == [again.num_accepted([uniform]) for uniform, _ in tokens]


def test_uniforms_are_uniform():
    """Kolmogorov and Smirnov's test at a false-alarm probability of 1e-4, over one stream and over many."""
    assert kstest(uniforms(1, 300, 200).flatten().numpy(), "uniform").pvalue > 1e-4
    assert kstest([float(uniforms(seed, 1)) for seed in range(20_000)], "uniform").pvalue > 1e-4


def test_uniforms_have_53_bits_and_the_shape_asked_for():
    found = uniforms(3, 4, 5, 6)
    assert (found.shape, found.dtype, found.device.type) == ((4, 5, 6), torch.float64, "cpu")
    assert torch.equal(found * 2**53, (found * 2**53).floor())
    assert (found * 2**52 % 1 > 0).any()
    assert ((found >= 0) & (found < 1)).all()
    assert torch.equal(found.flatten(), uniforms(3, 120))

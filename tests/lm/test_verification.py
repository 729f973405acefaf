"""Law 4.2: one verification preserves the target's distribution, exactly, for any q; and the draws that it makes."""

from collections.abc import Iterable

import pytest
import torch
from scipy.stats import kstest

from lm import GreedySampler, RandomSampler, acceptance_prob, acceptance_rate, next_dist, residual_probs, verify
from lm.draws import Sampler, uniforms
from lm.verification import revealed_probs
from tests.toys.enumeration import seeded


class Watching(Sampler):
    """Accepts nothing; keeps the probabilities that it was asked for."""

    def num_accepted(self, acceptance_probs: Iterable[float]) -> int:
        self.seen = list(acceptance_probs)
        return 0


def random_pair(seed: int, vocab: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    q, p = torch.randn(2, vocab, generator=seeded(seed), dtype=torch.float64).mul(2).softmax(-1)
    return q, p


@pytest.mark.parametrize("seed", range(5))
def test_one_verification_preserves_target_distribution(seed):
    """And the acceptance rate is the mean of acceptance_prob, and one minus the total variation."""
    q, p = random_pair(seed)
    accepted = q * acceptance_prob(torch.arange(5), q.expand(5, 5), p.expand(5, 5))
    law = accepted + (1 - accepted.sum()) * residual_probs(q, p)
    torch.testing.assert_close(law, p, rtol=0, atol=1e-15)
    assert float(acceptance_rate(q, p)) == pytest.approx(float(accepted.sum()))
    assert float(acceptance_rate(q, p)) == pytest.approx(float(1 - 0.5 * (p - q).abs().sum()))


def test_degenerate_pairs():
    q, p = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    assert acceptance_prob(torch.tensor([0]), q[None], p[None]).tolist() == [0.0]
    assert acceptance_prob(torch.tensor([1]), q[None], q[None]).tolist() == [0.0]
    assert residual_probs(q, p).tolist() == [0.0, 1.0]
    assert residual_probs(p, p).tolist() == p.tolist()
    assert acceptance_prob(torch.tensor([1]), p[None], p[None]).tolist() == [1.0]


def test_no_draft_is_a_token_of_the_target_and_what_is_not_finite_is_refused():
    assert verify([], [], torch.tensor([[0.0, 1.0, 0.0]]), seeded()) == (0, 1)
    row = torch.tensor([1.0, torch.nan, 0.0])
    assert GreedySampler().draw(row).tolist() == [3]
    for refused in (lambda: verify([], [], row[None], None), lambda: GreedySampler().token(row)):
        with pytest.raises(ValueError, match="not finite"):
            refused()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_greedy_verification_keeps_what_the_target_would_have_said_and_reads_logits(dtype):
    logits = torch.tensor([[0.0, 2.0, -1.0], [3.0, 3.0, 1.0], [-5.0, -6.0, -4.0]], dtype=dtype)
    for tokens, expected in {(): (0, 1), (1, 0): (2, 2), (1, 1): (1, 0), (2, 0): (0, 1)}.items():
        rows = logits[: len(tokens) + 1]
        assert verify(list(tokens), [torch.empty(3)] * len(tokens), rows, GreedySampler()) == expected
    assert GreedySampler().draw(logits[1]).tolist() == [0]


def test_a_narrower_draft_vocabulary_has_probability_zero_beyond_its_end():
    q, p = torch.tensor([0.5, 0.5]), torch.tensor([[0.2, 0.2, 0.6], [0.0, 0.0, 1.0]])
    for count in (0, 1):
        assert next_dist(count, [q], p, Watching()).tolist() == [0.0, 0.0, 1.0]


def test_probabilities_are_looked_at_up_to_the_first_rejection_and_those_that_are_no_numbers_reject():
    nan = torch.tensor([torch.nan, 1.0])
    q, p = torch.tensor([0.25, 0.75]), torch.tensor([[0.5, 0.5], [0.0, 1.0], [torch.nan, 0.5], [0.5, 0.5], [0.5, 0.5]])
    watching = Watching()
    drawn = [q, q, q, nan, torch.tensor([1.0, 0.0])]
    watching.num_accepted(revealed_probs([0, 0, 0, 0, 1], drawn, p, watching))
    assert watching.seen[:2] == [1.0, 0.0]
    assert watching.seen[4] == 1.0
    assert not any(value > 0.0 for value in watching.seen[2:4])


def uniform_of(draws: RandomSampler) -> float:
    """The uniform that would decide the next token."""
    return next(draws._tokens)


@pytest.mark.parametrize("bit", [0, 31, 32, 33, 48, 62])
def test_every_bit_of_a_seed_counts(bit):
    other = 5 ^ 1 << bit
    assert not torch.isin(uniforms(5, 100), uniforms(other, 100)).any()
    draws, others = RandomSampler(5), RandomSampler(other)
    assert uniform_of(draws) != uniform_of(others)
    probs = torch.arange(1, 100).div(100).tolist()
    assert [draws.num_accepted(probs[::-1]) for _ in range(20)] != [others.num_accepted(probs[::-1]) for _ in range(20)]


@pytest.mark.slow
def test_no_two_streams_of_one_generator_coincide():
    """Of 70,000 seeds of 32 bits two are equal with probability 0.43, as here; of 124 bits with probability 1e-28."""
    generator = seeded(1)
    assert len({uniform_of(RandomSampler(generator)) for _ in range(70_000)}) == 70_000


def test_draws_are_those_of_their_seed_and_those_of_tokens_and_acceptance_differ():
    """A generator of torch on the CPU reads the lower 32 bits of its seed; the limit is that of its `manual_seed`."""
    first, *others = (uniform_of(RandomSampler(seeded(seed))) for seed in (5, 5 + 2**32, 6))
    assert [other == first for other in others] == [True, False]
    draws, again = RandomSampler(7), RandomSampler(7)
    tokens = [uniform_of(draws) for _ in range(600)]
    assert tokens == [uniform_of(again) for _ in range(600)]
    accepted = [draws.num_accepted([uniform]) for uniform in tokens]
    assert 0 < sum(accepted) < 600  # of equal streams none would pass: uniform < uniform is false
    assert accepted == [again.num_accepted([uniform]) for uniform in tokens]


def test_uniforms_are_uniform_and_have_53_bits_and_the_shape_asked_for():
    """Kolmogorov and Smirnov's test at a false-alarm probability of 1e-4, over one stream and over many."""
    assert kstest(uniforms(1, 300, 200).flatten().numpy(), "uniform").pvalue > 1e-4
    assert kstest([float(uniforms(seed, 1)) for seed in range(20_000)], "uniform").pvalue > 1e-4
    found = uniforms(3, 4, 5, 6)
    assert (found.shape, found.dtype, found.device.type) == ((4, 5, 6), torch.float64, "cpu")
    assert torch.equal(found * 2**53, (found * 2**53).floor())
    assert (found * 2**52 % 1 > 0).any()
    assert ((found >= 0) & (found < 1)).all()
    assert torch.equal(found.flatten(), uniforms(3, 120))

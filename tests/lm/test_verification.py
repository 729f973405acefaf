"""Law 4.2: one verification preserves the target's distribution, exactly, for any q."""

from collections.abc import Iterable

import pytest
import torch

from lm import acceptance_prob, acceptance_rate, residual_probs, verify


class Scripted:
    """Accepts as told; draws the most probable token."""

    def __init__(self, accepted: int) -> None:
        self.accepted, self.asked = accepted, []

    def token(self, probs: torch.Tensor) -> int:
        self.asked.append(probs)
        return int(probs.argmax())

    def draw(self, probs: torch.Tensor) -> torch.Tensor:
        return torch.tensor([self.token(probs)])

    def num_accepted(self, acceptance_probs: Iterable[float]) -> int:
        return self.accepted


def random_pair(seed: int, vocab: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, p = torch.randn(2, vocab, generator=generator, dtype=torch.float64).mul(2).softmax(-1)
    return q, p


@pytest.mark.parametrize("seed", range(5))
def test_one_verification_preserves_target_distribution(seed):
    q, p = random_pair(seed)
    tokens = torch.arange(5)
    accepted = q * acceptance_prob(tokens, q.expand(5, 5), p.expand(5, 5))
    law = accepted + (1 - accepted.sum()) * residual_probs(q, p)
    torch.testing.assert_close(law, p, rtol=0, atol=1e-15)


@pytest.mark.parametrize("seed", range(3))
def test_acceptance_rate_is_the_mean_of_acceptance_prob_and_one_minus_total_variation(seed):
    q, p = random_pair(seed)
    mean = (q * acceptance_prob(torch.arange(5), q.expand(5, 5), p.expand(5, 5))).sum()
    assert float(acceptance_rate(q, p)) == pytest.approx(float(mean))
    assert float(acceptance_rate(q, p)) == pytest.approx(float(1 - 0.5 * (p - q).abs().sum()))


def test_degenerate_pairs():
    q, p = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    assert acceptance_prob(torch.tensor([0]), q[None], p[None]).tolist() == [0.0]
    assert acceptance_prob(torch.tensor([1]), q[None], q[None]).tolist() == [0.0]
    assert residual_probs(q, p).tolist() == [0.0, 1.0]
    assert residual_probs(p, p).tolist() == p.tolist()
    assert acceptance_prob(torch.tensor([1]), p[None], p[None]).tolist() == [1.0]


def test_a_rejection_asks_the_residual_of_its_own_position_and_full_acceptance_the_last_row():
    q = torch.stack([random_pair(seed)[0] for seed in range(3)])
    p = torch.stack([random_pair(seed)[1] for seed in range(4)])
    for accepted in range(4):
        draws = Scripted(accepted)
        verdict = verify([0, 1, 2], list(q), p, draws)
        expected = p[3] if accepted == 3 else residual_probs(q[accepted], p[accepted])
        assert verdict.num_accepted == accepted
        torch.testing.assert_close(draws.asked[0], expected)


def test_no_draft_is_a_token_of_the_target():
    p = torch.tensor([[0.0, 1.0, 0.0]])
    assert verify([], [], p, torch.Generator().manual_seed(0)) == (0, 1)


def test_a_distribution_that_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="not finite"):
        verify([], [], torch.tensor([[torch.nan, 0.0]]), None)

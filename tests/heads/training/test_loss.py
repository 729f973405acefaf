"""Law 4.7: the weighted loss and its population optimum."""

import math

import pytest
import torch

from heads.training.loss import Targets, weighted_bce


def test_loss_is_the_formula_of_law_4_7():
    logit, prob = torch.randn(3, 7), torch.rand(7)
    accept, reject = torch.tensor([1.0, 2.0, 1.0]), torch.tensor([1.0, 3.0, 12.0])
    for head in range(3):
        a, r = accept[head], reject[head]
        numerator = (
            a * prob * -logit[head].sigmoid().log() + r * (1 - prob) * -(1 - logit[head].sigmoid()).log()
        ).sum()
        expected = numerator / (a * prob + r * (1 - prob)).sum()
        assert float(weighted_bce(logit, Targets.of(prob, accept, reject))[head]) == pytest.approx(
            float(expected), rel=1e-5
        )


@pytest.mark.parametrize("prob", [0.05, 0.5, 0.8, 0.99])
@pytest.mark.parametrize(("accept", "reject"), [(1.0, 1.0), (1.0, 6.0), (2.0, 12.0)])
def test_population_optimum_is_logit_minus_log_of_the_weights(prob: float, accept: float, reject: float):
    logit = torch.zeros(1, 1, dtype=torch.float32, requires_grad=True)
    optimizer = torch.optim.LBFGS([logit], max_iter=200, line_search_fn="strong_wolfe", tolerance_grad=1e-10)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = weighted_bce(
            logit, Targets.of(torch.tensor([prob]), torch.tensor([accept]), torch.tensor([reject]))
        ).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert float(logit.detach()) == pytest.approx(math.log(prob / (1 - prob)) - math.log(reject / accept), abs=2e-3)


def test_reject_weight_six_says_0_4_where_0_8_is_true():
    assert 1 / (1 + math.exp(-(math.log(0.8 / 0.2) - math.log(6)))) == pytest.approx(0.4)


def test_a_given_mass_replaces_the_denominator():
    logit, prob, ones = torch.randn(1, 7), torch.rand(7), torch.ones(1)
    targets = Targets.of(prob, ones, 3 * ones)
    torch.testing.assert_close(
        weighted_bce(logit, targets._replace(mass=2 * targets.mass)), weighted_bce(logit, targets) / 2
    )

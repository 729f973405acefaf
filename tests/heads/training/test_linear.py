"""The optimum of linear heads: that of an independent solver, finite on any data, from sums alone."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from heads.training.linear import MAX_PASSES, RIDGES, Curvature, LinearFit
from heads.training.loss import Targets

REJECT_WEIGHTS = (1.0, 6.0)


def same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def targets_of(prob: torch.Tensor) -> Targets:
    return Targets.of(prob, torch.tensor(REJECT_WEIGHTS))


def parts(columns: torch.Tensor, prob: torch.Tensor, size: int) -> Iterator[tuple[torch.Tensor, Targets]]:
    return zip(columns.split(size), map(targets_of, prob.split(size)), strict=True)


def fitted(
    columns: torch.Tensor, prob: torch.Tensor, *, size: int = 100, has_curvature: bool = True
) -> tuple[LinearFit, int]:
    """The fit of both heads from 0, and its passes."""
    start = torch.zeros(2, columns.shape[1], dtype=torch.float64)
    curvature = Curvature(start)
    for part in parts(columns, prob, size):
        curvature.observe(*part)
    fit = LinearFit(start, curvature.compute(same) if has_curvature else None)
    for number in range(MAX_PASSES):
        for part in parts(columns, prob, size):
            fit.observe(*part)
        fit.advance(same)
        if fit.is_done:
            return fit, number + 1
    raise AssertionError(f"no optimum after {MAX_PASSES} passes")


def reference(columns: torch.Tensor, prob: torch.Tensor, *, reject_weight: float, ridge: float) -> np.ndarray:
    """The optimum by scipy, from the formula of law 4.7."""
    x, p = columns.numpy(), prob.double().numpy()
    mass = (p + reject_weight * (1 - p)).sum()

    def loss(weights: np.ndarray) -> tuple[float, np.ndarray]:
        logit = x @ weights
        value = (p * np.logaddexp(0, -logit) + reject_weight * (1 - p) * np.logaddexp(0, logit)).sum() / mass
        yes = 1 / (1 + np.exp(-logit))
        gradient = (reject_weight * (1 - p) * yes - p * (1 - yes)) @ x / mass
        return value + ridge / 2 * weights @ weights, gradient + ridge * weights

    result = minimize(loss, np.zeros(x.shape[1]), jac=True, method="BFGS", options={"gtol": 1e-10, "maxiter": 2000})
    return np.asarray(result.x)


def tokens(count: int = 600) -> tuple[torch.Tensor, torch.Tensor]:
    """Correlated columns, and labels that depend on them."""
    generator = torch.Generator().manual_seed(3)
    columns = torch.randn(count, 6, generator=generator, dtype=torch.float64)
    columns[:, 1] += 3 * columns[:, 0]
    logit = columns @ torch.tensor([1.0, -2.0, 0.5, 0.0, 1.0, -1.0], dtype=torch.float64)
    return columns, (logit + torch.randn(count, generator=generator)).sigmoid().float()


@pytest.mark.parametrize("has_curvature", [True, False])
def test_a_fit_is_the_optimum_of_law_4_7_for_every_reject_weight_and_ridge(has_curvature: bool):
    columns, prob = tokens()
    fit, num_passes = fitted(columns, prob, has_curvature=has_curvature)
    assert num_passes < (20 if has_curvature else 60)
    for head, reject_weight in enumerate(REJECT_WEIGHTS):
        for index, ridge in enumerate(RIDGES):
            expected = reference(columns, prob, reject_weight=reject_weight, ridge=ridge)
            np.testing.assert_allclose(fit.weights[head, index].numpy(), expected, atol=5e-3)


def test_the_size_of_a_chunk_changes_only_rounding_and_a_fit_keeps_no_token():
    columns, prob = tokens()
    weights = []
    for size in (7, 600):
        fit, _ = fitted(columns, prob, size=size)
        weights.append(fit.weights)
        held = [value for value in vars(fit).values() if isinstance(value, torch.Tensor)]
        assert max(value.numel() for value in held) == fit.weights.numel() == 2 * len(RIDGES) * 6
    torch.testing.assert_close(weights[0], weights[1], atol=1e-7, rtol=0)


def test_separable_labels_and_equal_or_constant_columns_have_a_finite_optimum():
    """No ridge, no optimum: separable labels push weights to infinity, equal columns leave them open."""
    columns, _ = tokens()
    columns = torch.cat([columns, columns[:, :1], torch.zeros(len(columns), 1)], -1)
    prob = (columns[:, 0] > 0).float()
    fit, _ = fitted(columns, prob)
    assert fit.weights.isfinite().all()
    assert fit.weights.abs().max() < 100
    torch.testing.assert_close(fit.weights[..., 0], fit.weights[..., 6], atol=1e-6, rtol=1e-4)
    assert not fit.weights[..., 7].any()
    assert min(RIDGES) > 0


def test_a_strong_ridge_keeps_the_start():
    columns, prob = tokens()
    start = torch.randn(2, 6, dtype=torch.float64)
    fit = LinearFit(start)
    for _ in range(MAX_PASSES):
        fit.observe(columns, targets_of(prob))
        fit.advance(same)
    distance = (fit.weights - start[:, None]).norm(dim=-1)
    assert (distance.diff(dim=-1) < 0).all()

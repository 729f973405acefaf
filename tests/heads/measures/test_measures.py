"""Metrics from a histogram equal direct formulas on all tokens; calibration finds the minimum that a general optimiser
finds.
"""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torchmetrics.classification import BinaryAUROC

from heads.measures.evaluation import LogitHistogram
from heads.measures.histogram import observe
from heads.measures.scores import (
    auroc,
    fit_logistic,
    fit_temperature,
    measures,
    reliability,
    sequential_temperatures,
)


@pytest.fixture
def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    """[heads, tokens] logits and [tokens] labels that go with them."""
    generator = torch.Generator().manual_seed(0)
    logit = torch.randn(3, 4000, generator=generator) * torch.tensor([[0.5], [2.0], [5.0]])
    noise = torch.randn(4000, generator=generator)
    return logit, (0.7 * logit[1] + noise + 0.5).sigmoid()


def direct(logit: np.ndarray, p: np.ndarray) -> dict[str, float]:
    q = 1 / (1 + np.exp(-logit))
    bce = np.mean(-p * np.log(q) - (1 - p) * np.log1p(-q))
    kl = np.mean(p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q)))
    bins = np.minimum((q * 15).astype(int), 14)
    ece = sum(abs(q[bins == b].sum() - p[bins == b].sum()) for b in range(15)) / len(p)
    return {"kl": kl, "bce": bce, "brier": np.mean((q - p) ** 2), "ece": ece}


def test_metrics_equal_their_formulas(tokens):
    logit, prob = tokens
    result = measures(observe(logit, prob[None]))
    for head in range(3):
        expected = direct(logit[head].double().numpy(), prob.double().numpy())
        for name in ("kl", "bce", "brier"):
            assert float(getattr(result, name)[head]) == pytest.approx(expected[name], abs=2e-5), name
        assert float(result.ece[head]) == pytest.approx(expected["ece"], abs=2e-3)


def test_kl_is_cross_entropy_minus_label_entropy(tokens):
    logit, prob = tokens
    histogram = observe(logit, prob[None])
    result = measures(histogram)
    torch.testing.assert_close(result.bce - result.kl, histogram.entropy / histogram.total)
    assert (result.kl < result.bce).all()
    assert (result.kl >= 0).all()
    truth = measures(observe(prob.double().logit()[None], prob[None]))
    assert float(truth.kl[0]) == pytest.approx(0, abs=1e-5)


def test_auroc_counts_each_token_as_accepted_and_rejected_by_its_label(tokens):
    logit, prob = tokens[0][:, :600].double(), tokens[1][:600].double()
    result = auroc(observe(logit, prob[None]))
    for head in range(3):
        z = logit[head]
        wins = (z[:, None] > z[None]).double() + 0.5 * (z[:, None] == z[None])
        pairs = prob[:, None] * (1 - prob)[None]
        assert float(result[head]) == pytest.approx(float((pairs * wins).sum() / pairs.sum()), abs=2e-3)


def test_auroc_of_hard_labels_is_torchmetrics(tokens):
    logit, prob = tokens
    hard = (prob > 0.5).double()
    for head in range(3):
        expected = BinaryAUROC()(logit[head], hard.long())
        assert float(auroc(observe(logit, hard[None]))[head]) == pytest.approx(float(expected), abs=2e-3)


def test_weights_count_as_repeated_tokens(tokens):
    logit, prob = tokens[0][:1, :50], tokens[1][:50]
    times = torch.arange(50) % 4
    weighted = observe(logit, prob[None], times.double()[None])
    repeated = observe(logit.repeat_interleave(times, 1), prob.repeat_interleave(times)[None])
    torch.testing.assert_close(measures(weighted), measures(repeated))
    torch.testing.assert_close(auroc(weighted), auroc(repeated))


def test_batches_add_up_to_the_whole(tokens):
    logit, prob = tokens
    metric = LogitHistogram(3)
    for part in range(0, 4000, 700):
        metric.update(observe(logit[:, part : part + 700], prob[None, part : part + 700]))
    for ours, whole in zip(metric.compute(), observe(logit, prob[None]), strict=True):
        torch.testing.assert_close(ours, whole)


def test_temperature_minimises_cross_entropy(tokens):
    logit, prob = tokens
    shift = torch.tensor([0.0, 1.0, 2.0])
    result = fit_temperature(observe(logit, prob[None]), shift)
    z, p = (logit[1] + shift[1]).double().numpy(), prob.double().numpy()
    best = minimize(lambda s: np.mean(np.logaddexp(0, s * z) - p * s * z), x0=[1.0]).x[0]
    assert 1 / float(result[1]) == pytest.approx(best, abs=2e-3)


def test_a_signal_alone_gets_its_best_logistic_regression(tokens):
    signal, prob = tokens[0][1:] - 3, tokens[1]
    slope, offset = fit_logistic(observe(signal, prob[None]))
    for row in range(2):
        z, p = signal[row].double().numpy(), prob.double().numpy()
        best = minimize(
            lambda ab, z=z, p=p: np.mean(np.logaddexp(0, ab[0] * z + ab[1]) - p * (ab[0] * z + ab[1])), x0=[0.5, 0.0]
        ).x
        assert (float(slope[row]), float(offset[row])) == pytest.approx(tuple(best), abs=5e-3)


def test_a_temperature_of_each_position_undoes_what_its_confidences_are_off_by():
    """By factors on the grid of 41 temperatures; the first position is right as it is."""
    true = torch.randn(3000, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 1
    factors = 10.0 ** torch.tensor([0.0, 0.25, -0.5], dtype=torch.float64)
    fitted = sequential_temperatures(true * factors, true.sigmoid().cumprod(1))
    assert fitted["temperatures"] == pytest.approx(factors.tolist(), rel=1e-6)
    assert fitted["ece_after"] == pytest.approx([0, 0, 0], abs=2e-3)
    assert fitted["ece_before"][0] == pytest.approx(0, abs=2e-3)
    assert min(fitted["ece_before"][1:]) > 0.02


def test_reliability_of_a_true_prediction_is_the_diagonal(tokens):
    prob = tokens[1]
    bins = reliability(observe(prob.double().logit()[None], prob[None]))
    torch.testing.assert_close(bins.predicted, bins.true, atol=1e-4, rtol=0)
    assert float(bins.share.sum()) == pytest.approx(1)

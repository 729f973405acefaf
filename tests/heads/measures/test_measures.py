"""Metrics from a histogram equal direct formulas; calibration finds the minimum; the sentence compares heads."""

from itertools import accumulate

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torchmetrics.classification import BinaryAUROC

from heads.grid import HeadSpec, specs
from heads.measures.histogram import by_position, observe
from heads.measures.report import beats_signal, verdict
from heads.measures.scores import auroc, fit_logistic, fit_temperature, measures, reliability, sequential_temperatures
from heads.measures.sums import Sums
from tests.toys.made_up import make_config


@pytest.fixture
def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logit = torch.randn(3, 4000, generator=generator) * torch.tensor([[0.5], [2.0], [5.0]])
    noise = torch.randn(4000, generator=generator)
    return logit, (0.7 * logit[1] + noise + 0.5).sigmoid()


def test_metrics_equal_their_formulas(tokens):
    logit, prob = tokens
    result, p = measures(observe(logit, prob[None])), prob.double().numpy()
    for head in range(3):
        q = 1 / (1 + np.exp(-logit[head].double().numpy()))
        bins = np.minimum((q * 15).astype(int), 14)
        expected = {
            "kl": np.mean(p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))),
            "bce": np.mean(-p * np.log(q) - (1 - p) * np.log1p(-q)),
            "brier": np.mean((q - p) ** 2),
            "ece": sum(abs(q[bins == b].sum() - p[bins == b].sum()) for b in range(15)) / len(p),
        }
        for name, value in expected.items():
            tolerance = 2e-3 if name == "ece" else 2e-5
            assert float(getattr(result, name)[head]) == pytest.approx(value, abs=tolerance), name


def test_kl_is_cross_entropy_minus_label_entropy(tokens):
    logit, prob = tokens
    histogram = observe(logit, prob[None])
    result = measures(histogram)
    torch.testing.assert_close(result.bce - result.kl, histogram.entropy / histogram.total)
    assert (result.kl < result.bce).all()
    assert (result.kl >= 0).all()
    truth = observe(prob.double().logit()[None], prob[None])
    assert float(measures(truth).kl[0]) == pytest.approx(0, abs=1e-5)
    bins = reliability(truth)  # of a true prediction it is the diagonal
    torch.testing.assert_close(bins["predicted"], bins["true"], atol=1e-4, rtol=0)
    assert float(bins["share"].sum()) == pytest.approx(1)


def test_auroc_counts_each_token_as_accepted_and_rejected_by_its_label(tokens):
    logit, prob = tokens[0].double(), tokens[1].double()
    hard = (prob > 0.5).double()
    result, of_hard = auroc(observe(logit[:, :600], prob[None, :600])), auroc(observe(logit, hard[None]))
    for head in range(3):
        z, p = logit[head, :600], prob[:600]
        wins = (z[:, None] > z[None]).double() + 0.5 * (z[:, None] == z[None])
        pairs = p[:, None] * (1 - p)[None]
        assert float(result[head]) == pytest.approx(float((pairs * wins).sum() / pairs.sum()), abs=2e-3)
        assert float(of_hard[head]) == pytest.approx(float(BinaryAUROC()(logit[head], hard.long())), abs=2e-3)


def test_weights_count_as_repeated_tokens_and_batches_add_up_to_the_whole(tokens):
    logit, prob = tokens
    times = torch.arange(4000) % 4
    weighted = observe(logit, prob[None], times.double()[None])
    repeated = observe(logit.repeat_interleave(times, 1), prob.repeat_interleave(times)[None])
    torch.testing.assert_close(measures(weighted), measures(repeated))
    torch.testing.assert_close(auroc(weighted), auroc(repeated))
    sums = Sums(3, logit.device)
    for part in range(0, 4000, 700):
        sums.update(observe(logit[:, part : part + 700], prob[None, part : part + 700]))
    for ours, whole in zip(sums.compute(), observe(logit, prob[None]), strict=True):
        torch.testing.assert_close(ours, whole)


def test_a_temperature_and_the_logistic_regression_of_a_signal_minimise_cross_entropy(tokens):
    logit, prob = tokens
    p, shift = prob.double().numpy(), torch.tensor([0.0, 1.0, 2.0])

    def best(z: np.ndarray, start: list[float]) -> np.ndarray:
        """Slope, and offset if there is one."""
        return minimize(lambda ab: np.mean(np.logaddexp(0, f := ab[0] * z + ab[1:].sum()) - p * f), x0=start).x

    temperature = fit_temperature(observe(logit, prob[None]), shift)[1]
    expected = best((logit[1] + shift[1]).double().numpy(), [1.0])
    assert 1 / float(temperature) == pytest.approx(expected[0], abs=2e-3)
    signal = logit[1:] - 3
    slope, offset = fit_logistic(observe(signal, prob[None]))
    for row in range(2):
        expected = best(signal[row].double().numpy(), [0.5, 0.0])
        assert (float(slope[row]), float(offset[row])) == pytest.approx(tuple(expected), abs=5e-3)


def test_a_temperature_of_each_position_undoes_what_its_confidences_are_off_by():
    """By factors on the grid of 41 temperatures; the first position is right as it is."""
    true = torch.randn(3000, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 1
    factors = 10.0 ** torch.tensor([0.0, 0.25, -0.5], dtype=torch.float64)
    fitted = sequential_temperatures(true * factors, true.sigmoid().cumprod(1))
    assert fitted["temperatures"] == pytest.approx(factors.tolist(), rel=1e-6)
    assert fitted["ece_after"] == pytest.approx([0, 0, 0], abs=2e-3)
    assert fitted["ece_before"][0] == pytest.approx(0, abs=2e-3)
    assert min(fitted["ece_before"][1:]) > 0.02


LENGTHS = [6, 1, 9]


@pytest.mark.parametrize("is_draft", [False, True])
def test_histograms_by_position_are_those_of_all_drafts(is_draft):
    """Drafts from every position of a row, or rows that are one draft each, with their own labels; against loops."""
    logit, prob, label = torch.randn(2, 16), torch.rand(16), torch.rand(2, 16) if is_draft else None
    lengths = {"row_lengths": torch.tensor(LENGTHS), "num_positions": 5}
    parts = by_position(logit, prob, **lengths, label=label, is_draft=is_draft)
    hat, truth = logit.double().sigmoid(), prob.double()
    spans = [range(end - length, end) for end, length in zip(accumulate(LENGTHS), LENGTHS, strict=True)]
    for k in range(5):
        starts = [s for span in spans for s in (span[:1] if is_draft else span) if s + k < span.stop]
        at = [start + k for start in starts]
        reach = torch.stack([truth[s : s + k].prod() for s in starts])
        token = observe(logit[:, at], prob[at][None] if label is None else label[:, at], reach[None])
        predicted = torch.stack([hat[:, s : s + k + 1].prod(1) for s in starts], 1)
        survival = observe(predicted.logit(), torch.stack([truth[s : s + k + 1].prod() for s in starts])[None])
        for part, expected in zip(parts, (token, survival), strict=True):
            for name in part._fields:
                ours, whole = getattr(part, name)[k::5], getattr(expected, name)
                sums = (ours.sum(-1), whole.sum(-1)) if ours.dim() > 1 else (ours, whole)
                torch.testing.assert_close(*sums, rtol=1e-6, atol=1e-6)


def result_of(kl: dict[str, float], sweep: list[HeadSpec]) -> dict:
    """Made-up measurements: a head's KL by its timing; 0.4 for logit q(y), 0.2 for logit max q, 0.5 for a constant."""
    of_heads = {str(spec): kl[spec.shape.timing] + 0.01 * spec.shape.depth for spec in sweep}
    heads = {name: {"calibrated_kl": value, "auroc": 0.7} for name, value in of_heads.items()}
    signals = {}
    for timing in kl:
        scalar, of_signal = ("logit_max_prob", 0.2) if timing == "prefix" else ("logit_token_prob", 0.4)
        signals[timing] = {scalar: {"calibrated_kl": of_signal, "auroc": 0.6}}
    return {"heads": heads, "signals": signals, "labels": {key: {"constant_kl": 0.5} for key in kl}}


def test_each_head_is_compared_with_the_signal_of_its_own_timing(tmp_path):
    def sweep(*timings: str) -> list[HeadSpec]:
        return specs(make_config(tmp_path, tmp_path, timings=timings, scalars=(True,), reject_weights=(1.0,)).heads)

    heads = sweep("fed", "drawn")
    result = result_of({"fed": 0.44, "drawn": 0.385}, heads)
    fed, drawn, warning = verdict(result, heads).splitlines()
    own = "Best fed-time head on dev: fed+s-d0-w1 with KL 0.440 nats per token and AUROC 0.700, "
    assert fed.startswith(f"{own}10% more KL than logit q(y) alone (KL 0.400")
    assert "4% less KL than logit q(y) alone" in drawn
    assert warning.startswith(
        "Warning: no fed-time head beats logit q(y) alone, which takes two numbers. Do not decode"
    )
    beats = beats_signal(result, heads)
    assert beats == {"fed+s-d0-w1": False, "fed+s-d2-w1": False, "drawn+s-d0-w1": True, "drawn+s-d2-w1": False}
    assert "Warning" not in verdict(result_of({"fed": 0.3, "drawn": 0.3}, heads), heads)
    heads = sweep("drawn")
    _, last = verdict(result_of({"drawn": 0.41}, heads), heads).splitlines()
    assert last.startswith("No head beats the draft's own")
    heads = sweep("drawn", "prefix")  # 0.25 would beat logit q(y), which predicts another label
    result = result_of({"drawn": 0.3, "prefix": 0.25}, heads)
    assert beats_signal(result, heads) == {str(spec): spec.shape.timing == "drawn" for spec in heads}
    assert "Best prefix head on dev: prefix" in verdict(result, heads)
    assert "logit max q alone (KL 0.200" in verdict(result, heads)

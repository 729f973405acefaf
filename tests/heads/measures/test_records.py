"""The shipped records show what heads know beyond the draft's own signal."""

from pathlib import Path

import pytest

from benchmarks.signals import kl_beside_signal
from benchmarks.thresholds import experiment_of, splits_of

ROOT = Path(__file__).parents[3]


def test_a_logistic_of_logit_q_is_a_stronger_signal_than_one_of_log_q_and_a_linear_head_beats_it():
    """On 280 prompts that no head was trained on."""
    kl = kl_beside_signal(ROOT / "checkpoints/coder")
    for name, expected in (("log q(y)", 0.2253), ("logit q(y)", 0.1876), ("H(q)", 0.1208), ("logit max q", 0.0813)):
        assert kl[name][0] == pytest.approx(expected, abs=0.003)
    assert {name for name, (head, signal) in kl.items() if head > signal} == {"log q(y)", "H(q)"}
    assert kl["drawn+s+e-d0-w1"][0] == pytest.approx(0.1813, abs=0.003)


def test_a_linear_head_fitted_to_its_optimum_leads_the_product_as_much_raw_as_calibrated():
    splits = splits_of(experiment_of(ROOT / "checkpoints/coder"), [10.0])[10.0]
    leads = [splits.lead(f"drawn+s+e-d0-w1 {word}", "cumulative_token_prob").mean() for word in ("raw", "calibrated")]
    assert leads == pytest.approx([0.0064, 0.0055], abs=0.002)

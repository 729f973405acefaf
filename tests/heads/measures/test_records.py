"""The shipped records show what heads know beyond the draft's own signal."""

from pathlib import Path

import pytest

from benchmarks.signals import kl_beside_signal
from benchmarks.thresholds import experiment_of, splits_of

ROOT = Path(__file__).parents[3]


def test_a_logistic_of_logit_q_is_a_stronger_signal_than_one_of_log_q_on_the_shipped_record():
    """Measured independently of this project's histograms: .2486 and .2082; .1317 and .0921 before the draw."""
    kl = kl_beside_signal(ROOT / "checkpoints/coder")
    for name, expected in (("log q(y)", 0.2486), ("logit q(y)", 0.2082), ("H(q)", 0.1317), ("logit max q", 0.0921)):
        assert kl[name][0] == pytest.approx(expected, abs=0.003)
    assert {name for name, (head, signal) in kl.items() if head > signal} == {"log q(y)", "H(q)", "fed-d0-w1"}
    assert kl["drawn+s+n-d1-w6"][0] == pytest.approx(0.2028, abs=0.003)


def test_a_calibrated_threshold_leads_the_product_by_more_than_a_raw_one_on_the_shipped_record():
    """As many splits of the same record gave +.4 and +1.1 % in another implementation."""
    splits = splits_of(experiment_of(ROOT / "checkpoints/coder"), [10.0])[10.0]
    leads = [splits.lead(f"drawn+s+n-d1-w6 {word}", "cumulative_token_prob").mean() for word in ("raw", "calibrated")]
    assert leads == pytest.approx([0.004, 0.011], abs=0.002)

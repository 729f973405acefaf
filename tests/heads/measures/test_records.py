"""The shipped records show what heads know beyond the draft's own signal."""

from pathlib import Path

import pytest

from benchmarks.signals import kl_beside_signal

ROOT = Path(__file__).parents[3]


def test_a_logistic_of_logit_q_is_a_stronger_signal_than_one_of_log_q_on_the_shipped_record():
    """Measured independently of this project's histograms: .2486 and .2082; .1317 and .0921 before the draw."""
    kl = kl_beside_signal(ROOT / "checkpoints/coder")
    for name, expected in (("log q(y)", 0.2486), ("logit q(y)", 0.2082), ("H(q)", 0.1317), ("logit max q", 0.0921)):
        assert kl[name][0] == pytest.approx(expected, abs=0.003)
    assert {name for name, (head, signal) in kl.items() if head > signal} == {"log q(y)", "H(q)", "fed-d0-w1"}
    assert kl["drawn+s+n-d1-w6"][0] == pytest.approx(0.2028, abs=0.003)

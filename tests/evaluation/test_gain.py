"""Gains have paired intervals of test prompts, and none of a few; tables print them."""

import json
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import bootstrap, norm, sem, t

from evaluation.gain import (
    MIN_PROMPTS,
    NUM_RESAMPLES,
    Gain,
    Throughput,
    conclusion,
    gain_of_turns,
    gain_over,
    prompts_needed,
    shortage,
)
from evaluation.table import Table, crossed, flat, printing, shown
from evaluation.times import TimeErrors
from tests.toys.times import times_by_length


@pytest.mark.parametrize("num", [10, 60])
def test_the_interval_is_that_of_scipys_bootstrap_widened_for_few_prompts(num):
    generator = np.random.default_rng(9)
    base, own = (Throughput(np.full(num, 10), generator.gamma(20.0, mean / 20.0, size=num) + 1) for mean in (2.0, 1.8))

    def statistic(base_s, own_s, axis):
        return base_s.sum(axis) / own_s.sum(axis) - 1

    settings = {"paired": True, "n_resamples": NUM_RESAMPLES, "rng": np.random.default_rng(0)}
    reference = bootstrap((base.seconds, own.seconds), statistic, **settings)
    gain = gain_over(base, own)
    totals = [base.tokens, base.seconds, own.tokens, own.seconds]
    weights = np.mean([part / part.sum() for part in totals], axis=0)
    effective = 1 / (weights**2).sum()
    factor = t.ppf(0.975, effective - 1) / norm.ppf(0.975) * np.sqrt(effective / (effective - 1))
    low, high = (gain.value + factor * (end - gain.value) for end in reference.confidence_interval)
    assert gain[1:4] == pytest.approx((low, high, reference.standard_error), rel=1e-9)
    for faster in (1.0, 1.25):  # every prompt gains alike
        tokens = np.arange(7, 7 + num)
        seconds = tokens**1.5
        gain = gain_over(Throughput(tokens, seconds), Throughput(tokens, seconds / faster))
        assert gain == pytest.approx((faster - 1, faster - 1, faster - 1, 0.0, 0.0), abs=1e-12)


@pytest.mark.parametrize("num", [1, 2, MIN_PROMPTS - 1])
def test_few_prompts_have_a_gain_without_an_interval_and_nothing_is_above_noise(num):
    tokens, seconds = np.full(num, 10), np.arange(1.0, num + 1)
    gain = gain_over(Throughput(tokens, seconds), Throughput(tokens, seconds**0.9 / 3))
    assert (gain.low, gain.high, gain.is_above_noise, gain.is_below_noise) == (None, None, False, False)
    assert gain.value > 1
    assert (gain.standard_error is None) == (num == 1)
    assert gain.text == f"{gain.value:+.1%}"
    assert gain.words == f"{100 * gain.value:+.1f} %"
    assert json.loads(json.dumps(gain.speed(2.0)._asdict(), allow_nan=False))["low"] is None


@pytest.mark.parametrize("faster", [1.04, 1.02, 0.98])
def test_as_many_prompts_as_are_needed_have_an_interval_without_0_if_the_gain_stays(faster):
    """Copies of the same prompts keep gain and deviation."""
    generator = np.random.default_rng(0)
    tokens, seconds = np.full(12, 10), generator.gamma(20.0, 0.05, size=12)
    noisy = seconds * generator.gamma(60.0, 1 / 60.0, size=12)
    base, own = Throughput(tokens, seconds), Throughput(tokens, noisy * seconds.sum() / noisy.sum() / faster)
    needed = prompts_needed(gain_over(base, own), 12)
    few, enough = (np.resize(np.arange(12), round(share * needed / 12) * 12) for share in (0.7, 1.4))
    for copies, is_settled in ((few, False), (enough, True)):
        gain = gain_over(base.at(copies), own.at(copies))
        assert gain.value == pytest.approx(faster - 1)
        assert (gain.is_above_noise, gain.is_below_noise) == (is_settled and faster > 1, is_settled and faster < 1)


@pytest.mark.parametrize("num_turns", [2, 3, 4, 10])
def test_the_interval_of_turns_is_the_t_interval_of_log_ratios_and_covers(num_turns):
    """Of 2,000 intervals, outside 93 to 97 % has probability 0.01 %; a percentile bootstrap of 3 turns has 63 %."""
    noise = np.random.default_rng(3).normal(0.0, 0.1, size=(2000, 2, num_turns))
    gains = [gain_of_turns(np.exp(base), np.exp(own) / 1.1) for base, own in noise]
    assert 0.93 <= np.mean([gain.low <= 0.1 <= gain.high for gain in gains]) <= 0.97
    base_s, own_s = np.exp(noise[0])
    logs = np.log(1.1 * base_s / own_s)
    interval = t.interval(0.95, num_turns - 1, loc=logs.mean(), scale=sem(logs))
    assert gains[0][:3] == pytest.approx(np.expm1([logs.mean(), *interval]))
    assert gain_of_turns([2.0], [1.0])[:4] == (pytest.approx(1.0), None, None, None)


TOO_FEW = "test prompts are too few for an interval (at least 10 are needed)"
SHORTAGES = {
    "a lead": (Gain(0.031, None, None, 0.068), f"8 {TOO_FEW}; about 180 would settle this lead of +3.1 %: raise it"),
    "a large lead": (Gain(0.5, None, None, 0.01), f"8 {TOO_FEW}; about 10 would settle this lead of +50.0 %: raise it"),
    "hardly a lead": (
        Gain(-1e-5, None, None, 0.01),
        f"8 {TOO_FEW}; more than 10,000 would settle this lead of -0.0 %: raise it",
    ),
    "no exact times": (Gain(0.03, None, None, 0.01, 0.02), f"8 {TOO_FEW}: raise it"),
    "no deviation": (Gain(0.031, None, None, None), f"8 {TOO_FEW}: raise it"),
}


@pytest.mark.parametrize(("gain", "words"), SHORTAGES.values(), ids=SHORTAGES)
def test_one_line_says_how_many_prompts_would_settle_a_lead(gain, words):
    assert shortage(gain, 8, remedy="raise it") == words


def test_a_stop_is_charged_its_measured_time_however_unsure_that_is():
    """The title has the largest error, that of a stop in draft steps; beyond 10 % it asks to measure again."""
    sure = times_by_length(0.01, (0.02, 0.03), "measured", {"entropy": 0.001}, "stops measured")
    assert "±" not in sure.title
    again = "these times are uncertain: measure them again with `acceptance-heads costs --again`"
    for error, precision in ((0.02, "times ± 3 %"), (0.05, "times ± 5 %"), (0.299, again)):
        unsure = replace(sure, errors=TimeErrors(0.02, (0.031, 0.031), {"entropy": error, "token_prob": 0.01}))
        assert [unsure.stop_s(kind) for kind in ("entropy", "entropy & token_prob")] == [0.001, 0.001]
        assert unsure.title == f"t_target/t_draft = 2.00, measured; stops measured; {precision}"


GAIN = Gain(0.25, 0.1, 0.4, 0.05)


def test_a_table_prints_every_cell_under_its_heading_and_what_is_absent_as_nothing(capsys):
    table = Table("speeds", [{"policy": "a", "gain": GAIN.text}, {"policy": "b", "tokens/s": "1.0"}], "of two")
    assert table.columns == ["policy", "gain", "tokens/s"]
    assert table.cells == [["a", "+25.0% (+10.0%, +40.0%)", ""], ["b", "", "1.0"]]
    table.print()
    lines = [line for line in capsys.readouterr().out.splitlines() if "│" in line]
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]
    assert cells == table.cells
    assert json.loads(json.dumps(table.as_dict())) == {"title": "speeds", "rows": table.rows, "note": "of two"}
    figures = {"gain": 0.25, "gain_low": 0.1, "gain_high": 0.4}
    assert flat({"family": "a", "gain": GAIN, "tokens_per_s": 2.0}) == {"family": "a", **figures, "tokens_per_s": 2.0}
    assert Gain(0.204, 0.1664, -0.0004, 0.0).words == "+20.4 % (16.6, -0.0)", "the sign of an end is visible"
    assert flat({"gain": Gain(0.25, None, None, 0.1)}) == {"gain": 0.25, "gain_low": None, "gain_high": None}
    columns = {"policy": ("family", ""), "N": ("num", ","), "speed-up": ("speed_up", ".2f")}
    rows = shown([{"family": "a", "num": 1234, "speed_up": None}], columns)
    assert rows == [{"policy": "a", "N": "1,234", "speed-up": ""}]
    rows = crossed("policy", [("b", "batch 1", "x"), ("b", "batch 4", "y"), ("a", "batch 4", "z")])
    assert rows == [{"policy": "b", "batch 1": "x", "batch 4": "y"}, {"policy": "a", "batch 4": "z"}]


def test_what_is_published_is_json_in_which_a_missing_end_is_null(capsys):
    with printing(json=True) as publish:
        publish(Gain(0.25, None, None, 0.1)._asdict())
    assert json.loads(capsys.readouterr().out)["low"] is None
    with pytest.raises(ValueError, match="not JSON compliant"), printing(json=True) as publish:
        publish({"low": float("nan")})


CONCLUSIONS = {
    "faster": (Gain(0.1, 0.05, 0.15, 0.02), "A is faster than B by more than noise, +10.0 % (5.0, 15.0)"),
    "slower": (Gain(-0.1, -0.15, -0.05, 0.02), "A is slower than B by more than noise, -10.0 % (-15.0, -5.0)"),
    "noise": (
        Gain(0.02, -0.02, 0.06, 0.02),
        "A and B differ by no more than noise, +2.0 % (-2.0, 6.0); about 170 test prompts would settle it: raise "
        "decode.num_test, or add prompts if the set has no more",
    ),
    "times": (
        Gain(0.01, -0.05, 0.07, 0.001, 0.03),
        "A and B differ by no more than noise, +1.0 % (-5.0, 7.0); more prompts cannot settle it: it is within the "
        "error of the times (`acceptance-heads costs`)",
    ),
    "few": (
        Gain(0.1, None, None, 0.02),
        "A over B: +10.0 %; 40 test prompts are too few for an interval (at least 10 are needed); about 10 would "
        "settle this lead of +10.0 %: raise decode.num_test, or add prompts if the set has no more",
    ),
    "same": (Gain(0.0, 0.0, 0.0, 0.0), "A and B do the same"),
}


@pytest.mark.parametrize("name", CONCLUSIONS)
def test_a_conclusion_names_the_faster_policy_or_what_would_settle_it(name):
    gain, sentence = CONCLUSIONS[name]
    assert conclusion("A", gain, "B", 40) == sentence

"""Where the oracle's gain goes: the table's figures are those of the results, its shares sum to the whole gain, and a
stage that did not compete says why.
"""

from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from evaluation.contest.results import Result, Yardstick, lead_of
from evaluation.contest.travel import Judged
from evaluation.families import BASELINE, HEADS, PERFECT, PRODUCT, TRAINING_FREE
from evaluation.gain import Spent, gain_over
from evaluation.report.stages import console_sheet, stage_plot, stage_sheet, stages_of
from evaluation.times import Times

COST = Times.constant(0.01, 0.02)
SPEEDS = {BASELINE: 100.0, PRODUCT: 120.0, "entropy": 118.0, "head_drawn": 130.0, PERFECT: 150.0, "oracle": 200.0}
SETTINGS = {BASELINE: {"k": 7}, PRODUCT: {"min_token_prob": 0.0474}, "head_drawn": {"max_rejection_prob": 0.731}}
RATES = {"discard_rate": 0.2, "verification_rate": 0.2, "acceptance_length": 5.0, "mean_draft_length": 5.0}


def judged_at(speeds, free=PRODUCT):
    """Results by hand: each policy at its speed, give or take 10 % on each of 30 prompts."""
    noise = np.random.default_rng(0).normal(1, 0.1, (len(speeds), 30))
    spent = {
        family: Spent(np.full(30, 100), 100 / speed * of_family / of_family.mean())
        for (family, speed), of_family in zip(speeds.items(), noise, strict=True)
    }
    groups = {TRAINING_FREE: free} | ({HEADS: "head_drawn"} if "head_drawn" in speeds else {})
    results = []
    for family, speed in speeds.items():
        gain = gain_over(spent[BASELINE], spent[family])
        named = {"family": family, "name": family, "setting": SETTINGS.get(family, {})}
        percents = {"percent_of_oracle": speed / 2, "percent_of_perfect": float("nan")}
        results.append(
            Result(**named, **RATES, **percents, tokens_per_s=speed, speed_up=speed / 50, gain=gain, lead=gain)
        )
    yardstick = Yardstick(spent, 0.02, groups)
    return Judged(dataset="made", arms=[], picks={}, yardstick=yardstick, results=results)


def stages_at(speeds, free=PRODUCT):
    return stages_of(judged_at(speeds, free), heads={"head_drawn": "drawn+s-d1-w3"})


def without(*families):
    return {family: speed for family, speed in SPEEDS.items() if family not in families}


def test_stages_go_from_the_best_fixed_length_to_the_oracle_and_share_its_whole_gain():
    stages = stages_at(SPEEDS)
    assert [stage.family for stage in stages] == [BASELINE, PRODUCT, "head_drawn", PERFECT, "oracle"]
    assert [stage.percent_of_gain for stage in stages] == [None, *map(pytest.approx, (20, 10, 20, 50))]
    assert [stage.knows for stage in stages[2:]] == [
        "what a head learned",
        "what the draft cannot see, or a head has not learned",
        "the coin, and the token before it is drawn",
    ]


def test_a_speed_is_the_best_fixed_lengths_times_its_gain_and_each_interval_holds_its_value():
    first, *stages = stages_at(SPEEDS)
    assert first.speeds[:3] == (100, 100, 100)
    assert first.added is None
    before = 100.0
    for stage in stages:
        gain, speeds = stage.result.gain, stage.speeds
        assert speeds[:3] == pytest.approx([100 * (1 + part) for part in gain[:3]])
        assert speeds.value == pytest.approx(SPEEDS[stage.family])
        assert stage.added.value == pytest.approx(speeds.value / before - 1)
        for interval in (speeds, gain, stage.added):
            assert interval.low < interval.value < interval.high
        before = speeds.value


def test_what_a_stage_adds_is_paired_with_the_stage_before_and_the_same_as_in_the_verdict():
    judged = judged_at(SPEEDS)
    _, product, head, perfect, _ = stages_of(judged, heads={})
    spent = judged.yardstick.spent
    assert product.added == product.result.gain
    assert head.added == lead_of(judged.yardstick)
    assert perfect.added == gain_over(spent["head_drawn"], spent[PERFECT])
    _, _, head, *_ = stages_at(without(PRODUCT), free=BASELINE)
    assert head.added == head.result.gain, "over the best fixed length there is one figure"


def test_the_product_stands_even_where_dev_prefers_another_policy_without_training():
    stages = stages_at(SPEEDS, free="entropy")
    assert [stage.family for stage in stages[:4]] == [BASELINE, PRODUCT, "entropy", "head_drawn"]
    assert [stage.percent_of_gain for stage in stages[2:4]] == [pytest.approx(-2), pytest.approx(12)]
    assert sum(stage.percent_of_gain for stage in stages[1:]) == pytest.approx(100)
    assert "entropy (SVIP): slower than the row above" in stage_sheet(stages, COST, title="", beside=()).note
    assert "slower than" not in stage_sheet(stages_at(SPEEDS), COST, title="", beside=()).note
    assert [stage.family for stage in stages_at(SPEEDS, free=BASELINE)[:3]] == [BASELINE, PRODUCT, "head_drawn"]


@pytest.mark.parametrize(
    ("family", "place", "why"),
    [
        (PRODUCT, 1, "not compared: decode.policies"),
        ("head_drawn", 2, "not compared: no trained heads"),
        (PERFECT, 3, "not in the trace: decode.perfect_head is false"),
    ],
)
def test_a_stage_that_did_not_compete_says_why_and_the_others_share_the_whole_gain(family, place, why):
    stages = stages_at(without(family), free=BASELINE if family == PRODUCT else PRODUCT)
    assert why in stages[place].missing
    assert [stage.missing for stage in stages if stage.result] == [""] * 4
    following = stages_at(SPEEDS)[place + 1].knows
    assert stages[place + 1].knows == f"{stages[place].knows}; {following}"
    assert sum(stage.percent_of_gain or 0 for stage in stages) == pytest.approx(100)
    row = stage_sheet(stages, COST, title="", beside=()).rows[place + 1]
    assert why in row["what it knows"]
    assert "tokens/s" not in row
    assert why in stages[place].as_dict()["missing"]
    assert f">{why.partition(':')[0]}<" in stage_plot(stages, COST, dataset="made").svg


def test_where_the_oracle_gains_nothing_there_are_no_shares():
    stages = stages_at(dict.fromkeys(SPEEDS, 100.0))
    assert [stage.percent_of_gain for stage in stages] == [None] * 5


def test_the_table_the_picture_and_the_record_have_the_same_figures():
    stages = stages_at(SPEEDS)
    head = stages[2]
    sheet = stage_sheet(stages, COST, title="made", beside=["entropy (SVIP), 0.4: +18 % (16, 20)"])
    speed, low, high, _ = head.speeds
    assert list(sheet.rows[3].values()) == [
        "best head, drawn-time",
        "what a head learned",
        "drawn+s-d1-w3 at 0.731",
        f"{speed:.0f} ({low:.0f}, {high:.0f})",
        head.result.gain.words,
        head.added.words,
    ]
    assert sheet.column("tokens/s")[:2] == ["50.0", "100"]
    assert "entropy (SVIP), 0.4: +18 % (16, 20)" in sheet.note
    record = head.as_dict()
    assert (record["tokens_per_s_low"], record["gain_high"], record["added"], record["percent_of_oracle_gain"]) == (
        low,
        head.result.gain.high,
        head.added.value,
        head.percent_of_gain,
    )
    svg = stage_plot(stages, COST, dataset="made").svg
    assert all(f">{text}<" in svg for text in ("100", "120", "130", "150", "200"))


def test_the_pictures_of_near_ratios_are_two_files():
    costs = (Times.constant(0.2, 0.9996), COST.with_ratio(5.0), COST.with_ratio(4.998), COST.with_ratio(5.000001))
    assert len({stage_plot(stages_at(SPEEDS), cost, dataset="made").name for cost in costs}) == 4


def test_the_stages_fit_a_console_of_100_columns():
    stages = [
        replace(stage, family="auto_prefix_learning") if stage.family == "head_drawn" else stage
        for stage in stages_at(SPEEDS)
    ]
    sheet = console_sheet(stage_sheet(stages, COST, title="", beside=()), best="", more=16)
    assert Console(width=200).measure(sheet._replace(note="").table()).maximum <= 100
    assert "auto online, prefix, learning\nwhat a head learned" in sheet.column("stage")
    assert "drawn+s-d1-w3 at 0.731" in sheet.note
    assert "16 more rows" in sheet.note

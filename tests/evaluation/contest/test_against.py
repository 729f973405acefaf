"""Two evaluations of one trace, compared policy by policy over the same test prompts."""

from dataclasses import replace

import numpy as np
import pytest

from evaluation.contest import Replays, hold
from evaluation.report.against import PROMPTS, against_table, compare_with, read_prompts, write_prompts
from lm import Sampling
from tests.evaluation.contest.conftest import CURVE
from tests.toys.small_pair import trace


@pytest.fixture(scope="module")
def contests(replays):
    """Before and after: another head of drawn timing is the best, because the others are left out."""
    before = [arm for arm in replays.arms if arm.competitor.family != "head_drawn"]
    changed = []
    for arm in replays.arms:
        if arm.competitor.family == "head_drawn":
            competitor = replace(arm.competitor, name="head:older", settings=arm.competitor.settings[-1:])
            changed.append(replace(arm, competitor=competitor, dev=arm.dev.select([-1]), test=arm.test.select([-1])))
    old = Replays(replays.traces, [*before, *changed])
    return {"made": hold(old, CURVE, dataset="made")}, {"made": hold(replays, CURVE, dataset="made")}, {"made": replays}


def test_every_family_is_paired_with_its_own_setting_in_the_other_evaluation(contests, tmp_path):
    before, after, replays = contests
    write_prompts(tmp_path / PROMPTS, before, replays)
    records = compare_with(read_prompts(str(tmp_path)), "old", after, replays)
    assert {record["family"] for record in records} == before["made"].results.keys() & after["made"].results.keys()
    for record in records:
        gain = after["made"].results[record["family"]].over(before["made"].results[record["family"]])
        assert record["gain"] == gain
    by_family = {record["family"]: record for record in records}
    assert by_family["fixed_length"]["conclusion"] == "best fixed length here and there do the same"
    head = by_family["head_drawn"]
    assert head["setting_there"].startswith("older: ")
    assert head["gain"].value != 0
    table = against_table(records, "old", "title")
    assert len(table.rows) == len(records)


def test_both_count_at_the_times_of_this_evaluation_and_an_unknown_stop_costs_its_share(contests, tmp_path):
    before, after, replays = contests
    head = before["made"].results["head_drawn"]
    known = replace(CURVE, t_stop_s={head.played.stop_kind: 0.02})
    write_prompts(tmp_path / PROMPTS, {"made": hold(replays["made"], known, dataset="made")}, replays)
    other = read_prompts(str(tmp_path))
    other["family"] = other["family"].replace("fixed_length", "nobody")
    records = {record["family"]: record for record in compare_with(other, "old", after, replays)}
    assert "fixed_length" not in records, "families that only one of them has are left out"
    there = hold(replays["made"], known, dataset="made").results["head_drawn"]
    assert records["head_drawn"]["tokens_per_s_there"] == pytest.approx(there.tokens_per_s)
    slower = {"made": replace(after["made"], times=replace(CURVE, t_stop_s={head.played.stop_kind: 0.04}))}
    records = {record["family"]: record for record in compare_with(other, "old", slower, replays)}
    assert records["head_drawn"]["tokens_per_s_there"] < there.tokens_per_s, "a known one costs what it costs here"


def test_another_trace_other_datasets_and_a_folder_without_an_evaluation_are_refused(contests, tmp_path):
    before, after, replays = contests
    write_prompts(tmp_path / PROMPTS, before, replays)
    other = read_prompts(str(tmp_path))
    sampled = Sampling(temperature=0.6)
    drawn = replace(replays["made"], traces=replace(replays["made"].traces, test=trace(sampled, copies=2, seed=7)))
    with pytest.raises(ValueError, match="old, whose trace of made differs from this one"):
        compare_with(other, "old", after, {"made": drawn})
    with pytest.raises(ValueError, match="evaluates made; here are travel"):
        compare_with(other, "old", {"travel": after["made"]}, {"travel": replays["made"]})
    with pytest.raises(FileNotFoundError, match=f"has no {PROMPTS}; run `acceptance-heads evaluate`"):
        read_prompts(str(tmp_path / "nowhere"))
    assert np.isfinite(other["stop_share"]).all()

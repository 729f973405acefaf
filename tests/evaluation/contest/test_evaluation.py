"""An evaluation as a value: its frame, curve, parts and comparisons have the figures of its contests."""

from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest

from benchmarks import lengths
from decode.policies import Entropy
from evaluation.contest import hold
from evaluation.families import BASELINE
from evaluation.gain import gain_over
from evaluation.traces.replay import replay_settings
from tests.evaluation.contest.conftest import CURVE
from tests.evaluation.contest.made import evaluation_of


@pytest.fixture(scope="module")
def evaluation(contest, replays):
    return evaluation_of({"made": [contest]}, {"made": replays}, replayed=replays)


def test_it_does_not_change_and_shows_its_verdict(evaluation):
    with pytest.raises(FrozenInstanceError):
        evaluation.contest = None
    assert repr(evaluation) == f"Evaluation of made, {evaluation.contest.num_prompts} test prompts: Use fixed length 1."
    assert evaluation.best is evaluation.contest.best


def test_the_frame_has_every_family_on_both_splits(evaluation, contest):
    frame = evaluation.frame()
    assert list(frame) == ["dataset", "times", "family", "setting", "split", "tokens_per_s", "gain", "low", "high"]
    assert list(frame["split"]) == ["dev", "test"] * len(contest.results)
    for (_, dev), (_, test) in zip(frame[::2].iterrows(), frame[1::2].iterrows(), strict=True):
        result, gain = contest.results[test.family], contest.gain(test.family)
        assert dev.family == test.family
        assert (dev.tokens_per_s, test.tokens_per_s) == (result.on_dev, result.tokens_per_s)
        assert (test.gain, test.low, test.high) == gain[:3]
        assert dev.gain == pytest.approx(result.on_dev / contest.baseline.on_dev - 1)
        assert dev.low <= dev.gain <= dev.high


def test_the_curve_has_every_threshold_and_the_range_that_dev_cannot_tell_apart(evaluation, contest):
    curve, result = evaluation.curve("entropy"), contest.results["entropy"]
    parameter = "max_sqrt_entropy"
    assert list(curve) == [parameter, "gain", "low", "high", "is_chosen", "is_equal"]
    assert curve[parameter].is_monotonic_increasing
    assert len(curve) == len(result.competitor.settings)
    (chosen,) = curve[curve.is_chosen].itertuples()
    assert getattr(chosen, parameter) == result.setting[parameter]
    exact = gain_over(contest.baseline.throughput, result.throughput)
    assert (chosen.gain, chosen.low, chosen.high) == pytest.approx(exact[:3])
    equal = np.flatnonzero(curve.is_equal)
    assert chosen.Index in equal
    assert 1 < len(equal) == equal[-1] - equal[0] + 1 < len(curve), "a range around the choice"
    axes = evaluation.plot("entropy").axes[0]
    drawn = {tuple(np.round(line.get_ydata(), 9)) for line in axes.lines}
    assert {tuple(np.round(100 * curve.gain, 9)), tuple(np.round(100 * curve.gain[equal], 9))} <= drawn
    with pytest.raises(ValueError, match="fixed_length has no curve"):
        evaluation.plot(BASELINE)


def test_two_policies_are_compared_on_the_same_prompts(evaluation, contest, replays):
    assert evaluation.compare("entropy", BASELINE) == contest.gain("entropy")
    assert evaluation.compare(evaluation.best, BASELINE) == contest.gain(evaluation.best.family)
    played = [replay_settings(replays.traces.test, Entropy(max_sqrt_entropy=bound)) for bound in (0.4, 0.9)]
    low, high = (CURVE.throughput(each).at(0) for each in played)
    for policy in ("entropy:max_sqrt_entropy=0.4", Entropy(max_sqrt_entropy=0.4)):
        gain = evaluation.compare(policy, "entropy:max_sqrt_entropy=0.9")
        assert gain == gain_over(high, low)
        assert gain.low < gain.value < gain.high
    back = evaluation.compare("entropy:max_sqrt_entropy=0.9", "entropy:max_sqrt_entropy=0.4")
    assert (1 + gain.value) * (1 + back.value) == pytest.approx(1)
    with pytest.raises(ValueError, match="'other' was not evaluated; the datasets are made"):
        evaluation.compare("entropy", BASELINE, dataset="other")
    with pytest.raises(ValueError, match="there is no policy 'entropi'"):
        evaluation.compare("entropi", BASELINE)


def test_the_number_of_prompts_that_settle_a_lead_falls_with_its_square(evaluation):
    numbers = [evaluation.prompts_needed(lead, family="entropy") for lead in (0.01, 0.02)]
    assert numbers[0] == pytest.approx(4 * numbers[1], rel=0.1)
    assert evaluation.prompts_needed(0.01, family=BASELINE, base=BASELINE) == 10
    with pytest.raises(ValueError, match="lead is 0"):
        evaluation.prompts_needed(0.0)


def test_parts_of_the_prompts_are_judged_apart_and_add_up(contest, replays):
    test = replays.traces.test
    rows = tuple(
        replace(row, category="odd" if test.prompt_of_row[number] % 2 else "even")
        for number, row in enumerate(test.rows)
    )
    traces = replace(replays.traces, test=replace(test, rows=rows))
    evaluation = evaluation_of({"made": [contest]}, {"made": replace(replays, traces=traces)})
    for by in ("category", "response_position", "prompt_length"):
        frame = evaluation.by(by)
        parts = frame["part"].unique()
        assert by == "prompt_length" or len(parts) > 1
        for name, result in contest.results.items():
            of_family = frame[frame.family == name]
            base = frame[frame.family == BASELINE]
            assert list(of_family["part"]) == list(parts)
            gains = of_family.tokens_per_s.to_numpy() / base.tokens_per_s.to_numpy() - 1
            assert of_family.gain.to_numpy() == pytest.approx(gains)
            slowest, fastest = of_family.tokens_per_s.min(), of_family.tokens_per_s.max()
            assert slowest * (1 - 1e-9) <= result.tokens_per_s <= fastest * (1 + 1e-9)
    by_category = evaluation.by("category")
    expected = [int(np.sum(np.unique(test.prompt_of_row) % 2 == odd)) for odd in (0, 1)]
    assert list(by_category[by_category.family == BASELINE].num_prompts) == sorted(expected, reverse=True)
    even = [number for number, row in enumerate(rows) if row.category == "even"]
    oracle = contest.results["oracle"].played.select([0], even)
    found = by_category[(by_category.family == "oracle") & (by_category["part"] == "even")].tokens_per_s
    assert found.item() == pytest.approx(CURVE.tokens_per_s(oracle)[0])
    with pytest.raises(ValueError, match="by is 'length'; it is one of category, prompt_length, response_position"):
        evaluation.by("length")


def test_what_is_published_without_prompts_has_no_lengths(contest, replays):
    rows = tuple(replace(row, prompt_ids=()) for row in replays.traces.test.rows)
    traces = replace(replays.traces, test=replace(replays.traces.test, rows=rows))
    evaluation = evaluation_of({"made": [contest]}, {"made": replace(replays, traces=traces)})
    with pytest.raises(ValueError, match="published without prompts"):
        evaluation.by("prompt_length")


def test_a_pooled_verdict_compares_on_the_prompts_of_all_its_sets(contest, replays):
    pooled = hold(replays, CURVE, dataset="one + two")
    evaluation = evaluation_of({"one": [contest], "two": [contest]}, {"one": replays, "two": replays}, contest=pooled)
    vars(evaluation.experiment).update(datasets={"one": 1, "two": 2}, training_sets={"one": 1, "two": 2})
    both = evaluation.compare("entropy:max_sqrt_entropy=0.4", "entropy:max_sqrt_entropy=0.9")
    one = evaluation.compare("entropy:max_sqrt_entropy=0.4", "entropy:max_sqrt_entropy=0.9", dataset="one")
    assert both.value == pytest.approx(one.value)
    assert both.standard_error < one.standard_error


def test_the_best_setting_of_one_part_is_dev_s_choice_for_whole_responses(evaluation, contest, replays):
    longest = int(max(np.diff(trace.offsets).max() for trace in replays.traces))
    for family in lengths.CHOSEN:
        result = contest.results[family]
        (best,) = lengths.best_in_parts(evaluation, family, [0, longest])
        assert (best.number, best.tokens_per_s) == (result.number, result.tokens_per_s)
        halves = lengths.result_in_parts(result, replays.traces.test, [0, longest // 2, longest])
        assert sum(part.throughput.tokens.sum() for part in halves) == result.throughput.tokens.sum()

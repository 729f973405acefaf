"""The verdict: a head is recommended only if it beats the best fixed length and the best rule without training, beyond
noise and in most of the repeated splits.
"""

from dataclasses import replace

import numpy as np
import pytest

from decode.loop.counts import Counts
from decode.policies import FixedLength
from evaluation.competitor import Arm, Competitor
from evaluation.contest import fastest_on_dev
from evaluation.families import BASELINE, HEADS, PRODUCT, TRAINING_FREE
from evaluation.gain import MIN_PROMPTS, Gain
from evaluation.played import Played
from evaluation.report.conclusion import NUM_RESAMPLES, conclude, head_shares, near_best
from evaluation.report.verdict import sentence_of
from evaluation.splits import RepeatedSplits
from tests.evaluation.contest.made import contest_at
from tests.toys.times import flat_times

TIMES = flat_times(0.001, 1.0)


@pytest.mark.parametrize(
    ("free", "head", "winner"),
    [
        (99, 95, BASELINE),
        (99, 101, BASELINE),
        (104, None, BASELINE),
        (104, 104, BASELINE),
        (120, 115, TRAINING_FREE),
        (120, 122, TRAINING_FREE),
        (104, 108, TRAINING_FREE),  # the head beats the fixed length alone, which nothing else does
        (None, 120, HEADS),
        (99, 130, HEADS),
        (120, 150, HEADS),
    ],
)
def test_a_head_is_recommended_only_if_it_beats_the_fixed_length_and_the_best_rule_without_training(free, head, winner):
    """Gains of 5 % and less are within noise."""
    speeds = {BASELINE: 100, PRODUCT: free, "head_drawn": head}
    verdict = conclude(contest_at({name: speed for name, speed in speeds.items() if speed is not None}))
    assert verdict.group == winner
    others = [group for group in verdict.candidates if group != winner]
    if winner == HEADS:
        assert all(verdict.gain(HEADS, other).is_above_noise for other in others)
    assert not (winner == BASELINE and any(verdict.beats(other, BASELINE) for other in others))


def test_dev_may_prefer_the_fixed_length_and_the_head_still_has_to_beat_the_best_rule():
    contest = contest_at({BASELINE: 100, PRODUCT: 106, "head_drawn": 109}, on_dev={BASELINE: 200})
    assert contest.leaders[TRAINING_FREE].family == BASELINE
    verdict = conclude(contest)
    assert (verdict.group, verdict.winner.family) == (TRAINING_FREE, PRODUCT)


def test_a_head_that_beats_the_fixed_length_alone_is_not_recommended_even_if_that_beats_the_rule():
    """Intervals are no order: here the head is not above noise over the rule, which is the slowest of the three."""
    gains = {
        ("head_drawn", BASELINE): Gain(0.05, 0.02, 0.08, 0.01),
        (BASELINE, PRODUCT): Gain(0.03, 0.01, 0.05, 0.01),
        ("head_drawn", PRODUCT): Gain(0.08, -0.01, 0.17, 0.04),
    }
    contest = contest_at({BASELINE: 100, PRODUCT: 97, "head_drawn": 105})
    verdict = conclude(replace(contest, _gains=gains))
    assert verdict.beats(HEADS, BASELINE)
    assert verdict.group == BASELINE


@pytest.mark.parametrize(("num_ahead", "winner"), [(200, HEADS), (180, HEADS), (179, TRAINING_FREE)])
def test_a_policy_that_is_ahead_in_less_than_nine_of_ten_splits_beats_nothing(num_ahead, winner):
    lead = np.where(np.arange(200) < num_ahead, 0.5, 0.1)
    gains = {BASELINE: np.zeros(200), PRODUCT: np.full(200, 0.2), "head_drawn": lead}
    splits = RepeatedSplits(gains, {name: 1 + gain for name, gain in gains.items()})
    contest = replace(contest_at({BASELINE: 100, PRODUCT: 120, "head_drawn": 150}), splits=splits)
    assert conclude(contest).group == winner


def test_there_is_no_verdict_below_ten_test_prompts():
    speeds = {BASELINE: 100, PRODUCT: 200, "head_drawn": 400}
    few, enough = (conclude(contest_at(speeds, num_prompts=num)) for num in (MIN_PROMPTS - 1, MIN_PROMPTS))
    assert (few.is_decided, few.group) == (False, BASELINE)
    assert (enough.is_decided, enough.group) == (True, HEADS)


def played(rounds: np.ndarray) -> Played:
    """Settings that write 1,000 tokens to each prompt in these numbers of rounds."""
    counts = Counts(num_emitted=np.full(rounds.shape, 1000), num_target=rounds, num_draft_forwards=0 * rounds)
    return Played(counts, rounds[..., None], np.arange(rounds.shape[1]))


def arm_of(name: str, settings: list[dict], rounds: np.ndarray) -> Arm:
    competitor = Competitor(
        name.replace("head:", "head_drawn:").partition(":")[0], name, FixedLength(), tuple(settings)
    )
    return Arm(competitor, played(rounds), played(rounds))


def test_thresholds_within_noise_of_the_best_are_a_range_around_it():
    """Every setting but the best has extra rounds on half of the prompts: few are within noise, many are not."""
    extra = {0.1: 60, 0.2: 1, 0.3: 0, 0.4: 1, 0.5: 1, 0.6: 60, 0.7: 1}
    prompts = np.arange(40)
    rows = [
        100 + 10 * (prompts % 3) + number * np.where(prompts % 2, 1, -1 + (number > 1)) for number in extra.values()
    ]
    settings = [{"max_rejection_prob": value, "is_calibrated": True} for value in extra]
    settings += [{"max_rejection_prob": 0.3, "is_calibrated": False}]
    arm = arm_of("head:it", settings, np.array([*rows, rows[0]]))
    order = np.random.default_rng(0).permutation(len(settings))
    shuffled = Competitor("head_drawn", "head:it", FixedLength(), tuple(settings[number] for number in order))
    arm = Arm(shuffled, arm.dev.select(order), arm.test.select(order))
    result = fastest_on_dev([arm], TIMES)["head_drawn"]
    near = near_best(result, TIMES)
    assert near == ("max_rejection_prob", [0.2, 0.3, 0.4, 0.5])
    few = Arm(shuffled, arm.dev.select(range(len(order)), rows=range(MIN_PROMPTS - 1)), arm.test)
    assert near_best(fastest_on_dev([few], TIMES)["head_drawn"], TIMES) is None
    single = arm_of("head:it", settings[:1], rows[0][None])
    assert near_best(fastest_on_dev([single], TIMES)["head_drawn"], TIMES) is None


def test_resampled_dev_sets_choose_the_head_that_one_computes_with_every_resample_replayed():
    generator = np.random.default_rng(1)
    rounds = generator.integers(80, 120, size=(3, 5, 12))
    settings = [{"max_rejection_prob": value} for value in (0.1, 0.2, 0.3, 0.4, 0.5)]
    names = ("head:a", "head:b", "head:c")
    arms = [arm_of(name, settings, of_arm) for name, of_arm in zip(names, rounds, strict=True)]
    draws = np.random.default_rng(0).multinomial(12, np.full(12, 1 / 12), size=NUM_RESAMPLES)
    totals = np.einsum("hsp,rp->hsr", rounds, draws).min(axis=1)  # the same tokens everywhere: fewest rounds win
    expected = {name: np.mean(totals.argmin(axis=0) == number) for number, name in enumerate("abc")}
    shares = head_shares(arms, TIMES)
    assert shares == {name: share for name, share in expected.items() if share}
    assert list(shares.values()) == sorted(shares.values(), reverse=True)
    assert 0 < min(shares.values()) < max(shares.values()) < 1
    assert head_shares(arms[:1], TIMES) == {}


@pytest.mark.parametrize(("times_error", "undecided"), [(0.0, None), (0.05, None), (0.2, HEADS)])
def test_no_verdict_is_given_where_the_error_of_the_times_decides_it(times_error, undecided):
    contest = contest_at({BASELINE: 100, PRODUCT: 105, "head_drawn": 125})
    for name in ("head_drawn", PRODUCT):
        for base in (BASELINE, PRODUCT):
            gain = contest.results[name].over(contest.results[base])
            contest._gains[name, base] = gain.widened(times_error if name != base else 0.0)
    verdict = conclude(contest)
    assert verdict.undecided_by_times == undecided
    assert verdict.group == (BASELINE if undecided else HEADS)
    sentence = sentence_of(verdict)
    assert sentence.startswith("No verdict: the error of the measured times" if undecided else "Use head")
    assert ("`acceptance-heads costs --again`" in sentence) == (undecided is not None)


def test_a_gain_within_the_noise_of_prompts_is_not_blamed_on_the_times():
    contest = contest_at({BASELINE: 100, PRODUCT: 99, "head_drawn": 102})
    gain = contest.results["head_drawn"].over(contest.baseline)
    contest._gains["head_drawn", BASELINE] = gain.widened(0.2)
    verdict = conclude(contest)
    assert (verdict.undecided_by_times, verdict.group) == (None, BASELINE)

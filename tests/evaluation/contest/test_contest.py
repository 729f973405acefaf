"""Settings are chosen on dev and reported on test, beside bounds, with paired intervals."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from decode.policies.batch import Curve
from decode.policies.registry import LOGISTIC, POLICIES
from decode.policies.scores import ScoreHead
from evaluation.competitor import competitors_of
from evaluation.contest import Contest, fastest_heads, fastest_on_dev, hold, replay_arms, replay_dataset, result_of
from evaluation.families import AUTO, family
from evaluation.gain import Gain
from evaluation.times import TimeErrors
from evaluation.traces.replay import replay_settings
from evaluation.tuning.rule import autos_for
from heads import AcceptanceHead
from tests.evaluation.contest.conftest import CURVE
from tests.toys.times import flat_times

COST = flat_times(0.2, 1.0)


def test_the_policies_of_the_yaml_compete_on_its_grids_and_what_cannot_be_replayed_is_refused():
    grids = competitors_of({"entropy": {"max_sqrt_entropy": [0.4]}}, {}, max_draft_length=5, policies=("entropy",))
    assert [grid.name for grid in grids] == ["fixed_length", "entropy"]
    assert grids[1].settings == ({"max_sqrt_entropy": 0.4},)
    for own, problem in (
        ({"entropy": {"max_sqrt_entropy": []}}, "no value of max_sqrt_entropy"),
        ({"fixed_length": {"k": [2, 9]}}, "fixed length of 9; decode.max_draft_length is 5"),
        ({"fixed_length": {"k": [2.5]}}, "whole number"),
        ({"token_prob": {"min_token_prob": [0.4]}}, r"decode\.policies leaves out; add it there"),
    ):
        with pytest.raises(ValueError, match=problem):
            competitors_of(own, {}, max_draft_length=5, policies=("entropy",))


def test_the_setting_of_each_family_is_the_fastest_on_dev_and_is_judged_on_test_against_the_best_fixed_length(replays):
    contest = Contest("made", COST, fastest_on_dev(replays.arms, COST))
    for arm in replays.arms:
        result, on_dev = contest.results[arm.competitor.family], COST.tokens_per_s(arm.dev)
        assert (result.number, result.on_dev) == (on_dev.argmax(), on_dev.max())
        assert result.setting == arm.competitor.settings[int(on_dev.argmax())]
        assert result.tokens_per_s == pytest.approx(COST.tokens_per_s(arm.test)[result.number])
        gain = contest.gain(result.family)
        assert gain.value == pytest.approx(result.tokens_per_s / contest.baseline.tokens_per_s - 1)
        assert gain.low <= gain.value <= gain.high
        assert result.percent_of(contest.results["oracle"]) <= 100 + 1e-9
    free = max(contest.results[name].on_dev for name in POLICIES if name in contest.results)
    assert contest.leaders["training-free"].on_dev == free


def test_the_papers_heads_compete_among_themselves_and_each_timing_takes_its_best(splits):
    torch.manual_seed(0)
    kinds = [(timing, scalars, i) for timing in ("fed", "drawn") for scalars in (False, True) for i in range(3)]
    heads = {f"{timing}{'+s' * scalars}-{i}": AcceptanceHead(16, 1, timing, scalars) for timing, scalars, i in kinds}
    for parameter in (parameter for head in heads.values() for parameter in head.parameters()):
        torch.nn.init.normal_(parameter)
    _, *competitors = competitors_of({}, heads, max_draft_length=5, policies=("head",))
    arms = list(replay_arms(competitors, splits))
    picks = fastest_on_dev(arms, COST)
    assert picks["head_specdec"].competitor.name.startswith("head:fed-")
    assert picks["head_fed"].competitor.name.startswith("head:fed+s-")
    assert set(picks) == {"head_specdec", "head_fed", "head_drawn"}
    speeds = {arm.competitor.name.removeprefix("head:"): COST.tokens_per_s(arm.dev).max() for arm in arms}
    for timing, best in fastest_heads(picks).items():
        of_timing = [name for name in heads if name.startswith(timing)]
        assert heads[max(of_timing, key=speeds.__getitem__)] is best
    assert fastest_heads(fastest_on_dev(arms[:3], COST)).keys() == {"fed"}


@pytest.mark.parametrize("ratio", [0.3, 0.8, 1.0, 1.5])
def test_no_bound_falls_below_the_target_alone_or_a_fixed_length_where_drafting_is_dear(replays, ratio):
    cost = flat_times(1 / ratio, 1.0)
    results = hold(replays, cost).results
    oracle = results["oracle"]
    assert max(result.percent_of(oracle) for result in results.values()) == pytest.approx(100)
    assert oracle.tokens_per_s * cost.alone_s >= 1 - 1e-9


@pytest.mark.parametrize("timing", ["fed", "drawn"])
def test_auto_is_never_slower_than_the_target_alone_and_near_the_best_threshold_at_every_ratio(splits, replays, timing):
    """Learned online it is as fast; where drafting cannot pay, it stops drafting."""
    every = [flat_times(1 / ratio, 1.0) for ratio in (2, 5, 10, 20)]
    rules, online = (
        autos_for(ScoreHead("perfect", timing), splits.dev, [*every, flat_times(2.0, 1.0)], is_online=is_online)
        for is_online in (False, True)
    )
    grid = next(arm for arm in replays.arms if arm.competitor.family == f"perfect_{timing}")
    for cost, rule, learning in zip(every, rules, online, strict=False):
        assert [rule] == autos_for(ScoreHead("perfect", timing), splits.dev, [cost])
        reached, learned = (cost.tokens_per_s(replay_settings(splits.test, one))[0] for one in (rule, learning))
        assert reached > 0.97
        assert reached > 0.98 * cost.tokens_per_s(grid.test).max()
        assert learned == pytest.approx(reached, rel=0.05)
    for rare in (rules[-1], online[-1]):
        counts = replay_settings(splits.test, rare).counts
        assert counts.num_drafted.sum() < 0.25 * counts.num_target.sum()


def test_the_rule_has_the_head_and_the_form_that_dev_chooses_and_a_prefix_head_pays_a_forward_more(splits):
    torch.manual_seed(0)
    heads = {timing: AcceptanceHead(16, 1, timing, True).eval() for timing in ("fed", "drawn", "prefix")}
    own = {"fixed_length": {"k": [2]}, "head": {"max_rejection_prob": LOGISTIC}}
    grids = competitors_of(own, heads, max_draft_length=5)
    replays = replay_dataset(splits, grids, perfect_head=False, name="")
    arms = {arm.competitor.name: arm for arm in replays.arms if arm.competitor.name.startswith("head:")}
    timing = max(arms, key=lambda name: COST.tokens_per_s(arms[name].dev).max()).removeprefix("head:")
    [name] = [name for name in hold(replays, COST).results if family(name).kind == AUTO]
    [forms] = replays.autos(heads[timing], [COST])
    auto = hold(replays, COST).results[name]
    fastest = max(forms, key=lambda arm: COST.tokens_per_s(arm.dev)[0])
    assert auto.tokens_per_s == COST.tokens_per_s(fastest.test)[0]
    assert auto.label == f"{timing}: {'lambda learned online' if auto.setting['is_online'] else 'lambda of dev'}"
    assert auto.policy == fastest.competitor.policy
    counts = arms["head:prefix"].test.counts
    assert (counts.num_draft_forwards - counts.num_drafted).max() > 0, "for the token that it does without"


ERRORS = {
    "drafting": TimeErrors(0.04, (0.0,) * 6),
    "verifying": TimeErrors(0.0, (0.05,) * 6),
    "stopping": TimeErrors(0.0, (), {"token_prob": 0.02}),
}


@pytest.mark.parametrize("errors", ERRORS.values(), ids=ERRORS)
def test_an_interval_includes_the_error_of_the_times_of_both_policies(replays, errors):
    """The error of a gain is the root of the sum of squares of what each time's error moves it by."""
    exact, unsure = hold(replays, CURVE), hold(replays, replace(CURVE, errors=errors))
    moves = [
        replace(CURVE, draft=Curve.line(CURVE.t_draft_s * (1 + errors.drafting))),
        replace(CURVE, t_stop_s={"token_prob": 0.01 + CURVE.t_draft_s * errors.stopping.get("token_prob", 0.0)}),
    ]
    for k, error in enumerate(errors.verifying):
        target_s = np.array(CURVE.target.seconds)
        target_s[k] *= 1 + error
        moves.append(replace(CURVE, target=replace(CURVE.target, seconds=tuple(target_s.tolist()))))
    for name in ("fixed_length", "cumulative_token_prob", "entropy"):
        before, after = exact.gain(name), unsure.gain(name)
        moved = [
            result_of(exact.results[name].arm, exact.results[name].number, times).over(
                result_of(exact.baseline.arm, exact.baseline.number, times)
            )
            for times in moves
        ]
        expected = math.hypot(*(gain.value - before.value for gain in moved))
        assert after.times_error == pytest.approx(expected, rel=0.25, abs=1e-9)
        assert (before.value, before.times_error) == (after.value, 0)
        if before.low is not None:
            assert after.high - after.value == pytest.approx(
                math.hypot(before.high - before.value, 1.96 * after.times_error)
            )
    assert unsure.gain("cumulative_token_prob").times_error > 0


def test_nothing_is_claimed_where_the_error_of_the_times_decides():
    sure = Gain(0.05, 0.01, 0.09, 0.02)
    for gain, error, is_above, is_blurred in (
        (sure, 0.0, True, False),
        (sure, 0.01, True, False),
        (sure, 0.03, False, True),
        (Gain(0.05, -0.01, 0.11, 0.03), 0.03, False, False),  # more prompts are needed as well
        (Gain(-0.05, -0.09, -0.01, 0.02), 0.03, False, True),
        (Gain(0.05, None, None, 0.02), 0.03, False, False),
    ):
        widened = gain.widened(error)
        assert (widened.is_above_noise, widened.is_blurred_by_times) == (is_above, is_blurred)
        assert (widened.standard_error, widened.times_error) == (gain.standard_error, error)

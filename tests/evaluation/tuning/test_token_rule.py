"""The rule without a head: two numbers fitted on dev, solved for given times, and written so that it can be run."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.special import expit

from decode.policies.auto import Auto, AutoTokenProb
from decode.policies.batch import batched
from decode.policies.registry import AUTO_TOKEN_PROB, parse_policy
from evaluation.competitor import competitors_of, label_of, values_of
from evaluation.contest import Replays, hold, replay_arms
from evaluation.families import BASELINE, TRAINING_FREE, family
from evaluation.gain import Splits
from evaluation.traces.replay import replay_settings
from evaluation.tuning.rule import token_rules_for
from lm import Sampling
from serve.settings import Policies, Settings
from tests.toys.small_pair import trace
from tests.toys.times import flat_times

TIMES = flat_times(0.2, 1.0)


@pytest.fixture(scope="module")
def splits():
    return Splits(*(trace(Sampling(temperature=0.6), copies=2, seed=seed) for seed in (1, 2)))


def test_the_two_numbers_are_the_logistic_fit_to_the_tokens_that_rounds_draft_first(splits):
    """Labels that follow a logistic law give it back; where q(y) says the opposite, the mean acceptance is left."""
    dev = splits.dev
    drafted = dev.first_drawn[dev.is_drafted]
    law = expit(0.7 * dev.signal("logit_token_prob") + 0.5)
    elsewhere = np.setdiff1d(np.arange(len(law)), drafted)
    law[elsewhere] = 0.5  # no label of the fit
    (rule,) = token_rules_for(replace(dev, drafts=dev.drafts | {"acceptance_prob": law}), [TIMES])
    assert (rule.slope, rule.offset) == pytest.approx((0.7, 0.5), abs=0.01)
    (rule,) = token_rules_for(replace(dev, drafts=dev.drafts | {"acceptance_prob": 1 - law}), [TIMES])
    assert expit(rule.offset) == pytest.approx(float(1 - law[drafted].mean()), abs=0.01)
    assert rule.slope == 0.001
    columns = {name: values for name, values in dev.drafts.items() if name != "logit_token_prob"}
    of_older_version = replace(dev, drafts=columns).signal("logit_token_prob")
    assert of_older_version == pytest.approx(dev.signal("logit_token_prob"), rel=1e-3, abs=1e-3)


def test_the_rule_is_that_of_a_head_whose_logit_is_the_calibrated_one_of_q(splits):
    rule = AutoTokenProb(0.2, 1.0, slope=0.5, offset=0.4, index_slope=0.3)
    as_head = Auto(rule.head, 0.2, 1.0, index_slope=0.3)
    assert (rule.heads, rule.signals) == ((), {"logit_token_prob"})
    played = [replay_settings(splits.test, policy).lengths for policy in (rule, as_head)]
    assert np.array_equal(*played)
    assert batched(rule, 2) == batched(as_head, 2)
    steeper = replay_settings(splits.test, AutoTokenProb(0.2, 1.0, slope=2.0, offset=0.4, index_slope=0.3)).lengths
    assert not np.array_equal(played[0], steeper)


def test_it_competes_as_a_rule_without_training_and_its_spec_is_the_policy_that_was_replayed(splits):
    arms = list(replay_arms(competitors_of({}, {}, max_draft_length=5, policies=("cumulative_token_prob",)), splits))
    contest = hold(Replays(splits, [*arms], has_token_rule=True), TIMES)
    result = contest.results[AUTO_TOKEN_PROB]
    assert not family(AUTO_TOKEN_PROB).needs_training
    assert contest.splits.gain(TRAINING_FREE).shape == (200,)
    assert AUTO_TOKEN_PROB in contest.splits.gains
    fastest = max((BASELINE, "cumulative_token_prob", AUTO_TOKEN_PROB), key=lambda name: contest.results[name].on_dev)
    assert contest.leaders[TRAINING_FREE].family == fastest
    values = [f"{key}={str(value).lower()}" for key, value in result.setting.items()]
    policy = parse_policy(f"{AUTO_TOKEN_PROB}:{','.join(values)}")
    assert policy == result.policy
    assert np.array_equal(replay_settings(splits.test, policy).lengths, result.played.lengths)
    assert label_of(AUTO_TOKEN_PROB, result.setting) == f"slope={policy.slope:g}, offset={policy.offset:g}"
    expected = f"{policy.slope:.3g} logit q(y) {policy.offset:+.3g}, two numbers fitted on dev"
    assert values_of(result.setting) == expected
    assert AUTO_TOKEN_PROB not in hold(Replays(splits, [*arms]), TIMES).results
    (served,) = [Policies(Settings(policy=f"{AUTO_TOKEN_PROB}:{','.join(values)}"), hidden_size=4, **SERVER).default]
    assert (served.heads, served.signals) == ((), {"logit_token_prob"})


SERVER = {"draft": dict, "target": dict, "warn": print}


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: parse_policy(AUTO_TOKEN_PROB), "finds on dev; take the policy in verdict.json"),
        (lambda: AutoTokenProb(0.1, 1.0, slope=0.0), "slope is 0.0"),
        (lambda: AutoTokenProb(0.1, 1.0, is_learning=True), "for trained heads, not for q"),
        (lambda: competitors_of({AUTO_TOKEN_PROB: {"slope": [1.0]}}, {}, max_draft_length=5), "solved for on dev"),
        (lambda: parse_policy(f"{AUTO_TOKEN_PROB}:head=a,t_draft_s=1.0,t_target_s=2.0"), "no parameter 'head'"),
    ],
)
def test_what_lacks_its_numbers_or_has_others_is_refused(make, problem):
    with pytest.raises(ValueError, match=problem):
        make()

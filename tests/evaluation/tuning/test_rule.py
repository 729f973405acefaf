"""The index of law 4.11 is the price at which one more draft step is worth nothing, whatever the scores' chain."""

import math
from itertools import product

import numpy as np
import pytest

from decode.policies.auto import Auto, prior_of
from decode.policies.base import AfterDraw, Outcome
from decode.policies.head import HeadPolicy
from decode.policies.scores import ScoreHead, sigmoid
from evaluation.traces.replay import replay_settings
from evaluation.tuning.rule import Pairs, autos_for, index_of, pairs_of, solve, token_scores
from heads import AcceptanceHead
from lm import Sampling
from tests.toys.small_pair import trace
from tests.toys.times import flat_times, times_by_length

GOOD, BAD = 0.95, 0.2
STAYS = {GOOD: 0.9, BAD: 0.6}
"""How often a token of either kind is followed by one of its kind."""


def chain_pairs(num: int = 400_000) -> Pairs:
    """Pairs of a chain of two kinds of token, in exact proportions."""
    rows = []
    for here, there, accepted in product((GOOD, BAD), (GOOD, BAD), (1.0, 0.0)):
        move = STAYS[here] if there == here else 1 - STAYS[here]
        rows += [(here, there, accepted)] * round(num * move * (there if accepted else 1 - there) / 40)
    return Pairs(*(np.array(column) for column in zip(*rows, strict=True)))


def worth_of_going_on(price, newest, survival=1.0, depth=14, *, scores_late=False) -> float:
    """By the tree of all continuations: the expected tokens of one more draft step and of the best that may follow,
    less their price.
    """
    worth = -price
    for there in (GOOD, BAD):
        move = STAYS[newest] if there == newest else 1 - STAYS[newest]
        later = STAYS[there] * there + (1 - STAYS[there]) * (BAD if there == GOOD else GOOD)
        worth += move * survival * there * (later if scores_late else 1.0)
        if depth > 1 and survival * there > price * 0.9:
            after = worth_of_going_on(price, there, survival * there, depth - 1, scores_late=scores_late)
            worth += move * max(0.0, after)
    return worth


@pytest.mark.parametrize("scores_late", [False, True])
def test_at_the_index_going_on_is_worth_nothing(scores_late):
    centers, values, _, _ = solve(chain_pairs(), scores_late=scores_late)
    for newest, index in zip(centers, values, strict=True):
        newest = GOOD if newest > 0.5 else BAD
        assert worth_of_going_on(0.98 * index, newest, scores_late=scores_late) > 0
        assert worth_of_going_on(1.02 * index, newest, scores_late=scores_late) < 0


def test_the_index_exceeds_the_one_step_gain_and_is_the_acceptance_where_all_tokens_are_alike():
    centers, values, _, _ = solve(chain_pairs(), scores_late=False)
    one_step = STAYS[BAD] * BAD + (1 - STAYS[BAD]) * GOOD
    assert values[centers.argmin()] > 1.2 * one_step
    assert np.all(values <= 1)
    same = Pairs(np.full(1000, 0.7), np.full(1000, 0.7), np.repeat([1.0, 0.0], [700, 300]))
    assert solve(same, scores_late=False)[1] == pytest.approx([0.7], abs=0.005)
    assert solve(same, scores_late=True)[1] == pytest.approx([0.49], abs=0.005)


@pytest.mark.parametrize("timing", ["fed", "drawn"])
def test_pairs_of_a_trace_are_accepted_tokens_and_what_the_draft_drew_next(timing):
    traced, head = trace(Sampling(temperature=0.6)), ScoreHead("perfect", timing)
    score = token_scores(traced, head)
    known = ~np.isnan(score)
    assert score[known] == pytest.approx(traced.signal("acceptance_prob")[known].astype(float), abs=1e-9)
    pairs = pairs_of(traced, head)
    assert np.all(pairs.score > 0)
    # a perfect score predicts its own outcome: below 4.5 standard errors apart
    spread = np.sqrt((pairs.next_score * (1 - pairs.next_score)).sum())
    assert abs((pairs.next_score - pairs.is_accepted).sum()) < 4.5 * spread
    index = index_of(traced, head)
    assert 0 < index.index_offset <= 1
    assert 0 < index.index_offset + index.index_slope <= 1


def test_the_rule_goes_on_exactly_while_survival_times_the_index_covers_the_price():
    known = {"throughput": 2.0, "is_online": False, "index_offset": 0.3, "index_slope": 0.5}
    drawn = Auto(ScoreHead("perfect", "drawn"), 0.1, 1.0, **known)  # type: ignore[arg-type]
    fed = Auto(ScoreHead("perfect", "fed"), 0.1, 1.0, **known, first_index=0.15)  # type: ignore[arg-type]
    for rule, firsts in ((drawn, []), (fed, [math.inf])):
        state, survival = rule.begin(rule.start()), 1.0
        for position, logit in enumerate([*firsts, 1.5, 0.5, -0.5, -1.0]):
            score = sigmoid(logit)
            survival *= score
            index = 0.15 if position == 0 and rule is fed else 0.3 + 0.5 * score
            state, stops = rule.after(state, AfterDraw(position, fed_logit=logit, drawn_logit=logit))
            assert stops == (survival * index < 2.0 * 0.1), (rule, position)


def test_the_prior_is_the_best_fixed_length_of_equal_acceptances():
    rate, profit = prior_of(0.8, 0.2)
    series = [sum(0.8**i for i in range(k + 1)) for k in range(21)]
    assert rate == pytest.approx(max(series[k] / (1 + 0.2 * k) for k in range(1, 21)))
    assert profit == pytest.approx(max(series[k] - 1 - 0.2 * k for k in range(1, 21)))
    assert prior_of(0.8, 0.2, 0.5)[0] == pytest.approx(max(series[k] / (1.5 + 0.2 * k) for k in range(1, 21)))
    assert prior_of(0.8, 0.2, 0.5)[1] == pytest.approx(profit - 0.5)
    assert prior_of(np.array([0.8, 0.1]), np.array([0.2, 0.5]))[1][1] < 0
    for logit in (-1e9, -800.0, -3.0, 0.0, 2.5, 800.0, math.inf):
        assert sigmoid(logit) == pytest.approx(float(sigmoid(np.array([logit]))[0]), abs=1e-300)


def test_times_of_the_rule_are_those_of_the_cost_model_and_it_pays_for_its_own_stops():
    assert list(flat_times(0.1, 1.0).line("", 5).values()) == [0.1, 1.0, 0.0, 0.0]
    assert list(times_by_length(0.1, (1.0, 1.5)).line("", 1).values()) == [0.1, 1.0, 0.0, 0.5]
    cost = times_by_length(0.1, tuple(1.0 + (0.4 + 0.05 * k if k else 0.0) for k in range(6)))
    times = cost.line("", 5)
    assert list(times.values()) == pytest.approx([0.1, 1.0, 0.05, 0.4])
    rule = Auto(ScoreHead("perfect", "drawn"), **times)  # type: ignore[arg-type]
    state = rule.end(rule.begin(rule.start()), Outcome(3, 2, 5, 0.0))
    assert state[4] - rule.start()[4] == pytest.approx(3 * 0.1 + cost.target_s(np.array([3]))[0])
    concave = times_by_length(0.1, tuple(20 + 16 * (1 - np.exp(-k / 3)) for k in range(21))).line("", 20)
    lengths = np.arange(1, 9)
    of_line = concave["t_target_s"] + concave["t_start_s"] + concave["t_verify_s"] * lengths
    assert abs(of_line / (20 + 16 * (1 - np.exp(-lengths / 3))) - 1).max() < 0.12, "near at the lengths in use"
    head = AcceptanceHead(4, 1, "drawn")
    cost = times_by_length(0.1, (1.0,), t_stop_s={head.shape_name: 0.03})
    assert cost.line(HeadPolicy(head).stop_kind, 5)["t_draft_s"] == pytest.approx(0.13)
    assert cost.line("", 5)["t_draft_s"] == 0.1
    dev = trace(Sampling(temperature=0.6), copies=2, seed=1)
    assert autos_for(ScoreHead("perfect", "drawn"), dev, [cost])[0].t_draft_s == 0.1, "a perfect head costs nothing"


def test_where_starting_to_verify_eats_the_gain_the_rule_does_not_draft():
    """t_target jumps from k = 0 to k = 1, as it does on small CPU models: the last token's price says nothing of
    that.
    """
    traced = trace(Sampling(temperature=0.6))
    cost = times_by_length(0.05, (1.0, *(2.6 + 0.01 * k for k in range(1, 6))))
    for is_online in (False, True):
        rule = autos_for(ScoreHead("perfect", "drawn"), traced, [cost], is_online=is_online)[0]
        replayed = replay_settings(traced, rule)
        assert cost.tokens_per_s(replayed)[0] > 0.9

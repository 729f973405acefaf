"""A batch replayed is a batch decoded (laws 4.10, 4.13), step by step, from a trace that is played to the loop; each
round of a DSpark draft has one draft step, the price of a block.
"""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from decode.policies import DSparkConfidence, FixedLength, HeadPolicy
from decode.policies.auto import Auto
from decode.policies.batch import BatchAuto, BatchController, BatchCosts, Curve, batched
from decode.policies.scores import ScoreHead
from evaluation.batches.load import Load, load_of, queue_of, step_through
from evaluation.report.batches import estimator_of
from evaluation.traces.replay import replay_rounds
from evaluation.traces.sampler import PlayedSampler
from evaluation.traces.trace import Trace
from evaluation.tuning.rule import batch_auto_for
from lm import Sampling
from tests.evaluation.traces import forms
from tests.toys import small_pair
from tests.toys.loop import POLICIES, WITHOUT_HEAD, Recalling, decoder_of, toy_head
from tests.toys.random_drafts import BLOCK, draft, feature_head
from tests.toys.traces import traced

COSTS = BatchCosts(Curve.line(0.2), Curve.line(1.0, 0.05))
LINES = {"head": toy_head("drawn", seed=2), "costs": COSTS, "batch_size": 3, "index_slope": 0.4}
CURVES = BatchCosts(Curve((1, 2, 4), (0.1, 0.2, 0.25)), Curve((1, 5, 9), (1, 1, 3)))
RULES = {
    "known": BatchAuto(**LINES, throughput=2.5),
    "learned": BatchAuto(**LINES | {"head": toy_head("fed", seed=2)}),
    "learning": BatchAuto(**LINES, is_learning=True),
    "without_head": BatchAuto(**LINES | {"head": WITHOUT_HEAD.head}),
    "curves": BatchAuto(**LINES | {"costs": CURVES, "index_slope": 0.3}),
}
HEAD = feature_head("prefix", draft("rnn").hidden_size)
BLOCK_COSTS = BatchCosts(Curve.line(0.4), Curve.line(1.0, 0.12))
WARM = Sampling(temperature=0.8)


def some(num: int, limit: int = 4):
    _, every = traced("plain", limit, 3, (2,))
    return every.select(range(0, len(every.rows), len(every.rows) // num))


@pytest.fixture(scope="module")
def blocks() -> Trace:
    return forms.traced("rnn", num=20)


def assert_same_load(one: Load, other: Load) -> None:
    width = max(one.steps.shape[1], other.steps.shape[1])
    steps = [np.pad(each.steps, ((0, 0), (0, width - each.steps.shape[1]))) for each in (one, other)]
    assert np.array_equal(*steps)
    for name in ("num_tokens", "emitted"):
        assert np.array_equal(getattr(one, name), getattr(other, name)), name
    for name in ("begins", "ends"):
        assert sorted(getattr(one, name)) == sorted(getattr(other, name)), name


SIZED = [(policy, 3) for policy in POLICIES | RULES]
SIZED += [(policy, size) for policy in ("ada_edl", *RULES) for size in (1, 8)]


@pytest.mark.parametrize(("policy", "size"), SIZED)
def test_a_batch_of_replay_is_the_batch_of_the_loop(policy, size):
    trace, chosen = some(40), (POLICIES | RULES)[policy]
    rows = queue_of(len(trace.rows), 2)[:24]
    requests = [trace.rows[row] for row in rows]
    draws = [PlayedSampler(trace, row) for row in rows.tolist()]
    prompts, limits = [row.prompt_ids for row in requests], [row.limit for row in requests]
    batch = decoder_of(chosen, length=3).batch(prompts, limits, batch_size=size, generator=draws)
    played = list(batch)
    assert [each.token_ids for each in batch.generations] == [row.response_ids for row in requests]
    replayed = step_through(trace, chosen, rows, size)  # until a row is left empty
    played = played[: len(replayed.emitted)]
    assert [tuple(filter(None, steps)) for steps in replayed.steps.tolist()] == [one.steps for one in played]
    assert replayed.num_tokens.tolist() == [one.num_tokens for one in played]
    assert replayed.emitted.tolist() == [one.num_emitted for one in played]


TOYS = ("never_draft", "ada_edl", "self_verify", "learning_head", "recalling")
OF_BLOCKS = {name: POLICIES[name] for name in ("ada_edl", "self_verify", "recalling", "never_draft")}
OF_BLOCKS |= {"fixed_length": FixedLength(3), "confidence": DSparkConfidence(0.4), "head": HeadPolicy(HEAD, 0.5)}
OF_BLOCKS["product"] = DSparkConfidence(0.2, is_product=True)
LEARNING = Recalling(), HeadPolicy(ScoreHead("perfect", "drawn"), 0.5, is_learning=True)
"""They read numbers of recorded models."""
INDEPENDENT = [("toys", POLICIES[name], size) for name in TOYS for size in (1, 7)]
INDEPENDENT += [("blocks", policy, size) for policy in OF_BLOCKS.values() for size in (1, 6)]
INDEPENDENT += [("models", policy, 5) for policy in LEARNING]


@pytest.mark.parametrize(("kind", "policy", "size"), INDEPENDENT)
def test_sequences_that_do_not_depend_on_each_other_need_no_stepping(kind, policy, size, blocks):
    trace = {"toys": lambda: some(20), "blocks": lambda: blocks, "models": lambda: small_pair.trace(WARM)}[kind]()
    rows = queue_of(len(trace.rows), size)
    ours = load_of(replay_rounds(trace, policy), rows, size)
    assert_same_load(ours, step_through(trace, policy, rows, size))
    assert kind != "blocks" or ours.steps.shape[1] <= 1, "a block is one draft step, whatever is kept of it"


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_load_costs_what_its_rounds_cost_and_a_full_batch_of_one_policy_is_always_full(size):
    trace = some(20)
    load = load_of(replay_rounds(trace, FixedLength(2)), queue_of(len(trace.rows), size), size)
    assert (load.num_tokens >= size).all()
    assert (load.steps[:, 0] <= size).all()
    seconds = [
        sum(float(COSTS.draft(num)) for num in steps if num) + float(COSTS.target(tokens))
        for steps, tokens in zip(load.steps, load.num_tokens, strict=True)
    ]
    waits = [sum(seconds[begin:end]) for begin, end in zip(load.begins, load.ends, strict=True)]
    throughput = load.throughput(COSTS)
    assert throughput.request_s == pytest.approx(np.mean(waits))
    assert throughput.tokens_per_s == pytest.approx(load.emitted.sum() / sum(seconds))


def test_the_rule_is_law_4_13_where_curves_are_lines():
    pace = BatchController(replace(RULES["known"], throughput=2.0))
    own_price, step_price = 2.0 * 0.05, 2.0 * 0.2
    generator = np.random.default_rng(0)
    for _ in range(300):
        worth = generator.uniform(0, 0.4, generator.integers(1, 7))
        wants = worth >= own_price
        goes_on = (worth[wants] - own_price).sum() >= step_price
        assert pace.continuing(worth, 5).tolist() == (wants & goes_on).tolist()


@pytest.mark.parametrize("kind", ["toys", "blocks"])
def test_the_lambda_of_the_rule_is_the_throughput_that_it_leads_to(kind, blocks):
    trace, head, costs = (some(40), toy_head("drawn", seed=2), COSTS) if kind == "toys" else (blocks, HEAD, BLOCK_COSTS)
    rule = batch_auto_for(head, trace, costs, 4)
    assert (rule.block_size == BLOCK) == (kind == "blocks")
    reached = step_through(trace, rule, queue_of(len(trace.rows), 4), 4).throughput(costs).tokens_per_s
    assert reached == pytest.approx(rule.throughput, rel=5e-3)


def test_auto_is_the_batch_rule_in_a_batch_and_other_policies_are_themselves():
    head = toy_head("drawn", seed=2)
    rule = batched(Auto(head, 0.2, 1.0, t_verify_s=0.05, index_slope=0.2), 8)
    assert (rule.batch_size, rule.index_slope, rule.throughput) == (8, 0.2, None)
    assert rule.costs.target(9) - rule.costs.target(8) == pytest.approx(0.05)
    assert batched(FixedLength(3), 8) == FixedLength(3)
    assert not rule.is_learning
    assert batched(replace(Auto(head, 0.2, 1.0), is_learning=True), 8).is_learning


def test_a_curve_goes_on_as_it_ends_and_one_that_is_none_is_refused():
    curve = Curve((1, 4, 8), (1.0, 1.0, 3.0))
    assert [float(curve(number)) for number in (0, 1, 3, 6, 8, 10)] == [1.0, 1.0, 1.0, 2.0, 3.0, 4.0]
    for numbers, seconds in (((), ()), ((1, 1), (1, 2)), ((1, 2), (1,)), ((1, 2), (1, 0))):
        with pytest.raises(ValueError, match="rising numbers"):
            Curve(numbers, seconds)


@dataclass(frozen=True)
class Priced(HeadPolicy):
    """Stops before each token that is not worth `1 - max_rejection_prob`."""

    def stop_before(self, state, signals):
        return state[0] * self.score(state[1], signals) < 1.0 - self.max_rejection_prob


@pytest.mark.parametrize("size", [1, 6])
@pytest.mark.parametrize("price", [0.35, 0.45, 0.6])
def test_where_verification_is_a_line_a_token_is_kept_iff_it_is_worth_its_price(price, size, blocks):
    """The price is lambda times the slope of t_target; the seconds of the draft are none of it."""
    rule = BatchAuto(HEAD, BLOCK_COSTS, size, throughput=price / 0.12, block_size=BLOCK)
    rows = queue_of(len(blocks.rows), size)
    alone = load_of(replay_rounds(blocks, Priced(HEAD, 1.0 - price, is_calibrated=True)), rows, size)
    assert_same_load(alone, step_through(blocks, rule, rows, size))
    dear = replace(rule, costs=BLOCK_COSTS._replace(draft=Curve.line(9.0)))
    assert_same_load(alone, step_through(blocks, dear, rows, size))
    assert 0 < alone.num_tokens.sum() < step_through(blocks, FixedLength(BLOCK), rows, size).num_tokens.sum()


def test_the_drafts_own_confidence_is_a_head_of_the_rule_and_learns(blocks):
    """The rule keeps what the threshold on the product keeps that is the price of a token."""
    alone = DSparkConfidence(0.3, is_product=True)
    rule = BatchAuto(ScoreHead("confidence"), BLOCK_COSTS, 4, throughput=0.3 / 0.12, block_size=BLOCK)
    rows = queue_of(len(blocks.rows), 4)
    expected = load_of(replay_rounds(blocks, alone), rows, 4)
    assert_same_load(expected, step_through(blocks, rule, rows, 4))
    learning = step_through(blocks, replace(rule, throughput=None, is_learning=True), rows, 4)
    assert not np.array_equal(learning.num_tokens, expected.num_tokens)


def test_the_estimator_is_the_regression_over_all_that_verification_reveals(blocks):
    fitted, logits = estimator_of(blocks), blocks.logit(ScoreHead("max_prob"))
    gradient, start = np.zeros(2), blocks.num_positions
    for length, passing in zip(blocks.branch_lengths.tolist(), blocks.num_passing.tolist(), strict=True):
        for at in range(start, start + min(length, passing + 1)):
            error = blocks.signal("acceptance_prob")[at] - 1 / (1 + np.exp(-fitted.calibrated_logit(logits[at])))
            gradient += error * np.array([1.0, logits[at]])
        start += length
    np.testing.assert_allclose(gradient, 0, atol=1e-2)  # at the optimum; a histogram's bins are 1/64 wide


def test_with_a_head_that_scores_what_is_drawn_the_next_token_has_its_index(blocks):
    head = feature_head("drawn", draft("rnn").hidden_size)
    rule = batch_auto_for(head, blocks, BLOCK_COSTS, 4)
    assert rule.block_size == BLOCK
    assert not rule.looks_ahead
    rows, dear = queue_of(len(blocks.rows), 4), BLOCK_COSTS._replace(draft=Curve.line(9.0))
    load = step_through(blocks, rule, rows, 4)
    assert_same_load(load, step_through(blocks, replace(rule, costs=dear), rows, 4))
    assert 4 * len(load.emitted) < load.num_tokens.sum()

"""Batches of a DSpark draft, replayed (law 4.13 with the price of a block): each round has one draft step."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from data_gen.responses.exchange import Exchange
from decode.policies import DSparkConfidence, FixedLength, HeadPolicy
from decode.policies.base import Policy
from decode.policies.batch import BatchCosts, BlockAuto, Curve
from evaluation.batches.load import load_of, queue_of, step_through
from evaluation.report.batches import estimator_of
from evaluation.traces.bounds import ScoreHead
from evaluation.traces.coupling import Recorder
from evaluation.traces.recording import record_trace
from evaluation.traces.replay import replay_rounds
from evaluation.traces.trace import Trace
from evaluation.tuning.rule import batch_auto_for
from lm import Sampling
from tests.evaluation.batches.test_batch_replay import assert_same_load
from tests.toys.loop import POLICIES
from tests.toys.random_drafts import BLOCK, VOCAB, draft, feature_head, target

LIMIT, EOS, SAMPLING = 12, 4, Sampling(temperature=1.3)
HEAD = feature_head("prefix", draft("rnn").hidden_size)
COSTS = BatchCosts(Curve.line(0.4), Curve.line(1.0, 0.12))
INDEPENDENT = {
    "fixed_length": FixedLength(3),
    "confidence": DSparkConfidence(0.4),
    "product": DSparkConfidence(0.2, is_product=True),
    "head": HeadPolicy(HEAD, 0.5),
    **{name: POLICIES[name] for name in ("ada_edl", "self_verify", "learned_prob", "never_draft")},
}


@pytest.fixture(scope="module")
def trace() -> Trace:
    """Of texts that need not be likely, which a coupling does not ask for."""
    generator = np.random.default_rng(0)
    texts = [generator.integers(0, VOCAB, LIMIT).tolist() for _ in range(20)]
    texts = [text[: text.index(EOS) + 1] if EOS in text else text for text in texts]
    ends = ["stop" if text[-1] == EOS else "length" for text in texts]
    exchanges = [Exchange(str(i), "", [1, 2, 3], *text) for i, text in enumerate(zip(texts, ends, strict=True))]
    recorder = Recorder(draft("rnn"), target(), SAMPLING, VOCAB, frozenset({EOS}), BLOCK)
    return record_trace(recorder, exchanges, max_new_tokens=LIMIT)


@dataclass(frozen=True)
class Priced(HeadPolicy):
    """Stops before each token that is not worth `1 - max_rejection_prob`."""

    def stop_before(self, state, signals):
        return self.scored_before(state[0], state[1], signals) < 1.0 - self.max_rejection_prob


@pytest.mark.parametrize("size", [1, 6])
@pytest.mark.parametrize("policy", INDEPENDENT)
def test_sequences_that_do_not_depend_on_each_other_need_no_stepping(policy, size, trace):
    rows = queue_of(len(trace.rows), size)
    ours = load_of(replay_rounds(trace, INDEPENDENT[policy]), rows, size)
    assert_same_load(ours, step_through(trace, INDEPENDENT[policy], rows, size))
    assert ours.steps.shape[1] <= 1, "a block is one draft step, whatever is kept of it"


@pytest.mark.parametrize("size", [1, 6])
@pytest.mark.parametrize("price", [0.25, 0.45, 0.6])
def test_where_verification_is_a_line_a_token_is_kept_iff_it_is_worth_its_price(price, size, trace):
    """The price is lambda times the slope of t_target; the seconds of the draft are none of it."""
    rule = BlockAuto(HEAD, COSTS, size, throughput=price / 0.12, block_size=BLOCK)
    rows = queue_of(len(trace.rows), size)
    alone = load_of(replay_rounds(trace, Priced(HEAD, 1.0 - price, is_calibrated=True)), rows, size)
    assert_same_load(alone, step_through(trace, rule, rows, size))
    dear = replace(rule, costs=COSTS._replace(draft=Curve.line(9.0)))
    assert_same_load(alone, step_through(trace, dear, rows, size))
    assert 0 < alone.num_tokens.sum() < step_through(trace, FixedLength(BLOCK), rows, size).num_tokens.sum()


def test_the_dearer_a_verified_token_the_fewer_are_verified(trace):
    tokens = []
    for each_s in (0.0, 0.1, 0.3, 1.0):
        rule = BlockAuto(HEAD, BatchCosts(Curve.line(0.4), Curve.line(1.0, each_s)), 4, block_size=BLOCK)
        load = step_through(trace, rule, queue_of(len(trace.rows), 4), 4)
        tokens.append(load.num_tokens.sum() / load.emitted.sum())
    assert tokens == sorted(tokens, reverse=True)
    assert tokens[0] > tokens[-1]


def test_the_lambda_of_the_rule_is_the_throughput_that_it_leads_to(trace):
    rule = batch_auto_for(HEAD, trace, COSTS, 4)
    assert isinstance(rule, BlockAuto)
    assert rule.block_size == BLOCK
    reached = step_through(trace, rule, queue_of(len(trace.rows), 4), 4).throughput(COSTS).tokens_per_s
    assert reached == pytest.approx(rule.throughput, rel=5e-3)


@dataclass(frozen=True)
class LargestProduct(Policy):
    """Stops before the product of the largest probabilities falls below `floor`."""

    floor: float = 0.3
    signals = frozenset({"max_prob"})

    def start(self):
        return (1.0,)

    def begin(self, state):
        return (0.0 * state[0] + 1.0,)

    def stop_before(self, state, signals):
        return state[0] * signals.max_prob < self.floor

    def after(self, state, drawn):
        return (state[0] * drawn.max_prob,), False


@pytest.mark.parametrize(
    ("score", "alone"), [("confidence", DSparkConfidence(0.3, is_product=True)), ("max_prob", LargestProduct(0.3))]
)
def test_the_drafts_own_confidence_and_its_largest_probability_are_heads_of_the_rule_and_learn(score, alone, trace):
    """The rule keeps what the threshold on the product keeps that is the price of a token."""
    rule = BlockAuto(ScoreHead(score), COSTS, 4, throughput=0.3 / 0.12, block_size=BLOCK)
    rows = queue_of(len(trace.rows), 4)
    expected = load_of(replay_rounds(trace, alone), rows, 4)
    assert_same_load(expected, step_through(trace, rule, rows, 4))
    learning = step_through(trace, replace(rule, throughput=None, is_learning=True), rows, 4)
    assert learning.num_tokens.sum() != expected.num_tokens.sum()


def test_the_estimator_is_the_regression_over_all_that_verification_reveals(trace):
    fitted, logits = estimator_of(trace), trace.logit(ScoreHead("max_prob"))
    gradient, start = np.zeros(2), trace.num_positions
    for length, passing in zip(trace.branch_lengths.tolist(), trace.num_passing.tolist(), strict=True):
        for at in range(start, start + min(length, passing + 1)):
            error = trace.signal("acceptance_prob")[at] - 1 / (1 + np.exp(-fitted.calibrated_logit(logits[at])))
            gradient += error * np.array([1.0, logits[at]])
        start += length
    np.testing.assert_allclose(gradient, 0, atol=1e-2)  # at the optimum; a histogram's bins are 1/64 wide


def test_with_a_head_that_scores_what_is_drawn_the_next_token_has_its_index(trace):
    head = feature_head("drawn", draft("rnn").hidden_size)
    rule = batch_auto_for(head, trace, COSTS, 4)
    assert isinstance(rule, BlockAuto)
    assert not rule.looks_ahead
    rows, dear = queue_of(len(trace.rows), 4), COSTS._replace(draft=Curve.line(9.0))
    load = step_through(trace, rule, rows, 4)
    assert_same_load(load, step_through(trace, replace(rule, costs=dear), rows, 4))
    assert 4 * len(load.emitted) < load.num_tokens.sum()

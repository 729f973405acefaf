"""A batch replayed is a batch decoded (laws 4.10, 4.13), step by step, from a trace that is played to the loop."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from decode import SpeculativeDecoder
from decode.policies import FixedLength, HeadPolicy, TokenProb
from decode.policies.auto import Auto
from decode.policies.batch import BatchAuto, BatchCosts, Curve, batched
from evaluation.batches import load as batch_load
from evaluation.batches.load import Load, load_of, queue_of, step_through
from evaluation.traces.bounds import ScoreHead
from evaluation.traces.replay import Lockstep, replay_rounds, replay_settings
from evaluation.traces.sampler import PlayedSampler
from evaluation.tuning.rule import batch_auto_for
from lm import RandomSampler, Sampling
from tests.toys import small_pair
from tests.toys.enumeration import ToyModel, assert_same_law, law_of
from tests.toys.loop import AUTOS, OTHER, POLICIES, PROMPT, SAMPLINGS, LearnedProb, ToyBatch, decoder_of, toy_head
from tests.toys.traces import traced

COSTS = BatchCosts(Curve.line(0.2), Curve.line(1.0, 0.05))
LINES = {"head": toy_head("drawn", seed=2), "costs": COSTS, "batch_size": 3, "index_slope": 0.4}
CURVES = BatchCosts(Curve((1, 2, 4), (0.1, 0.2, 0.25)), Curve((1, 5, 9), (1, 1, 3)))
RULES = {
    "known": BatchAuto(**LINES, throughput=2.5),
    "learned": BatchAuto(**LINES | {"head": toy_head("fed", seed=2)}, also=toy_head("drawn", seed=2)),
    "learning": BatchAuto(**LINES, is_learning=True),
    "curves": BatchAuto(**LINES | {"costs": CURVES, "index_slope": 0.3}),
}


def some(num: int, limit: int = 4):
    _, every = traced("plain", limit, 3, (2,))
    return every.select(range(0, len(every.rows), len(every.rows) // num))


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
def test_a_batch_of_replay_is_the_batch_of_the_loop(policy, size, monkeypatch):
    monkeypatch.setattr(SpeculativeDecoder, "_batch_model", lambda self, model, num: ToyBatch(model, num))
    trace, chosen = some(40), (POLICIES | RULES)[policy]
    rows = queue_of(len(trace.rows), 2)[:24]
    requests = [trace.rows[row] for row in rows]
    draws = [PlayedSampler(trace, row) for row in rows.tolist()]
    prompts, limits = [row.prompt_ids for row in requests], [row.limit for row in requests]
    batch, rounds = decoder_of(chosen, length=3).batch(prompts, limits, batch_size=size, generator=draws)
    played = list(rounds)
    assert [each.token_ids for each in batch.generations] == [row.response_ids for row in requests]
    replayed = step_through(trace, chosen, rows, size)  # until a row is left empty
    played = played[: len(replayed.emitted)]
    assert [tuple(filter(None, steps)) for steps in replayed.steps.tolist()] == [one.steps for one in played]
    assert replayed.num_tokens.tolist() == [one.num_tokens for one in played]
    assert replayed.emitted.tolist() == [one.num_emitted for one in played]


@pytest.mark.parametrize("size", [1, 7])
@pytest.mark.parametrize("policy", ["never_draft", "ada_edl", "self_verify", "learning_head", "learned_prob"])
def test_sequences_that_do_not_depend_on_each_other_need_no_stepping(policy, size):
    trace = some(20)
    rows = queue_of(len(trace.rows), size)
    ours = load_of(replay_rounds(trace, POLICIES[policy]), rows, size)
    assert_same_load(ours, step_through(trace, POLICIES[policy], rows, size))


@pytest.mark.parametrize("policy", [LearnedProb(0.5), HeadPolicy(ScoreHead("perfect", "drawn"), 0.5, is_learning=True)])
def test_a_sequence_learns_in_a_replayed_batch_as_it_does_alone(policy):
    recorded = small_pair.trace(Sampling(temperature=0.8))
    rows = queue_of(len(recorded.rows), 5)
    assert_same_load(load_of(replay_rounds(recorded, policy), rows, 5), step_through(recorded, policy, rows, 5))


def test_lessons_withheld_or_handed_on_would_not_pass(monkeypatch):
    for mutant in (
        (batch_load.Batch, "_outcome", lambda self: Lockstep._outcome(self)._replace(feedback=())),
        (batch_load, "merged", lambda begins, first, state: state),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(*mutant, raising=False)
            with pytest.raises(AssertionError):
                test_a_sequence_learns_in_a_replayed_batch_as_it_does_alone(LearnedProb(0.5))


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
    assert throughput.seconds == pytest.approx(sum(seconds))
    assert throughput.request_s == pytest.approx(np.mean(waits))
    assert throughput.tokens_per_s == pytest.approx(load.emitted.sum() / sum(seconds))


def test_rounds_are_those_of_the_counts():
    trace, policy = some(30), TokenProb(np.array([0.2, 0.4, 0.6]))
    rounds, counts = replay_rounds(trace, policy), replay_settings(trace, policy).counts
    columns = {"num_drafted": rounds.drafted, "num_draft_forwards": rounds.forwards, "num_emitted": rounds.emitted}
    for name, column in columns.items():
        expected = getattr(counts, name)
        assert np.array_equal(np.bincount(rounds.lane, column, minlength=expected.size), expected.ravel())


def test_the_rule_is_law_4_13_where_curves_are_lines():
    pace = replace(RULES["known"], throughput=2.0).controller()
    own_price, step_price = 2.0 * 0.05, 2.0 * 0.2
    generator = np.random.default_rng(0)
    for _ in range(300):
        worth = generator.uniform(0, 0.4, generator.integers(1, 7))
        wants = worth >= own_price
        goes_on = (worth[wants] - own_price).sum() >= step_price
        assert pace.continuing(worth, 5).tolist() == (wants & goes_on).tolist()


def test_the_lambda_of_the_rule_is_the_throughput_that_it_leads_to():
    trace = some(40)
    rule = batch_auto_for(toy_head("drawn", seed=2), trace, COSTS, 4)
    reached = step_through(trace, rule, queue_of(len(trace.rows), 4), 4).throughput(COSTS).tokens_per_s
    assert reached == pytest.approx(rule.throughput, rel=2e-3)


def test_auto_is_the_batch_rule_in_a_batch_and_other_policies_are_themselves():
    head = toy_head("drawn", seed=2)
    rule = batched(Auto(head, 0.2, 1.0, t_verify_s=0.05, index_slope=0.2), 8)
    assert isinstance(rule, BatchAuto)
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


@pytest.mark.parametrize("rule", AUTOS)
def test_a_sequence_has_the_targets_law_under_every_rule_of_a_batch(rule, monkeypatch):
    monkeypatch.setattr(SpeculativeDecoder, "_batch_model", lambda self, model, num: ToyBatch(model, num))
    decoder = decoder_of(AUTOS[rule], sampling=SAMPLINGS["cold"])

    def play(draws):
        other = RandomSampler(torch.Generator().manual_seed(5))
        return decoder.generate_batch([PROMPT, OTHER], [3, 4], batch_size=2, generator=[draws, other])[0].token_ids

    assert_same_law(law_of(play), ToyModel(1).law(PROMPT, 3, sampling=decoder.sampling, eos_ids=decoder.eos_ids))

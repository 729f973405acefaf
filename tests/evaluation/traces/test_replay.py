"""Replay has the law of the real loop (law 4.10), exactly: every trace of a pair of toys with its probability, against
every branch of the loop on a script of draws. Also settings side by side, totals, and what only a trace offers: the
oracle, and AdaFlash's length head.
"""

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from scipy.special import expit

from decode import SpeculativeDecoder
from decode.loop.counts import Counts
from decode.policies import AdaEDL, CumulativeTokenProb, FixedLength, LlamaCpp, Policy
from decode.policies.base import AfterDraw
from decode.policies.registry import policy_of
from decode.policies.scores import ScoreHead
from evaluation.flags.engines import ShortDrafts
from evaluation.traces.lengths import PredictedLength, fit_length, predict_length
from evaluation.traces.replay import Oracle, replay_settings
from evaluation.traces.trace import InputTensors, Trace, whole_piece
from lm import Sampling
from tests.evaluation.flags.point_mass import PointMassDrafter
from tests.evaluation.traces import forms
from tests.evaluation.traces.forms import COUNTED
from tests.toys.enumeration import ToyModel, assert_same_law, law_of
from tests.toys.loop import POLICIES, PROMPT, SAMPLINGS, WITHOUT_HEAD, decoder_of, toy_head
from tests.toys.small_pair import LENGTH
from tests.toys.small_pair import trace as small_trace
from tests.toys.times import flat_times, times_by_length
from tests.toys.traces import EOS, Toys, traced

GREEDY = Sampling(temperature=0)
CLEARANCE = 2e-5
"""A hundred times what two orders of float32 arithmetic differ by."""


@dataclass(frozen=True)
class Diary(Policy):
    """Every number that a policy reads moves its next decision, so a wrong one anywhere changes the law of the counts;
    except scores of prefix heads (for which `POLICIES` has policies) and what blocks alone have.
    """

    signals = frozenset(AfterDraw._fields) - {"position", "prefix_logit", "confidence_logit"}
    heads = toy_head("fed", seed=1), toy_head("drawn", seed=2)
    zero_feedback = (0.0,)

    def start(self):
        return 0.1, 0.0

    def begin(self, state):
        return clear(state[0] * 3.7 + 0.3), state[1] + 1

    def limit(self, state):
        return 1.0 + 3.0 * clear((state[0] * 10.0 + state[1]) / 3.0, 1 / 3, 2 / 3)

    def stop_before(self, state, signals):
        return clear(state[0] + 3 * signals.entropy + 5 * signals.max_prob + expit(signals.fed_logit), 0.8) > 0.8

    def after(self, state, drawn):
        heads = expit(drawn.drawn_logit), expit(drawn.fed_logit)
        numbers = (drawn.entropy, drawn.max_prob, drawn.token_prob, *heads, drawn.position)
        mixed = clear(state[0] + dot((3, 5, 7, 11, 13, 0.17), numbers), 0.7)
        return (mixed, state[1]), mixed > 0.7

    def feedback(self, state, drawn, acceptance_prob):
        return (acceptance_prob * (0.61 + 0.7 * drawn.token_prob + 0.23 * drawn.position + 0.37 * state[0]),)

    def end(self, state, outcome):
        *numbers, (feedback,) = outcome
        return clear(state[0] + 3.1 * feedback + dot((0.31, 0.43, 0.59, 7.0), numbers)), state[1]


def dot(weights, numbers):
    return sum(weight * number for weight, number in zip(weights, numbers, strict=True))


def clear(value, *marks):
    """value modulo 1, clear of 0, 1 and the marks: else the last bit of a float, not replay, would decide a draft's
    length.
    """
    value = value % 1.0
    nearest = min(float(np.min(np.abs(value - mark))) for mark in (0.0, 1.0, *marks))
    assert nearest > CLEARANCE, f"a decision hangs by {nearest:.1e}: change a constant of Diary"
    return value


def assert_same_counts(
    policy: Policy, sampling: str = "plain", limit: int = 3, length: int = 3, eos_ids=(EOS,), is_likeliest: bool = False
) -> None:
    """The law of all counts together is the same in replay and in the loop, to 1e-9; `is_likeliest`: of a draft that
    proposes its likeliest tokens.
    """
    law = SAMPLINGS[sampling]
    if is_likeliest:
        weights, trace = Toys(law, limit=limit, length=length, eos_ids=eos_ids, draft_sampling=GREEDY).trace()
        limits = {"eos_ids": frozenset(eos_ids), "max_draft_length": length}
        decoder = SpeculativeDecoder(ToyModel(1), PointMassDrafter(ToyModel(2), policy), sampling=law, **limits)
    else:
        weights, trace = traced(sampling, limit, length, eos_ids)
        decoder = decoder_of(policy, sampling=law, eos_ids=eos_ids, length=length)

    def counts_of(counts: Counts) -> tuple:
        return tuple(getattr(counts, name) for name in COUNTED)

    replayed: dict[tuple[int, ...], float] = defaultdict(float)
    columns = [column[0] for column in counts_of(replay_settings(trace, policy).counts)]
    for weight, *numbers in zip(weights, *columns, strict=True):
        replayed[tuple(map(int, numbers))] += weight
    real = law_of(lambda draws: counts_of(decoder.generate(PROMPT, limit, generator=draws).counts))
    assert_same_law(dict(replayed), real, tolerance=1e-9)


CASES = [
    *((name, {}) for name in POLICIES),
    *(("auto_token_prob", {"sampling": name, "limit": 4}) for name in ("plain", "top_k", "greedy")),
    *((name, {"sampling": "top_k", "limit": 4}) for name in ("heuristic", "self_verify", "ada_edl")),
    *product(("entropy", "ada_edl", "both_heads"), ({"sampling": name} for name in SAMPLINGS if name != "plain")),
    *product(("fixed_length", "fed_head"), ({"eos_ids": ids} for ids in ((), (0, 2), (0, 1, 2)))),
    *(("longest", {"limit": limit, "length": length}) for limit in (1, 2, 3) for length in (1, 2, 5)),
    # every number that the loop tells a policy
    *(("diary", {"sampling": name, "limit": limit}) for name, limit in (("plain", 3), ("top_k", 5), ("greedy", 4))),
]


@pytest.mark.parametrize(("policy", "how"), CASES, ids=str)
def test_replay_has_the_loops_law_of_counts_for_every_policy(policy, how):
    others = {"longest": FixedLength(20), "diary": Diary(), "auto_token_prob": WITHOUT_HEAD}
    assert_same_counts((POLICIES | others)[policy], **how)


LIKELIEST = {
    "fixed": FixedLength(2),
    "p_min": LlamaCpp(n_max=3, p_min=0.6),
    "n_min": ShortDrafts(n_max=3, n_min=2, p_min=0.6),
    "n_min_of_3": ShortDrafts(n_max=3, n_min=3, p_min=0.4),
    "product": CumulativeTokenProb(0.3),
    "diary": Diary(),
}


@pytest.mark.parametrize("eos_ids", [(), (EOS,), (0, 2)])
@pytest.mark.parametrize("sampling", ["plain", "top_k", "greedy"])
@pytest.mark.parametrize("rule", LIKELIEST)
def test_replay_has_the_law_of_a_loop_with_likeliest_drafts(rule, sampling, eos_ids):
    assert_same_counts(LIKELIEST[rule], sampling, limit=4, eos_ids=eos_ids, is_likeliest=True)


class ShortAndRemembering(ShortDrafts):
    """A rule that discards short drafts and learns from each round, which loop and replay would count differently."""

    def end(self, state, outcome):
        return state


def test_discarding_short_drafts_is_refused_where_replay_would_not_be_exact():
    for sampling, policy in (("plain", ShortDrafts(n_min=np.array([0, 2]))), ("greedy", ShortAndRemembering(n_min=2))):
        with pytest.raises(ValueError, match=r"drafts of fewer than 2 tokens.*likeliest"):
            replay_settings(traced(sampling, 3, 3, (EOS,))[1], policy)
    with pytest.raises(ValueError, match="llama_cpp has no parameter 'n_min'"):  # no loop has a minimum length
        policy_of("llama_cpp", {"n_min": 2})


@pytest.fixture(scope="module")
def toys() -> Trace:
    return traced("plain", 3, 3, (EOS,))[1]


def test_settings_side_by_side_are_replayed_as_they_would_be_alone(toys):
    values = np.array([0.0, 0.2, 0.35, 0.5, 1.0])
    together = replay_settings(toys, CumulativeTokenProb(values))
    for index, value in enumerate(values):
        alone = replay_settings(toys, CumulativeTokenProb(float(value)))
        for name in COUNTED:
            assert np.array_equal(getattr(together.counts, name)[index], getattr(alone.counts, name)[0])
        assert np.array_equal(together.lengths[index], alone.lengths[0])
    with pytest.raises(ValueError, match="lengths differ"):
        replay_settings(toys, AdaEDL(np.zeros(2), np.zeros(3)))


def test_the_oracle_discards_nothing_and_runs_the_target_once_per_rejection_and_once_more(toys):
    counts = replay_settings(toys, Oracle()).counts
    assert not counts.num_discarded.any()
    before_last = np.ones(toys.num_positions, dtype=bool)
    before_last[toys.offsets[1:] - 1] = False
    rejected = np.add.reduceat(toys.is_rejected & before_last, toys.offsets[:-1])
    assert np.array_equal(counts.num_target[0], rejected + 1)
    with pytest.raises(ValueError, match="outcomes"):  # no loop knows outcomes
        decoder_of(Oracle())


@cache
def least_s(is_rejected: tuple[bool, ...], round_s: tuple[float, ...]) -> float:
    """The least time of one response, over every draft length of every round, drafts past a rejection included."""
    if not is_rejected:
        return 0.0
    ahead = is_rejected.index(True) if any(is_rejected) else len(is_rejected)
    longest = min(len(round_s), len(is_rejected))
    return min(round_s[k] + least_s(is_rejected[min(k, ahead) + 1 :], round_s) for k in range(longest))


TIMES = {
    "drafting an accepted token costs more than the target's own": flat_times(1.5, 1.0),
    "as much": flat_times(1.0, 1.0),
    "less": flat_times(0.2, 1.0),
    "verification grows": times_by_length(0.3, (1.0, 1.4, 1.8, 2.2, 2.6, 3.0)),
    "verification has a start": times_by_length(0.3, (1.0, 2.1, 2.2, 2.3, 2.4, 2.5)),
    "verification jumps": times_by_length(0.3, (1.0, 1.0, 1.0, 2.5, 2.5, 2.5)),
}


@pytest.fixture(scope="module")
def well_accepted() -> Trace:
    return small_trace(Sampling(temperature=0.6), copies=5)


@pytest.mark.parametrize("name", TIMES)
def test_the_oracle_takes_the_least_time_that_any_choice_takes(name, well_accepted):
    cost, traced = TIMES[name], well_accepted
    oracle = replay_settings(traced, Oracle(cost.round_s(LENGTH)))
    outcomes = [tuple(traced.is_rejected[slice(*ends)].tolist()) for ends in pairwise(traced.offsets)]
    assert cost.time_s(oracle)[0] == pytest.approx([least_s(one, cost.round_s(LENGTH)) for one in outcomes])
    all_drafted, alone = cost.time_s(replay_settings(traced, Oracle()))[0], cost.alone_s * np.diff(traced.offsets)
    assert oracle.counts.num_discarded.sum() == 0
    if name == "less":
        assert cost.time_s(oracle)[0] == pytest.approx(all_drafted)
    elif name.startswith("verification"):
        assert cost.time_s(oracle).sum() < min(all_drafted.sum(), alone.sum()) - 1e-9 or name == "verification grows"
    elif name.startswith("drafting"):
        assert cost.time_s(oracle)[0] == pytest.approx(alone)


WIDTH, MARKOV = 3, 2


@pytest.fixture(scope="module")
def planted() -> tuple[Trace, torch.Tensor]:
    """A trace of blocks whose expected accepted length is 3 * last[0] - mean[1] + 0.5 of their states, and that length.
    What follows the states is a Markov head's.
    """
    trace, generator = forms.traced("rnn"), torch.Generator().manual_seed(0)
    lengths = trace.branch_lengths.tolist()
    hidden = torch.randn(len(trace.token), WIDTH + MARKOV, generator=generator)
    prob = torch.from_numpy(trace.drafts["acceptance_prob"][trace.num_positions :])
    expected = torch.stack([block.cumprod(0).sum() for block in prob.split(lengths)])
    for block, label in zip(hidden[trace.num_positions :].split(lengths), expected, strict=True):
        if len(block):
            block[-1, 0] = (label + block[:, 1].mean() - 0.5) / 3
    inputs = InputTensors(hidden, torch.arange(1), torch.zeros(1, WIDTH))
    return replace(trace, pieces=(whole_piece(lambda: inputs, len(hidden)),), drafts=dict(trace.drafts)), expected


def test_a_fit_recovers_a_linear_rule_and_reads_no_state_that_depends_on_a_drawn_token(planted):
    trace, expected = planted
    weights = fit_length(trace)
    torch.testing.assert_close(weights, torch.tensor([0, -1, 0, 3, 0, 0, 0.5]).double(), atol=1e-5, rtol=0)
    predict_length(trace, weights)
    at = trace.first_drawn[trace.branch_lengths > 0]
    predicted = trace.logit(ScoreHead("length"))[at]
    np.testing.assert_allclose(predicted, expected[trace.branch_lengths > 0], atol=1e-5)
    assert fit_length(replace(trace, pieces=())) is None
    assert fit_length(forms.traced("eagle")) is None, "no blocks"


@pytest.mark.parametrize("extra", [-1.0, 0.0, 0.7, forms.LENGTH])
def test_counts_of_predicted_lengths_are_those_by_hand(planted, extra):
    trace, _ = planted
    predict_length(trace, fit_length(trace))
    predicted = trace.logit(ScoreHead("length"))[trace.first_drawn]
    played = replay_settings(trace, PredictedLength(np.array([extra])))
    for number, (row, start) in enumerate(zip(trace.rows, trace.offsets, strict=False)):
        at, drafted, accepted, rounds = int(start), 0, 0, 0
        while at < trace.offsets[number + 1]:
            room = max(min(start + row.limit - at - 1, trace.branch_lengths[at]), 0)
            length = min(max(np.ceil(predicted[at] + extra), 0), room)
            passed = min(length, trace.num_passing[at])
            at, drafted, accepted, rounds = at + int(passed) + 1, drafted + length, accepted + passed, rounds + 1
        counts = [played.counts.num_drafted, played.counts.num_accepted, played.counts.num_target]
        assert [each[0, number] for each in counts] == [drafted, accepted, rounds]

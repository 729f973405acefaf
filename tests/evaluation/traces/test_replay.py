"""Replay has the law of the real loop (law 4.10), exactly: every trace of a pair of toys with its probability, against
every branch of the loop on a script of draws.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import pytest
from scipy.special import expit

import decode.loop.drafter
from decode import SpeculativeDecoder
from decode.loop.rounds import Counts
from decode.policies import CumulativeTokenProb, FixedLength, LlamaCpp, Policy
from decode.policies.base import AfterDraw
from decode.policies.registry import make_policy
from evaluation.flags.engines import ShortDrafts
from evaluation.traces.replay import replay_settings
from lm import Sampling, revealed_probs
from tests.evaluation.flags.point_mass import PointMassDrafter
from tests.evaluation.traces.forms import COUNTED
from tests.toys.enumeration import ToyModel, assert_same_law, law_of
from tests.toys.loop import POLICIES, PROMPT, SAMPLINGS, LearnedProb, decoder_of, toy_head
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
    fed_head = toy_head("fed", seed=1)
    drawn_head = toy_head("drawn", seed=2)

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


def counts_of(counts: Counts) -> tuple[int, ...]:
    return tuple(getattr(counts, name) for name in COUNTED)


def assert_same_counts(
    policy: Policy,
    sampling: str = "plain",
    *,
    limit: int = 3,
    length: int = 3,
    eos_ids: tuple[int, ...] = (EOS,),
    is_likeliest: bool = False,
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
    counts = replay_settings(trace, policy).counts
    replayed: dict[tuple[int, ...], float] = defaultdict(float)
    for weight, *numbers in zip(weights, *(column[0] for column in counts_of(counts)), strict=True):
        replayed[tuple(map(int, numbers))] += weight
    real = law_of(lambda draws: counts_of(decoder.generate(PROMPT, limit, generator=draws).counts))
    assert_same_law(dict(replayed), real, tolerance=1e-9)


@pytest.mark.parametrize("policy", POLICIES)
def test_replay_has_the_loops_law_of_counts_for_every_policy(policy):
    assert_same_counts(POLICIES[policy])


@pytest.mark.parametrize(("sampling", "limit"), [("plain", 3), ("top_k", 5), ("greedy", 4)])
def test_replay_tells_a_policy_every_number_that_the_loop_tells_it(sampling, limit):
    assert_same_counts(Diary(), sampling, limit=limit)


@pytest.mark.parametrize("policy", ["heuristic", "self_verify", "ada_edl"])
def test_replay_has_the_loops_law_for_policies_that_remember_rounds_over_several(policy):
    assert_same_counts(POLICIES[policy], "top_k", limit=4)


@pytest.mark.parametrize("sampling", sorted(set(SAMPLINGS) - {"plain"}))
@pytest.mark.parametrize("policy", ["entropy", "ada_edl", "both_heads"])
def test_replay_has_the_loops_law_under_every_sampling(policy, sampling):
    assert_same_counts(POLICIES[policy], sampling)


@pytest.mark.parametrize("eos_ids", [(), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("policy", ["fixed_length", "fed_head"])
def test_replay_has_the_loops_law_with_no_eos_and_with_several(policy, eos_ids):
    assert_same_counts(POLICIES[policy], eos_ids=eos_ids)


@pytest.mark.parametrize("limit", [1, 2, 3])
@pytest.mark.parametrize("length", [1, 2, 5])
def test_replay_has_the_loops_law_at_every_length_limit_and_draft_length(limit, length):
    assert_same_counts(FixedLength(20), limit=limit, length=length)


def test_a_lesson_of_one_token_too_many_is_seen(monkeypatch):
    monkeypatch.setattr(decode.loop.drafter, "revealed_probs", lambda count, *those: revealed_probs(count + 1, *those))
    with pytest.raises(AssertionError):
        assert_same_counts(Diary(), limit=4)


class Foresight(LearnedProb):
    """Illegal: a trace has feedback before the draft has ended, and this one acts on it at once; no loop
    can.
    """

    def start(self):
        object.__setattr__(self, "foreseen", False)
        return super().start()

    def feedback(self, state, drawn, acceptance_prob):
        object.__setattr__(self, "foreseen", acceptance_prob < 0.5)
        return super().feedback(state, drawn, acceptance_prob)

    def after(self, state, drawn):
        return state, self.foreseen & (drawn.position > 0)


def test_a_policy_that_looks_at_the_future_has_not_the_loops_law():
    with pytest.raises(AssertionError):
        assert_same_counts(Foresight(), limit=4)


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


@pytest.mark.parametrize(
    ("sampling", "policy"),
    [("plain", ShortDrafts(n_min=np.array([0, 2]))), ("greedy", ShortAndRemembering(n_min=2))],
)
def test_discarding_short_drafts_is_refused_where_replay_would_not_be_exact(sampling, policy):
    with pytest.raises(ValueError, match=r"drafts of fewer than 2 tokens.*likeliest"):
        replay_settings(traced(sampling, 3, 3, (EOS,))[1], policy)
    with pytest.raises(ValueError, match="llama_cpp has no parameter 'n_min'"):  # no loop has a minimum length
        make_policy("llama_cpp", n_min=2)

"""Replay has the law of the real loop (law 4.10), exactly: every trace of a pair of toys with its probability, against
every branch of the loop on a script of draws.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import pytest
from scipy.special import expit

import decode.loop.drafter
from decode.policies import FixedLength, Policy
from decode.policies.base import AfterDraw
from evaluation.traces.replay import replay_settings
from lm import Sampler, revealed_probs
from tests.toys.enumeration import assert_same_law, law_of
from tests.toys.loop import POLICIES, PROMPT, SAMPLINGS, LearnedProb, decoder_of, toy_head
from tests.toys.traces import EOS, traced

COUNTED = ("num_emitted", "num_drafted", "num_target", "num_accepted", "num_draft_forwards")
CLEARANCE = 2e-5
"""A hundred times what two orders of float32 arithmetic differ by."""


@dataclass(frozen=True)
class Diary(Policy):
    """Every number that a policy is ever told moves its next decision: a wrong one anywhere changes the law of the
    counts.

    But for what a prefix head says, which is all that the prefix heads of `POLICIES` are told, and for what blocks
    alone have.
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

    def stop_before(self, state, seen):
        return clear(state[0] + 3 * seen.entropy + 5 * seen.max_prob + expit(seen.fed_logit), 0.8) > 0.8

    def after(self, state, drawn):
        told = (
            drawn.entropy,
            drawn.max_prob,
            drawn.token_prob,
            expit(drawn.drawn_logit),
            expit(drawn.fed_logit),
            drawn.position,
        )
        mixed = clear(
            state[0] + sum(weight * number for weight, number in zip((3, 5, 7, 11, 13, 0.17), told, strict=True)), 0.7
        )
        return (mixed, state[1]), mixed > 0.7

    def feedback(self, state, drawn, acceptance_prob):
        return (acceptance_prob * (0.61 + 0.7 * drawn.token_prob + 0.23 * drawn.position + 0.37 * state[0]),)

    def end(self, state, outcome):
        *numbers, (feedback,) = outcome
        mixed = 3.1 * feedback + sum(
            weight * number for weight, number in zip((0.31, 0.43, 0.59, 7.0), numbers, strict=True)
        )
        return clear(state[0] + mixed), state[1]


def clear(value, *marks):
    """value modulo 1, clear of 0, 1 and the marks: else the last bit of a float, not replay, would decide a draft's
    length.
    """
    value = value % 1.0
    nearest = min(float(np.min(np.abs(value - mark))) for mark in (0.0, 1.0, *marks))
    assert nearest > CLEARANCE, f"a decision hangs by {nearest:.1e}: change a constant of Diary"
    return value


def assert_same_counts(
    policy: Policy, sampling: str = "plain", *, limit: int = 3, length: int = 3, eos_ids: tuple[int, ...] = (EOS,)
) -> None:
    """The law of all counts together is the same in replay and in the loop, to 1e-9."""
    weights, trace = traced(sampling, limit, length, eos_ids)
    counts = replay_settings(trace, policy).counts
    replayed: dict[tuple[int, ...], float] = defaultdict(float)
    for weight, *numbers in zip(weights, *(getattr(counts, name)[0] for name in COUNTED), strict=True):
        replayed[tuple(map(int, numbers))] += weight
    decoder = decoder_of(policy, sampling=SAMPLINGS[sampling], eos_ids=eos_ids, length=length)

    def play(draws: Sampler) -> tuple[int, ...]:
        counts = decoder.generate(PROMPT, limit, generator=draws).counts
        return tuple(getattr(counts, name) for name in COUNTED)

    assert_same_law(dict(replayed), law_of(play), tolerance=1e-9)


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

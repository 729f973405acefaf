"""Replay has the law of the real loop (law 4.10), exactly: every trace of a pair of toys with its probability, against
every branch of the loop on a script of draws.
"""

from collections import defaultdict
from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
from scipy.special import expit

from decode import SpeculativeDecoder
from decode.loop.rounds import Counts
from decode.policies import CumulativeTokenProb, FixedLength, LlamaCpp, Policy
from decode.policies.base import AfterDraw
from decode.policies.registry import policy_of
from evaluation.flags.engines import ShortDrafts
from evaluation.traces.replay import replay_settings
from lm import Sampling
from tests.evaluation.flags.point_mass import PointMassDrafter
from tests.evaluation.traces.forms import COUNTED
from tests.toys.enumeration import ToyModel, assert_same_law, law_of
from tests.toys.loop import POLICIES, PROMPT, SAMPLINGS, decoder_of, toy_head
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
    *((name, {"sampling": "top_k", "limit": 4}) for name in ("heuristic", "self_verify", "ada_edl")),
    *product(("entropy", "ada_edl", "both_heads"), ({"sampling": name} for name in SAMPLINGS if name != "plain")),
    *product(("fixed_length", "fed_head"), ({"eos_ids": ids} for ids in ((), (0, 2), (0, 1, 2)))),
    *(("longest", {"limit": limit, "length": length}) for limit in (1, 2, 3) for length in (1, 2, 5)),
    # every number that the loop tells a policy
    *(("diary", {"sampling": name, "limit": limit}) for name, limit in (("plain", 3), ("top_k", 5), ("greedy", 4))),
]


@pytest.mark.parametrize(("policy", "how"), CASES, ids=str)
def test_replay_has_the_loops_law_of_counts_for_every_policy(policy, how):
    assert_same_counts((POLICIES | {"longest": FixedLength(20), "diary": Diary()})[policy], **how)


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

"""Policies that know nothing of the token stop before it is drawn: prefix heads (law 4.8c), and the largest
probability, learned.
"""

from dataclasses import replace

import numpy as np
import pytest

from decode.policies import AfterDraw, HeadPolicy, Policy
from decode.policies.auto import Auto
from decode.policies.scores import sigmoid
from heads import AcceptanceHead
from tests.toys.loop import LearnedMaxProb


def lengths_of(policy: Policy, logits: list[float], **signals: float) -> list[str]:
    """What becomes of each token, of a draft that goes on whatever the policy says."""
    state, said, nothing = policy.begin(policy.start()), [], dict.fromkeys(AfterDraw._fields, 0.0)
    for position, logit in enumerate(logits):
        seen = AfterDraw(**(nothing | {"position": position, "prefix_logit": logit} | signals))
        before = policy.stops_before and bool(policy.stop_before(state, seen.before))
        state, after = policy.after(state, seen)
        said.append("before" if before else "after" if after else "on")
    return said


def test_a_prefix_head_stops_before_the_token_that_it_doubts_or_keeps_it_and_stops_there():
    head, logits = AcceptanceHead(4, 0, "prefix"), [2.0, 1.0, -0.5, 3.0]
    assert [round(float(x), 2) for x in np.cumprod(sigmoid(np.array(logits)))] == [0.88, 0.64, 0.24, 0.23]
    assert lengths_of(HeadPolicy(head, 0.6), logits) == ["on", "on", "before", "before"]
    assert lengths_of(HeadPolicy(head, 0.6, keeps_newest=True), logits) == ["on", "on", "after", "after"]
    assert lengths_of(HeadPolicy(head, 0.6, min_draft_length=3), logits) == ["on", "on", "on", "before"]
    assert lengths_of(HeadPolicy(head, 0.6), [-9.0]) == ["on"], "the first token is always drafted"


def test_auto_stops_before_the_draw_only_for_the_sake_of_a_tokens_own_verification():
    head, logits = AcceptanceHead(4, 0, "prefix"), [2.0, 1.0, -0.5, -3.0]
    rule = Auto(head, 0.1, 1.0, 0.05, throughput=2.0, is_online=False, index_offset=0.5)
    # S = 0.88, 0.64, 0.24, 0.01: before at S < 2 * 0.05, after at 0.5 S < 2 * (0.1 + 0.05)
    assert lengths_of(rule, logits) == ["on", "on", "after", "before"]
    assert lengths_of(replace(rule, t_verify_s=0.0), logits) == ["on", "on", "after", "after"]


def test_the_largest_probability_learned_is_itself_at_first_and_known_before_the_draw():
    assert lengths_of(LearnedMaxProb(0.5), [0.0] * 3, max_prob=0.75) == ["on", "on", "before"]
    assert lengths_of(LearnedMaxProb(0.5), [0.0], max_prob=0.1) == ["on"]


def test_a_prefix_head_goes_alone():
    prefix, drawn = AcceptanceHead(4, 0, "prefix"), AcceptanceHead(4, 0, "drawn")
    for heads in ((prefix, drawn), (drawn, prefix)):
        with pytest.raises(ValueError, match="cannot be combined"):
            HeadPolicy(heads[0], 0.5, also=heads[1])
    with pytest.raises(ValueError, match="keeps_newest is for a prefix head"):
        HeadPolicy(drawn, 0.5, keeps_newest=True)

"""Drafts of the likeliest tokens are lossless, and so is discarding short ones; with drawn tokens it is not (laws 4.2,
4.3). Exactly, by every branch of the loop's draws on toys.
"""

import pytest

from decode import ModelDrafter, SpeculativeDecoder
from decode.policies import FixedLength, HeadPolicy, LlamaCpp, TokenProb
from evaluation.flags.engines import ShortDrafts
from tests.evaluation.flags.point_mass import PointMassDrafter
from tests.toys.enumeration import ToyModel
from tests.toys.loop import SAMPLINGS, assert_lossless, toy_head

RULES = {
    "fixed": FixedLength(2),
    "p_min": LlamaCpp(n_max=4, p_min=0.51),
    "n_min": ShortDrafts(n_max=4, n_min=2, p_min=0.51),
    "token_prob": TokenProb(0.6),
    "head": HeadPolicy(toy_head("drawn", seed=2), 0.5),
}


def decoder_of(rule, sampling="plain", eos_ids=(), make=PointMassDrafter) -> SpeculativeDecoder:
    drafter, eos_ids = make(ToyModel(2), RULES[rule]), frozenset(eos_ids)
    return SpeculativeDecoder(ToyModel(1), drafter, sampling=SAMPLINGS[sampling], eos_ids=eos_ids)


@pytest.mark.parametrize("eos_ids", [(), (2,)])
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("rule", RULES)
def test_likeliest_drafts_preserve_the_target_distribution(rule, sampling, eos_ids):
    assert_lossless(decoder_of(rule, sampling, eos_ids), 3)


class DiscardsDrawnDrafts(PointMassDrafter):
    """Illegal: draws its tokens, looks at their number, and discards them where that is small."""

    _step = ModelDrafter._step


def test_discarding_drafts_that_were_drawn_changes_the_distribution():
    with pytest.raises(AssertionError):
        assert_lossless(decoder_of("n_min", make=DiscardsDrawnDrafts), 3)

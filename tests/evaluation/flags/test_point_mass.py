"""Drafts of the likeliest tokens are lossless, and so is discarding short ones; with drawn tokens it is not (laws 4.2,
4.3). Exactly, by every branch of the loop's draws on toys.
"""

import pytest

from decode import ModelDrafter, SpeculativeDecoder
from decode.policies import FixedLength, HeadPolicy, LlamaCpp, TokenProb
from evaluation.flags.engines import ShortDrafts
from tests.evaluation.flags.point_mass import PointMassDrafter
from tests.toys.enumeration import ToyModel, assert_same_law
from tests.toys.loop import PROMPT, SAMPLINGS, law, toy_head

RULES = {
    "fixed": FixedLength(2),
    "p_min": LlamaCpp(n_max=4, p_min=0.51),
    "n_min": ShortDrafts(n_max=4, n_min=2, p_min=0.51),
    "token_prob": TokenProb(0.6),
}


def decoder_with(drafter, sampling="plain", eos_ids=(2,)) -> SpeculativeDecoder:
    return SpeculativeDecoder(ToyModel(1), drafter, sampling=SAMPLINGS[sampling], eos_ids=frozenset(eos_ids))


def assert_lossless(drafter, sampling="plain", eos_ids=(2,)) -> None:
    decoder = decoder_with(drafter, sampling, eos_ids)
    expected = ToyModel(1).law(PROMPT, 3, sampling=decoder.sampling, eos_ids=decoder.eos_ids)
    assert_same_law(law(decoder, 3), expected)


@pytest.mark.parametrize("eos_ids", [(), (2,)])
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("rule", RULES)
def test_likeliest_drafts_preserve_the_target_distribution(rule, sampling, eos_ids):
    assert_lossless(PointMassDrafter(ToyModel(2), RULES[rule]), sampling, eos_ids)


def test_every_drafted_token_is_the_likeliest_whatever_the_sampling():
    draft = ToyModel(2)
    decoder = decoder_with(PointMassDrafter(ToyModel(2), FixedLength(3)), eos_ids=())
    committed = list(PROMPT)
    for played in decoder.generate(PROMPT, 12).rounds:
        for place, token in enumerate(played.drafted):
            draft.reset()
            assert token == int(draft.feed([*committed, *played.drafted[:place]])[-1].argmax())
        committed += played.emitted


def test_a_short_draft_is_discarded_and_its_forwards_are_paid():
    decoder = decoder_with(PointMassDrafter(ToyModel(2), RULES["n_min"]), eos_ids=())
    rounds = decoder.generate(PROMPT, 60).rounds
    assert all(len(played.drafted) != 1 for played in rounds)
    discarded = [played for played in rounds if not played.drafted and played.counts.num_draft_forwards]
    assert discarded
    assert all(played.num_accepted == 0 and len(played.emitted) == 1 for played in discarded)


class DiscardsDrawnDrafts(PointMassDrafter):
    """Illegal: draws its tokens, looks at their number, and discards them where that is small."""

    _step = ModelDrafter._step


def test_discarding_drafts_that_were_drawn_changes_the_distribution():
    with pytest.raises(AssertionError):
        assert_lossless(DiscardsDrawnDrafts(ToyModel(2), RULES["n_min"]), eos_ids=())


def test_heads_score_likeliest_drafts_too():
    assert_lossless(PointMassDrafter(ToyModel(2), HeadPolicy(toy_head("drawn", seed=2), 0.5)))

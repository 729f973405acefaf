"""Each mutant of the loop fails a named test: KILLERS is the table.

The named test passes on the real loop (it runs in its own module); here it must raise AssertionError on the mutant.
"""

import pytest
import test_counts as counts
import test_losslessness as laws
import test_sampled_law as sampled
import torch

from decode.policies import FixedLength
from tests.decode.mutants import MUTANTS

PER_SAMPLING = laws.test_every_policy_preserves_the_target_law_under_every_sampling
KILLERS = {
    "residual_sign": (PER_SAMPLING, ("fixed_length", "plain")),
    "no_residual": (PER_SAMPLING, ("entropy", "plain")),
    "accept_by_target_prob": (PER_SAMPLING, ("fixed_length", "plain")),
    "accept_swapped": (PER_SAMPLING, ("token_prob", "plain")),
    "last_row_residual": (laws.test_a_vocabulary_of_five_preserves_the_target_law, ()),
    "bonus_from_previous_row": (PER_SAMPLING, ("fixed_length", "plain")),
    "q_before_warping": (PER_SAMPLING, ("fixed_length", "top_k")),
    "q_shifted": (PER_SAMPLING, ("fixed_length", "plain")),
    "drop_by_value": (PER_SAMPLING, ("fixed_length", "plain")),
    "learn_ahead": (PER_SAMPLING, ("learning_head", "plain")),
    "second_best": (laws.test_temperature_zero_emits_the_most_probable_token_each_time, ()),
    "all_agree": (laws.test_temperature_zero_emits_the_most_probable_token_each_time, ()),
    "emit_past_eos": (laws.test_nothing_is_drafted_or_emitted_after_eos, ()),
    "draft_past_eos": (laws.test_nothing_is_drafted_or_emitted_after_eos, ()),
    "overrun": (laws.test_the_length_limit_and_the_draft_length_never_change_the_law, (3, 2)),
    "no_bonus_token": (laws.test_every_round_emits_one_token_more_than_it_accepts_unless_the_drafts_eos_ends_it, ()),
    "drafts_without_the_rejected": (counts.test_counts_are_what_drafter_target_and_cache_saw, ()),
    "accepted_without_eos": (counts.test_counts_are_what_drafter_target_and_cache_saw, ()),
    "forwards_without_unused": (counts.test_counts_are_what_drafter_target_and_cache_saw, ()),
    "stale_cache": (laws.test_the_length_limit_and_the_draft_length_never_change_the_law, (3, 4)),
    "forgetful_cache": (laws.test_every_forward_feeds_the_tokens_that_the_cache_lacks_and_no_others, ()),
    "uncut_padding": (laws.test_a_padded_vocabulary_never_leaks, (5,)),
    "shared_uniforms": (sampled.assert_sampled_law, (laws.SAMPLINGS["plain"],)),
    "reseeded": (sampled.assert_sampled_law, (laws.SAMPLINGS["plain"],)),
    "count_all": (sampled.assert_sampled_law, (laws.SAMPLINGS["plain"],)),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_every_mutant_of_the_loop_fails_its_named_test(mutant, monkeypatch):
    test, arguments = KILLERS[mutant]
    monkeypatch.setattr(*MUTANTS[mutant])
    with pytest.raises(AssertionError):
        test(*arguments)


def test_drop_by_value_emits_the_law_that_the_design_works_out(monkeypatch):
    """p = q = (.5, .3, .2) with "drop if q(y) < .4" emits (.75, .15, .10): law 4.3's example, on a toy of one
    distribution.
    """
    probs = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    decoder = laws.decoder_of(FixedLength(1), eos_ids=())
    for model in (decoder.target, decoder.drafter.model):
        monkeypatch.setattr(model, "feed", lambda ids, rows=1, feed=model.feed: feed(ids, rows) * 0 + probs.log())
    first = {0: 0.0, 1: 0.0, 2: 0.0}
    monkeypatch.setattr(*MUTANTS["drop_by_value"])
    for tokens, probability in laws.law(decoder, 2).items():
        first[tokens[0]] += probability
    assert first == pytest.approx({0: 0.75, 1: 0.15, 2: 0.10}, abs=1e-12)

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
PLAIN = PER_SAMPLING, ("fixed_length", "plain")
TOYS = laws.test_vocabularies_padding_and_dtypes_of_every_kind_preserve_the_target_law
LIMITS = laws.test_the_length_limit_and_the_draft_length_never_change_the_law
GREEDY = laws.test_temperature_zero_emits_the_most_probable_token_each_time
ENDS = laws.test_a_round_emits_one_token_more_than_it_accepts_and_nothing_is_drafted_or_emitted_after_eos
COUNTS = counts.test_counts_are_what_drafter_target_and_cache_saw
KILLERS = {
    "residual_sign": PLAIN,
    "no_residual": (PER_SAMPLING, ("entropy", "plain")),
    "accept_by_target_prob": PLAIN,
    "accept_swapped": (PER_SAMPLING, ("token_prob", "plain")),
    "last_row_residual": (TOYS, ("five tokens",)),
    "bonus_from_previous_row": PLAIN,
    "q_before_warping": (PER_SAMPLING, ("fixed_length", "top_k")),
    "q_shifted": PLAIN,
    "drop_by_value": PLAIN,
    "learn_ahead": (PER_SAMPLING, ("learning_head", "plain")),
    **dict.fromkeys(("second_best", "all_agree"), (GREEDY, ())),
    **dict.fromkeys(("emit_past_eos", "draft_past_eos"), (ENDS, (3, {0, 2}))),
    "overrun": (LIMITS, (3, 2)),
    "no_bonus_token": (ENDS, (2, {2})),
    **dict.fromkeys(("drafts_without_the_rejected", "accepted_without_eos", "forwards_without_unused"), (COUNTS, ())),
    "stale_cache": (LIMITS, (3, 4)),
    "forgetful_cache": (laws.test_every_forward_feeds_the_tokens_that_the_cache_lacks_and_no_others, ()),
    "uncut_padding": (TOYS, ("padded alike",)),
    **dict.fromkeys(("shared_uniforms", "reseeded", "count_all"), (sampled.assert_sampled_law, (laws.Sampling(),))),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_every_mutant_of_the_loop_fails_its_named_test(mutant, monkeypatch):
    test, arguments = KILLERS[mutant]
    monkeypatch.setattr(*MUTANTS[mutant])
    with pytest.raises(AssertionError):
        test(*arguments)


def test_drop_by_value_emits_the_law_that_the_design_works_out(monkeypatch):
    """p = q = (.5, .3, .2) with "drop if q(y) < .4" emits (.75, .15, .10): law 4.3's example."""
    probs = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    decoder = laws.decoder_of(FixedLength(1), eos_ids=())
    for model in (decoder.target, decoder.drafter.model):
        monkeypatch.setattr(model, "feed", lambda ids, rows=1, feed=model.feed: feed(ids, rows) * 0 + probs.log())
    first = {0: 0.0, 1: 0.0, 2: 0.0}
    monkeypatch.setattr(*MUTANTS["drop_by_value"])
    for tokens, probability in laws.law(decoder, 2).items():
        first[tokens[0]] += probability
    assert first == pytest.approx({0: 0.75, 1: 0.15, 2: 0.10}, abs=1e-12)

"""Each mutant of the data stage fails the test that KILLERS names.

In its own module that test runs on the real stage, and passes; here it runs on the mutant, and must raise
AssertionError.
"""

import inspect

import pytest

from configs.schema import SamplingConfig
from lm import Sampling
from tests.data_gen.data_mutants import MUTANTS
from tests.data_gen.labels import test_labels as laws
from tests.data_gen.pipeline import test_resume as resume
from tests.data_gen.pipeline import test_run as rows

PLAIN, TRUNCATED = ({"sampling": SamplingConfig(**values)} for values in ({}, {"temperature": 0.7, "top_k": 20}))
INDEPENDENT = rows.test_labels_equal_an_independent_uncached_computation
SEEDS = laws.test_every_draw_of_a_run_has_a_seed_of_its_own
KILLERS = {
    "acceptance_swapped": (INDEPENDENT, PLAIN),
    "coin_by_equality": (rows.test_the_coin_decides_the_mixing_also_where_both_tokens_are_equal, {}),
    "coin_inverted": (INDEPENDENT, PLAIN),
    "drawn_shifted": (INDEPENDENT, PLAIN),
    "fed_shifted": (INDEPENDENT, PLAIN),
    "loss_everywhere": (INDEPENDENT, PLAIN),
    "log_q_untruncated": (INDEPENDENT, TRUNCATED),
    "log_p_untruncated": (INDEPENDENT, TRUNCATED),
    "entropy_truncated": (INDEPENDENT, TRUNCATED),
    "drawn_before_warping": (
        laws.test_draft_tokens_follow_the_q_of_the_sampling,
        {"sampling": Sampling(temperature=0.6, top_k=3)},
    ),
    "cross_entropy_swapped": (INDEPENDENT, PLAIN),
    "draws_shared_by_shards": (SEEDS, {}),
    "responses_shared_by_shards": (SEEDS, {}),
    "coins_of_the_drafts_draws": (SEEDS, {}),
    "coins_shared_by_mixes": (rows.test_each_mixing_is_a_row_of_the_fed_features, {}),
    "uniforms_shared_by_rows": (laws.test_responses_follow_the_targets_law, {}),
    "greedy_responses": (laws.test_responses_follow_the_targets_law, {}),
    "eos_dropped": (laws.test_a_response_does_not_depend_on_who_shares_its_batch, {}),
    "padding_seen": (laws.test_a_response_does_not_depend_on_who_shares_its_batch, {}),
    "uncut_padding": (INDEPENDENT, PLAIN),
    "whole_by_name": (resume.test_a_lost_or_truncated_shard_is_made_again_byte_for_byte, {}),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_every_mutant_of_the_data_stage_fails_its_named_test(mutant, request, monkeypatch):
    test, arguments = KILLERS[mutant]
    arguments = arguments | {
        name: request.getfixturevalue(name) for name in inspect.signature(test).parameters if name not in arguments
    }
    monkeypatch.setattr(*MUTANTS[mutant])
    with pytest.raises(AssertionError):
        test(**arguments)

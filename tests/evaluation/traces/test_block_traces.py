"""The trace of a DSpark draft: played to the real loop each policy has its replay's counts, one forward of the draft a
round among them.
"""

import json

import numpy as np
import pytest
from test_chain_traces import EOS, WARM, decoder_of, traced
from test_played import rows_that_differ

from decode.policies import DSparkConfidence, FixedLength, HeadPolicy
from decode.policies.auto import Auto
from evaluation.traces.disk import Place, read_trace, write_trace
from evaluation.traces.replay import replay, replay_settings
from evaluation.traces.trace import CONFIDENCE, Trace
from tests.toys.loop import OF_BLOCKS, POLICIES
from tests.toys.random_drafts import BLOCK, BLOCKS, draft, feature_head

WIDE = draft("rnn").hidden_size
HEADS = {timing: HeadPolicy(feature_head(timing, WIDE), 0.6) for timing in ("fed", "drawn", "prefix")}
BLOCK_S = {"t_draft_s": 0.0, "t_target_s": 1.0, "t_verify_s": 0.2, "t_start_s": 0.2}
HEADS |= {f"auto_{timing}": Auto(feature_head(timing, WIDE), **BLOCK_S) for timing in ("drawn", "prefix")}
HEADS["learning"] = HeadPolicy(feature_head("drawn", WIDE), 0.6, is_learning=True)
RULES = HEADS | OF_BLOCKS | {name: policy for name, policy in POLICIES.items() if not policy.heads}
RULES |= {
    "dspark_product": DSparkConfidence(0.2, is_product=True),
}


@pytest.fixture(scope="module")
def recorded() -> Trace:
    return traced("rnn")


@pytest.mark.parametrize("name", RULES)
def test_the_loop_counts_what_replay_counts_for_every_policy(name, recorded):
    assert not rows_that_differ(decoder_of("rnn", RULES[name]), RULES[name], recorded)


@pytest.mark.parametrize("kind", BLOCKS)
def test_the_loop_counts_what_replay_counts_for_every_kind_of_block(kind):
    policy = RULES["token_prob"]
    assert not rows_that_differ(decoder_of(kind, policy), policy, traced(kind, num=5))


def test_a_round_of_any_length_costs_one_forward_and_none_where_nothing_is_drafted(recorded):
    """Law 4.9 with the price of a block."""
    for length in range(1, BLOCK + 3):
        counts = replay_settings(recorded, FixedLength(length)).counts
        rounds_without = sum(row.limit == len(row.response_ids) for row in recorded.rows)
        assert counts.num_draft_forwards.sum() <= counts.num_target.sum() - len(recorded.rows)
        assert counts.num_draft_forwards.sum() >= counts.num_target.sum() - len(recorded.rows) - rounds_without
    assert replay(recorded, FixedLength(0)).num_draft_forwards == 0
    whole, longer = (replay(recorded, FixedLength(length)) for length in (BLOCK, BLOCK + 2))
    assert whole == longer, "a block is all that a round drafts"


def test_a_trace_of_blocks_is_read_back_with_its_price_and_confidences(recorded, tmp_path):
    manifest = {"sampling": WARM.as_dict(), "max_draft_length": recorded.max_draft_length, "eos_ids": [EOS]}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    write_trace(tmp_path, Place("made", "dev", 0), trace=recorded, problems=[])
    back = read_trace(tmp_path, "made", "dev", 1)
    assert back.block_size == BLOCK
    np.testing.assert_array_equal(back.signal(CONFIDENCE), recorded.signal(CONFIDENCE))
    for policy in (DSparkConfidence(0.4), FixedLength(2)):
        assert replay(back, policy) == replay(recorded, policy)


def test_confidences_are_refused_of_a_trace_whose_draft_has_none():
    for kind in ("dflash", "glide"):
        with pytest.raises(ValueError, match="has no confidence head"):
            replay(traced(kind, num=1), DSparkConfidence())


def test_a_part_of_a_trace_of_blocks_is_one(recorded):
    whole = replay_settings(recorded, FixedLength(3)).counts
    part = replay_settings(recorded.select([7, 2]), FixedLength(3)).counts
    np.testing.assert_array_equal(part.num_draft_forwards[0], whole.num_draft_forwards[0, [7, 2]])

"""What replay counts: settings side by side, draft lengths, the oracle's bound, totals, and parts of a trace."""

import numpy as np
import pytest
from toy_loop import POLICIES, decoder_of
from toy_traces import EOS, traced

from decode import replay
from decode.policies import CumulativeTokenProb
from decode.policies.bounds import Oracle
from decode.traces.replay import replay_settings

COUNTED = ("num_emitted", "num_drafted", "num_target", "num_accepted", "num_draft_forwards")


def test_settings_side_by_side_are_replayed_as_they_would_be_alone():
    _, trace = traced("plain", 3, 3, (EOS,))
    values = np.array([0.0, 0.2, 0.35, 0.5, 1.0])
    together = replay_settings(trace, CumulativeTokenProb(values))
    for index, value in enumerate(values):
        alone = replay_settings(trace, CumulativeTokenProb(float(value)))
        for name in COUNTED:
            assert np.array_equal(getattr(together.counts, name)[index], getattr(alone.counts, name)[0])
        assert np.array_equal(together.lengths[index], alone.lengths[0])


def test_draft_lengths_add_up_to_the_counts():
    _, trace = traced("plain", 3, 3, (EOS,))
    replayed = replay_settings(trace, POLICIES["ada_edl"])
    assert np.array_equal(replayed.lengths.sum(-1), replayed.counts.num_target)
    assert np.array_equal(replayed.lengths @ np.arange(4), replayed.counts.num_drafted)


def test_the_oracle_discards_nothing_and_asks_the_target_once_per_rejection_and_once_more():
    _, trace = traced("plain", 3, 3, (EOS,))
    counts = replay_settings(trace, Oracle()).counts
    assert np.array_equal(counts.num_discarded, np.zeros_like(counts.num_discarded))
    before_last = np.ones(trace.num_positions, dtype=bool)
    before_last[trace.offsets[1:] - 1] = False
    rejected = np.add.reduceat(trace.is_rejected & before_last, trace.offsets[:-1])
    assert np.array_equal(counts.num_target[0], rejected + 1)


def test_no_policy_beats_the_oracle_on_any_row():
    _, trace = traced("plain", 3, 3, (EOS,))
    oracle = replay_settings(trace, Oracle()).counts
    for policy in POLICIES.values():
        counts = replay_settings(trace, policy).counts
        for ratio in (1.0, 3.0, 10.0):
            assert np.all(
                counts.num_draft_forwards + ratio * counts.num_target >= oracle.num_draft_forwards + ratio * oracle.num_target - 1e-9
            )


def test_the_loop_refuses_the_oracle():
    with pytest.raises(ValueError, match="outcomes"):
        decoder_of(Oracle())


def test_totals_are_sums_over_rows():
    _, trace = traced("plain", 3, 3, (EOS,))
    counts = replay(trace, POLICIES["fixed_length"])
    assert counts.num_emitted == trace.num_positions
    assert counts.num_drafted + counts.num_target == counts.num_emitted + counts.num_discarded
    rows = replay_settings(trace, POLICIES["fixed_length"]).counts
    assert (counts.num_drafted, counts.num_target, counts.num_accepted) == (
        rows.num_drafted.sum(),
        rows.num_target.sum(),
        rows.num_accepted.sum(),
    )
    # a round emits what it accepts and one token more, unless the draft's own EOS ends the text
    num_ended_by_draft = counts.num_accepted + counts.num_target - counts.num_emitted
    assert 0 < num_ended_by_draft <= sum(row.response_ids[-1] == EOS for row in trace.rows)
    assert counts.num_discarded == counts.num_drafted - counts.num_accepted + num_ended_by_draft


def test_a_part_of_a_trace_replays_as_it_does_in_the_whole():
    _, trace = traced("plain", 3, 2, (EOS,))
    rows = [0, 7, len(trace.rows) - 1, 30]
    for policy in (POLICIES["both_heads"], POLICIES["self_verify"]):
        whole, part = replay_settings(trace, policy).counts, replay_settings(trace.select(rows), policy).counts
        assert np.array_equal(whole.num_drafted[:, rows], part.num_drafted)
        assert np.array_equal(whole.num_target[:, rows], part.num_target)


def test_array_parameters_of_two_lengths_are_refused():
    _, trace = traced("plain", 3, 2, (EOS,))
    with pytest.raises(ValueError, match="lengths differ"):
        replay_settings(trace, type(POLICIES["ada_edl"])(np.zeros(2), np.zeros(3)))

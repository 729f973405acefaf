"""What replay counts: settings side by side, draft lengths, the oracle's bound, totals, and parts of a trace."""

from functools import cache
from itertools import pairwise

import numpy as np
import pytest

from decode.policies import CumulativeTokenProb
from evaluation.times import Times
from evaluation.traces.bounds import Oracle
from evaluation.traces.replay import replay, replay_settings
from evaluation.traces.trace import Trace
from lm import Sampling
from tests.toys.loop import POLICIES, decoder_of
from tests.toys.small_pair import LENGTH
from tests.toys.small_pair import trace as small_trace
from tests.toys.traces import EOS, traced

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
                counts.num_draft_forwards + ratio * counts.num_target
                >= oracle.num_draft_forwards + ratio * oracle.num_target - 1e-9
            )


@cache
def least_s(is_rejected: tuple[bool, ...], round_s: tuple[float, ...]) -> float:
    """The least time of one response, over every draft length of every round, drafts past a rejection included."""
    if not is_rejected:
        return 0.0
    ahead = is_rejected.index(True) if any(is_rejected) else len(is_rejected)
    longest = min(len(round_s), len(is_rejected))
    return min(round_s[k] + least_s(is_rejected[min(k, ahead) + 1 :], round_s) for k in range(longest))


TIMES = {
    "drafting an accepted token costs more than the target's own": Times.constant(1.5, 1.0),
    "as much": Times.constant(1.0, 1.0),
    "less": Times.constant(0.2, 1.0),
    "verification grows": Times(0.3, (1.0, 1.4, 1.8, 2.2, 2.6, 3.0)),
    "verification has a start": Times(0.3, (1.0, 2.1, 2.2, 2.3, 2.4, 2.5)),
    "verification jumps": Times(0.3, (1.0, 1.0, 1.0, 2.5, 2.5, 2.5)),
}


@pytest.fixture(scope="module")
def well_accepted() -> Trace:
    """Drafts are accepted as far as a choice of their length matters."""
    return small_trace(Sampling(temperature=0.6), copies=5)


@pytest.mark.parametrize("name", TIMES)
def test_the_oracle_takes_the_least_time_that_any_choice_takes(name, well_accepted):
    cost, traced = TIMES[name], well_accepted
    oracle = replay_settings(traced, Oracle(cost.round_s(LENGTH)))
    brute = [
        least_s(tuple(traced.is_rejected[slice(*ends)].tolist()), cost.round_s(LENGTH))
        for ends in pairwise(traced.offsets)
    ]
    assert cost.time_s(oracle)[0] == pytest.approx(brute)
    all_drafted, alone = cost.time_s(replay_settings(traced, Oracle()))[0], cost.t_target_s[0] * np.diff(traced.offsets)
    assert oracle.counts.num_discarded.sum() == 0
    if name == "less":
        assert cost.time_s(oracle)[0] == pytest.approx(all_drafted)
    elif name.startswith("verification"):
        assert cost.time_s(oracle).sum() < min(all_drafted.sum(), alone.sum()) - 1e-9 or name == "verification grows"
    elif name.startswith("drafting"):
        assert cost.time_s(oracle)[0] == pytest.approx(alone)


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

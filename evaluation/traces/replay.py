"""Law 4.10: every policy of one draft from one trace, with no model.

The policy is the same object that the loop runs, called on arrays of one number per lane (`evaluation.traces.lanes`);
where a lane takes no part, a mask keeps its state. Nothing is approximated: limits, EOS, stops before the draw and the
outcomes that policies learn are those of `decode.loop.decoder` and `decode.loop.drafter`
(tests/evaluation/traces/test_replay.py compares the distributions exactly).
"""

from dataclasses import fields
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from decode.loop.rounds import Counts
from decode.policies.base import Policy
from evaluation.played import Played
from evaluation.traces.lanes import Lockstep, Tokens, Totals, TraceLanes, expanded, min_length, num_settings
from evaluation.traces.trace import Array, Trace

_LANES_AT_ONCE = 12288
"""So many that the arrays of a step stay in a core's cache."""


def replay(trace: Trace, policy: Policy) -> Counts:
    """Totals of one policy over all prompts of a trace, distributed exactly as in real decoding."""
    counts = replay_settings(trace, policy).counts
    return Counts(**{f.name: int(np.sum(getattr(counts, f.name))) for f in fields(Counts)})


def replay_settings(trace: Trace, policy: Policy) -> Played:
    """Every setting on every prompt.

    Args:
        trace: recorded responses to one or more prompts.
        policy: parameters that are arrays [setting] are settings side by side; all such arrays have one length.

    Raises:
        ValueError: array parameters of several lengths; a policy that discards short drafts and has memory, or is
            replayed on a trace of drawn drafts.
    """
    shape = (num_settings(policy), len(trace.rows))
    totals = _totals(trace, policy, keeps_rounds=False)
    counts = Counts(**{name: count.reshape(shape) for name, count in totals.counts.items()})
    return Played(counts, totals.lengths.reshape(*shape, -1), trace.prompt_of_row, policy.stop_kind)


class Rounds(NamedTuple):
    """Every round of every lane (setting * num_rows + row), lane after lane, each in its order."""

    lane: Int[Array, " round"]
    drafted: Int[Array, " round"]
    forwards: Int[Array, " round"]
    """Forwards of the draft."""
    emitted: Int[Array, " round"]


def replay_rounds(trace: Trace, policy: Policy) -> Rounds:
    """Every setting on every prompt, as `replay_settings` does it, round by round."""
    totals = _totals(trace, policy, keeps_rounds=True)
    rounds = Rounds(*(np.concatenate(column) for column in zip(*totals.rounds, strict=True)))
    order = rounds.lane.argsort(kind="stable")
    return Rounds(*(column[order] for column in rounds))


def _totals(trace: Trace, policy: Policy, *, keeps_rounds: bool) -> Totals:
    if np.any(min_length(policy) > 0) and (policy.has_memory or not trace.has_point_masses):
        raise ValueError(
            f"{type(policy).__name__} discards drafts of fewer than {np.max(min_length(policy))} tokens, which keeps "
            "the output distribution only if the draft proposes its likeliest token (law 4.3) and no round depends on "
            "the one before; replay it on such a trace, or at temperature 0, and without `end`"
        )
    num_rows = len(trace.rows)
    num_lanes = num_settings(policy) * num_rows
    totals, tokens = Totals.of(num_lanes, trace.max_draft_length, keeps_rounds=keeps_rounds), Tokens.of(trace, policy)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        for start in range(0, num_lanes, _LANES_AT_ONCE):
            index = np.arange(start, min(start + _LANES_AT_ONCE, num_lanes))
            lanes = TraceLanes.of(trace, index, index % num_rows)
            Lockstep(tokens, expanded(policy, index // num_rows), lanes).run(totals)
    return totals

"""What replay steps through: the tokens of a trace, and where each lane stands among them (law 4.10)."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from decode.policies.base import AfterDraw, Policy
from decode.policies.scores import timing_of
from evaluation.traces.bounds import Oracle
from evaluation.traces.trace import Array, Trace


class Tokens(NamedTuple):
    """The trace's entries for every token, and one entry after the last, which only lanes that have ended read."""

    rejected: Int[Array, " positions+1"]
    fork: Int[Array, " positions+1"]
    branch: Int[Array, " positions+1"]
    longest: Int[Array, " positions+1"]
    is_eos: Bool[Array, " drafts+1"]
    signals: dict[str, Float[Array, " drafts+1"]]
    max_draft_length: int
    oracle: Int[Array, " positions+1"] | None
    """Tokens that it drafts in a round from each place on; None for policies that know no outcomes."""
    acceptance_prob: Float[Array, " drafts+1"] | None
    """Acceptance probabilities that feedback is computed from; None for policies without feedback."""
    has_blocks: bool
    """Whether a round costs one forward of the draft, however many tokens it drafts."""

    @classmethod
    def of(cls, trace: Trace, policy: Policy) -> "Tokens":
        """Entries of the trace, with the signals that the policy asks for."""
        heads = {f"{timing_of(head)}_logit": head for head in policy.heads}
        signals = {}
        for name in policy.signals & frozenset(AfterDraw._fields):
            values = trace.logit(heads[name]) if name in heads else trace.signal(name)
            signals[name] = np.append(values, values[-1:])
        rejected, fork = (np.append(places, trace.num_positions) for places in (trace.rejected, trace.fork))
        branch, longest = np.append(trace.branch, 0), np.append(trace.longest, 0)
        oracle = np.append(policy.lengths(trace.rejected, trace.offsets), 0) if isinstance(policy, Oracle) else None
        revealed = np.append(trace.signals["acceptance_prob"], 0.0) if policy.zero_feedback else None
        return cls(
            rejected,
            fork,
            branch,
            longest,
            np.append(trace.is_eos, True),
            signals,
            trace.max_draft_length,
            oracle,
            revealed,
            trace.block_size is not None,
        )


@dataclass
class TraceLanes:
    """Positions of all lanes, arrays [lane]. Places are flat indices of the trace."""

    index: Int[Array, " lane"]
    """Index in the totals."""
    start: Int[Array, " lane"]
    """Place where the round starts."""
    end: Int[Array, " lane"]
    """Place where the response ends; a lane with start = end has ended."""
    limit: Int[Array, " lane"]
    """Place where the length limit ends it at the latest."""
    room: Int[Array, " lane"]
    """The most tokens that the loop lets this round draft."""
    allowed: Int[Array, " lane"]
    """The most that the policy lets it draft, of those."""
    position: Int[Array, " lane"]
    """Tokens drafted so far in this round."""
    stop: Int[Array, " lane"]
    """The first rejected place from the start on."""
    fork: Int[Array, " lane"]
    """Place where the round leaves the path: at the rejection, or with a feature draft at once."""
    shift: Int[Array, " lane"]
    """Distance from there to its branch."""

    @classmethod
    def of(cls, trace: Trace, index: Int[Array, " lane"], rows: Int[Array, " lane"]) -> "TraceLanes":
        """TraceLanes at the start of these rows; no round has begun."""
        start, none = trace.offsets[rows], np.zeros_like(rows)
        limit = start + np.array([row.limit for row in trace.rows])[rows]
        return cls(
            index,
            start,
            trace.offsets[rows + 1],
            limit,
            room=none,
            allowed=none,
            position=none,
            stop=none,
            fork=none,
            shift=none,
        )

    def at(self, chosen: Bool[Array, " lane"]) -> "TraceLanes":
        """The chosen lanes."""
        return TraceLanes(*(values[chosen] for values in vars(self).values()))

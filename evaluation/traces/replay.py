"""Law 4.10: every policy of one draft from one trace, with no model.

Lanes of a replay, one per setting and prompt, take their steps together, each at its position in its response: a step
is one draft step of every lane and, where the draft ends with it, the verification. The policy is the same object that
the loop runs, called on arrays of one number per lane; where a lane takes no part, a mask keeps its state. Nothing is
approximated: limits, EOS, stops before the draw and the outcomes that policies learn are those of `decode.loop.decoder`
and `decode.loop.drafter` (tests/evaluation/traces/test_replay.py compares the distributions exactly).
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import count
from typing import ClassVar, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from decode.loop.counts import Counts
from decode.policies.base import AfterDraw, Outcome, Policy, State, mapped, timing_of
from evaluation.played import Played
from evaluation.traces.trace import Array, Trace

_LANES_AT_ONCE = 12288
"""So many that the arrays of a step stay in a core's cache."""
_COMPACT_EVERY = 32
_MIN_ALIVE = 0.8
"""Share of lanes below which those that have ended are dropped: they cost as much as the others, and dropping costs a
copy.
"""
_ABSENT = dict.fromkeys(AfterDraw._fields, 0.0)
"""Signals that the policy does not read."""


@dataclass(frozen=True)
class Oracle(Policy):
    """Knows the outcomes, and drafts only tokens that will be accepted; the target adds the last token of a response.

    With no times it drafts all of them: N_discarded = 0 and N_target = |rejected| + 1 (SpecDec++, arXiv 2405.19715,
    Lemma 2.1; more where max_draft_length ends a round). That is the least time as long as a drafted token costs less
    than the target's own: with d = t_draft and t_target(k) = t + v k, T = (d + v) N + (t - d - v) N_target. Else it may
    be best to draft none, and where t_target(k) is no line, some of them, or long runs only; so with times it takes the
    shortest way through each response,

        left(i) = min over k <= accepted ahead of (k d + t_target(k) + left(i + k + 1))
    """

    round_s: tuple[float, ...] = ()
    """Seconds of a round that drafts 0, 1, … max_draft_length tokens, k d + t_target(k); empty: all are drafted."""

    signals: ClassVar[frozenset[str]] = frozenset({"outcomes"})

    def lengths(
        self, rejected: Int[Array, " positions"], offsets: Int[Array, " row_offsets"]
    ) -> Int[Array, " positions"]:
        """Tokens drafted by a round that starts at each position, from the first rejected position from each on (any
        beyond the row if there is none); row r covers positions offsets[r] to offsets[r + 1].
        """
        ends = np.repeat(offsets[1:], np.diff(offsets))
        ahead = np.minimum(rejected, ends - 1) - np.arange(len(rejected))
        if not self.round_s:
            return ahead
        longest = np.minimum(ahead, len(self.round_s) - 1)
        widths = np.diff(offsets)
        lengths = np.zeros_like(longest)
        # of each row by the number of positions that are left: 0 at its end
        left_s = np.zeros((len(widths), int(widths.max(initial=0)) + 1))
        drafted = np.arange(len(self.round_s))
        for num_left in range(1, left_s.shape[1]):
            rows = (widths >= num_left).nonzero()[0]
            at = offsets[rows + 1] - num_left
            after = np.maximum(num_left - 1 - drafted, 0)
            options = np.array(self.round_s) + left_s[rows][:, after]
            options[drafted > longest[at, None]] = np.inf
            lengths[at] = len(drafted) - 1 - options[:, ::-1].argmin(axis=1)  # the longest of equals
            left_s[rows, num_left] = options[np.arange(len(rows)), lengths[at]]
        return lengths


class Rounds(NamedTuple):
    """Rounds of several lanes, which are setting * num_rows + row."""

    lane: Int[Array, " round"]
    drafted: Int[Array, " round"]
    accepted: Int[Array, " round"]
    forwards: Int[Array, " round"]
    """Of the draft."""
    emitted: Int[Array, " round"]

    @classmethod
    def joined(cls, parts: "list[Rounds]") -> "Rounds":
        return cls(*map(np.concatenate, zip(*parts, strict=True)))

    def by_lane(self) -> "Rounds":
        """The same, lane after lane, those of each in their order."""
        order = self.lane.argsort(kind="stable")
        return Rounds(*(column[order] for column in self))


@dataclass
class TraceLanes:
    """State of all lanes. `start`, `end`, `limit`, `stop` and `fork` are flat indices of the trace: where the round
    starts, where the response ends (a lane with start = end has ended) and where the length limit ends it at the
    latest, the first rejected position from the start on, and where the round leaves the path (there, or with a feature
    draft at once); `shift` is the distance from the fork to its branch.
    """

    index: Int[Array, " lane"]
    """Number of the lane."""
    start: Int[Array, " lane"]
    end: Int[Array, " lane"]
    limit: Int[Array, " lane"]
    allowed: Int[Array, " lane"]
    """The most tokens that this round may draft."""
    position: Int[Array, " lane"]
    """Tokens drafted so far in this round."""
    stop: Int[Array, " lane"]
    fork: Int[Array, " lane"]
    shift: Int[Array, " lane"]

    @classmethod
    def of(cls, trace: Trace, index: Int[Array, " lane"], rows: Int[Array, " lane"]) -> "TraceLanes":
        """Lanes at the start of these rows; no round has begun."""
        start = trace.offsets[rows]
        limit = start + np.array([row.limit for row in trace.rows])[rows]
        return cls(index, start, trace.offsets[rows + 1], limit, *np.zeros((5, len(rows)), dtype=rows.dtype))

    def at(self, mask: Bool[Array, " lane"]) -> "TraceLanes":
        return TraceLanes(*(values[mask] for values in vars(self).values()))


class Lockstep:
    """Lanes that take their steps together.

    Columns of the trace have one entry more, which only lanes that have ended read.
    """

    def __init__(self, trace: Trace, policy: Policy, lanes: TraceLanes) -> None:
        self.policy = policy
        self.lanes = lanes
        self.longest = trace.max_draft_length
        self.has_blocks = trace.block_size is not None
        self._rejected, self._fork = (np.append(column, trace.num_positions) for column in (trace.rejected, trace.fork))
        longest = policy.lengths(trace.rejected, trace.offsets) if isinstance(policy, Oracle) else trace.longest
        self._first_drawn, self._room = np.append(trace.first_drawn, 0), np.append(longest, 0)
        self._is_eos = np.append(trace.drafts["is_eos"], True)
        self._acceptance_prob = np.append(trace.drafts["acceptance_prob"], 0.0)
        heads = {f"{timing_of(head)}_logit": head for head in policy.heads}
        names = policy.signals & frozenset(AfterDraw._fields)
        signals = {name: trace.logit(heads[name]) if name in heads else trace.signal(name) for name in names}
        self._signals = {name: np.append(values, values[-1:]) for name, values in signals.items()}
        self.discards_short = bool(np.any(min_length(policy) > 0))
        size = len(lanes.index)
        self.feedback: State = mapped(lambda value: np.full(size, value), policy.zero_feedback)
        # a state may hold one number for all lanes; compaction needs one of each
        self.state = mapped(lambda value: np.array(np.broadcast_to(value, size), dtype=np.float64), policy.start())
        self._begin(np.ones(size, dtype=bool), self.state)

    def run(self) -> Iterator[Rounds]:
        """Play all rounds of all lanes: those that end in each step."""
        for step in count(1):
            if step % _COMPACT_EVERY == 0:
                self._compact()
                if not len(self.lanes.index):
                    return
            yield self._conclude(*self._drafted(self.lanes.position < self.lanes.allowed))

    def _begin(self, begins: Array, state: State) -> None:
        lanes = self.lanes
        self.state = merged(begins, self.policy.begin(state), self.state)
        # the other lanes are the most, and looking their numbers up would take most of the time
        at = begins.nonzero()[0]
        start = lanes.start[at]
        most = np.minimum(self._allowed_by_loop()[at], self._room.take(start))
        limit = np.broadcast_to(self.policy.limit(self.state), begins.shape)[at]
        allowed = np.minimum(limit, most).astype(np.int64)
        if self.discards_short:
            least = np.broadcast_to(min_length(self.policy), begins.shape)[at]
            allowed = np.where(allowed < least, 0, allowed)
        fork = self._fork.take(start)
        lanes.allowed[at] = allowed
        lanes.stop[at] = self._rejected.take(start)
        lanes.fork[at] = fork
        lanes.shift[at] = self._first_drawn.take(fork) - fork
        lanes.position = np.where(begins, 0, lanes.position)  # a copy, since a policy may hold the outcome's
        self.feedback = mapped(lambda value: np.where(begins, 0.0, value), self.feedback)

    def _allowed_by_loop(self) -> Array:
        left = self.lanes.limit - self.lanes.start - 1
        return np.minimum(np.maximum(left, 0), self.longest)  # np.clip takes four times as long

    def _drafted(self, may_draft: Array) -> tuple[Array, Array]:
        """One draft step where it is wanted: (where the draft has ended, where a forward ran and drew no token)."""
        lanes = self.lanes
        path = lanes.start + lanes.position
        at = self._indices()
        drawn = self._drawn(at)
        draws = may_draft
        if self.policy.stops_before:
            draws = may_draft & ~np.asarray(self.policy.stop_before(self.state, drawn.before), dtype=bool)
        state, stops = self.policy.after(self.state, drawn)
        if self.feedback:
            feedback = self.policy.feedback(self.state, drawn, self._acceptance_prob.take(at))
            is_revealed = draws & (path <= lanes.stop)
            self.feedback = mapped(lambda total, new: total + np.where(is_revealed, new, 0.0), self.feedback, feedback)
        self.state = merged(draws, state, self.state)
        lanes.position = lanes.position + draws
        return ~draws | stops | self._is_eos.take(at) | (lanes.position >= lanes.allowed), may_draft & ~draws

    def _indices(self, before: int = 0) -> Array:
        """Flat index of each lane's next token, or of one `before` it."""
        path = self.lanes.start + self.lanes.position - before
        at = np.where(path < self.lanes.fork, path, path + self.lanes.shift)
        # lanes that wait for the others, or have ended, may point beyond the end
        return np.minimum(at, len(self._is_eos) - 1, out=at)

    def _drawn(self, at: Array) -> AfterDraw:
        signals = {name: signal.take(at) for name, signal in self._signals.items()}
        if "fed_logit" in signals:
            signals["fed_logit"] = np.where(self.lanes.position == 0, np.inf, signals["fed_logit"])
        return AfterDraw(**(_ABSENT | signals | {"position": self.lanes.position}))

    def _conclude(self, ended: Array, has_unused_forward: Array) -> Rounds:
        """Verify the drafts that have ended, and begin the next rounds."""
        lanes = self.lanes
        over = (ended & (lanes.start < lanes.end)).nonzero()[0]
        start = lanes.start[over]
        drawn = lanes.position[over]
        drafted = np.where(self._is_discarded()[over], 0, drawn) if self.discards_short else drawn
        accepted = np.minimum(drafted, lanes.stop[over] - start)
        emitted = np.minimum(accepted + 1, lanes.end[over] - start)
        # the forward of a block runs before its first token is read
        forwards = lanes.allowed[over] > 0 if self.has_blocks else drawn + has_unused_forward[over]
        rounds = Rounds(lanes.index[over], drafted, accepted, forwards.astype(np.int64), emitted)
        state = self.policy.end(self.state, self._outcome()) if self.policy.has_memory else self.state
        lanes.start[over] += emitted
        self._begin(ended, state)
        return rounds

    def _is_discarded(self) -> Array:
        """Whether each lane's draft, if it ends now, is too short to be verified; one that an EOS ended never is."""
        ends_text = (self.lanes.position > 0) & self._is_eos.take(self._indices(before=1))
        return (self.lanes.position < min_length(self.policy)) & ~ends_text

    def _outcome(self) -> Outcome:
        """Outcome of each lane's round, if it ends now; unused where it does not."""
        lanes = self.lanes
        entropy = self._signals.get("entropy")
        accepted = np.minimum(lanes.position, lanes.stop - lanes.start)
        at_stop = np.minimum(lanes.stop + lanes.shift, len(self._is_eos) - 1)
        rejected_entropy = 0.0 if entropy is None else np.where(accepted < lanes.position, entropy.take(at_stop), 0.0)
        return Outcome(lanes.position, accepted, self._allowed_by_loop(), rejected_entropy, self.feedback)

    def _compact(self) -> None:
        alive = self.lanes.start < self.lanes.end
        if alive.mean() <= _MIN_ALIVE:
            self.lanes = self.lanes.at(alive)
            self.state, self.feedback = (
                mapped(lambda value: value[alive], numbers) for numbers in (self.state, self.feedback)
            )
            self.policy = expanded(self.policy, alive)


def merged(mask: Array, new: State, old: State) -> State:
    """The new state in the mask, the old one elsewhere."""
    return mapped(lambda value, before: before if value is before else np.where(mask, value, before), new, old)


def min_length(policy: Policy) -> Array:
    """Drafts of fewer tokens are discarded unverified; only `evaluation.flags.engines.ShortDrafts` has such a limit."""
    return np.asarray(getattr(policy, "discards_below", 0))


def settings_of(policy: Policy) -> dict[str, Array]:
    """The policy's array parameters: settings side by side; ValueError if their lengths differ."""
    values = {f.name: getattr(policy, f.name) for f in fields(policy)}  # type: ignore[arg-type]
    arrays = {name: value for name, value in values.items() if isinstance(value, np.ndarray) and value.ndim == 1}
    lengths = {name: len(value) for name, value in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(
            f"array parameters of {type(policy).__name__} are settings side by side, but their lengths differ: "
            f"{lengths}"
        )
    return arrays


def expanded(policy: Policy, index: Array) -> Policy:
    """The policy with its array parameters at an index, such as the setting of each lane."""
    result = copy.copy(policy)
    for name, value in settings_of(policy).items():
        object.__setattr__(result, name, value[index])
    return result


def replay_settings(trace: Trace, policy: Policy) -> Played:
    """Every setting on every prompt; a policy's parameters that are arrays [setting] are settings side by side.
    ValueError for arrays of several lengths, and for a policy that discards short drafts and has memory, or is replayed
    on a trace of drawn drafts.
    """
    size = trace.max_draft_length + 1
    tables = []
    sums = []
    for index, rounds in _played(trace, policy):
        lane = rounds.lane - index[0]
        tables.append(np.bincount(lane * size + rounds.drafted, minlength=len(index) * size))
        columns = rounds.emitted, rounds.accepted, rounds.forwards
        sums.append([np.bincount(lane, column, minlength=len(index)) for column in columns])
    lengths = np.concatenate(tables).reshape(-1, len(trace.rows), size)
    emitted, accepted, forwards = np.concatenate(sums, axis=1).astype(np.int64).reshape(3, *lengths.shape[:2])
    counts = Counts(
        num_emitted=emitted,
        num_drafted=lengths @ np.arange(size),
        num_target=lengths.sum(-1),
        num_accepted=accepted,
        num_draft_forwards=forwards,
    )
    return Played(counts, lengths, trace.prompt_of_row, policy.stop_kind)


def replay_rounds(trace: Trace, policy: Policy) -> Rounds:
    """Every setting on every prompt, as `replay_settings` does it: all rounds, lane after lane, each in its order."""
    return Rounds.joined([rounds for _, rounds in _played(trace, policy)]).by_lane()


def _played(trace: Trace, policy: Policy) -> Iterator[tuple[Array, Rounds]]:
    """Play all lanes, many at once: their numbers, and their rounds, step after step."""
    # of a draft without randomness the length is not random either
    is_random = not (trace.draft_sampling or trace.sampling).is_greedy
    if np.any(min_length(policy) > 0) and (policy.has_memory or is_random):
        raise ValueError(
            f"{type(policy).__name__} discards drafts of fewer than {np.max(min_length(policy))} tokens, which keeps "
            "the output distribution only if the draft proposes its likeliest token (law 4.3) and no round depends on "
            "the one before; replay it on such a trace, or at temperature 0, and without `end`"
        )
    num_rows = len(trace.rows)
    num_lanes = max(map(len, settings_of(policy).values()), default=1) * num_rows
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        for start in range(0, num_lanes, _LANES_AT_ONCE):
            index = np.arange(start, min(start + _LANES_AT_ONCE, num_lanes))
            lanes = TraceLanes.of(trace, index, index % num_rows)
            yield index, Rounds.joined([*Lockstep(trace, expanded(policy, index // num_rows), lanes).run()])

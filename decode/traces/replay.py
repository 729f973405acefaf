"""Law 4.10: every policy from one trace, with no model.

Lanes (one per setting and prompt) run in lockstep, each at its own place: a step is one draft step of every lane, and the end of the round
for those whose draft ended with it. The policy is the very object that the loop runs, called on arrays of one number per lane; its states
are merged by masks. Nothing is approximated: limits, EOS, stops before the draw, what outcomes are told, all as `decode.loop.decoder` and
`decode.loop.drafter` do it (tests/decode/traces/test_replay.py compares the two laws exactly).
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from jaxtyping import Int

from decode.loop.counts import Counts
from decode.policies.base import AfterDraw, BeforeDraw, Outcome, Policy, State
from decode.policies.bounds import Oracle
from decode.traces.trace import Array, Trace

_LANES_AT_ONCE = 12288
"""Arrays of so many numbers stay in a core's cache."""
_COMPACT_EVERY = 32


@dataclass(frozen=True)
class Replayed:
    """What every setting did on every prompt."""

    counts: Counts
    """Arrays [setting, row]."""
    lengths: Int[Array, "setting row lengths"]
    """Rounds by the number of tokens drafted, 0 to max_draft_length."""


def replay(trace: Trace, policy: Policy) -> Counts:
    """Totals of one policy over all prompts of a trace; their law is exactly that of real decoding."""
    counts = replay_settings(trace, policy).counts
    return Counts(**{f.name: int(np.sum(getattr(counts, f.name))) for f in fields(Counts)})


def replay_settings(trace: Trace, policy: Policy) -> Replayed:
    """Every setting on every prompt.

    Args:
        trace: of one or more prompts.
        policy: parameters that are arrays [setting] are settings side by side; all such arrays have one length.

    Raises:
        ValueError: array parameters of several lengths.
    """
    num_settings = _num_settings(policy)
    num_rows = len(trace.rows)
    totals = _Totals(num_settings * num_rows, trace.max_draft_length)
    signals = _signals(trace, policy)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        for start in range(0, num_settings * num_rows, _LANES_AT_ONCE):
            lanes = np.arange(start, min(start + _LANES_AT_ONCE, num_settings * num_rows))
            _Lanes(trace, _expanded(policy, lanes // num_rows), signals, lanes % num_rows, lanes).run(totals)
    shape = (num_settings, num_rows)
    counts = Counts(**{name: getattr(totals, name).reshape(shape) for name in _COUNTED})
    return Replayed(counts, totals.lengths.reshape(*shape, -1))


_COUNTED = ("num_emitted", "num_drafted", "num_target", "num_accepted", "num_draft_forwards")


class _Totals:
    """Counts of all lanes."""

    def __init__(self, num_lanes: int, max_draft_length: int) -> None:
        self.num_emitted, self.num_drafted, self.num_target, self.num_accepted, self.num_draft_forwards = (
            np.zeros(num_lanes, dtype=np.int64) for _ in _COUNTED
        )
        self.lengths = np.zeros((num_lanes, max_draft_length + 1), dtype=np.int32)


class _Lanes:
    """Some lanes in lockstep."""

    def __init__(self, trace: Trace, policy: Policy, signals: dict[str, Array], rows: Array, lanes: Array) -> None:
        self.trace, self.policy, self.signals, self.lanes = trace, policy, signals, lanes
        self.start = trace.offsets[rows]
        self.end = trace.offsets[rows + 1]
        self.limit = self.start + np.array([row.limit for row in trace.rows])[rows]
        self.rejected = np.append(trace.rejected, trace.num_positions)
        self.branch = np.append(trace.branch, 0)
        self.is_eos = np.append(trace.is_eos, True)
        self.counted = {name: np.zeros(len(lanes), dtype=np.int64) for name in _COUNTED}
        self.state = self._full(policy.start())
        self.has_memory = type(policy).end is not Policy.end
        self._begin(np.ones(len(lanes), dtype=bool), self.state)

    def run(self, totals: _Totals) -> None:
        """Play all rounds of all lanes."""
        step = 0
        while True:
            step += 1
            if step % _COMPACT_EVERY == 0:
                self._compact(totals)
                if not len(self.lanes):
                    return
            self._step(totals)

    def _full(self, state: State) -> State:
        """One number per lane, of what may be one for all."""
        return tuple(np.array(np.broadcast_to(value, len(self.lanes)), dtype=np.float64) for value in state)

    def _begin(self, begins: Array, state: State) -> None:
        """A new round where `begins`."""
        self.state = _merged(begins, self.policy.begin(state), self.state)
        room = np.clip(self.limit - self.start - 1, 0, self.trace.max_draft_length)
        self.room = room
        limit = self._limit() if isinstance(self.policy, Oracle) else self.policy.limit(self.state)
        allowed = np.minimum(limit, room).astype(np.int64)
        first_rejected = self.rejected.take(self.start)
        if np.ndim(begins) == 0 or begins.all():
            self.position, self.allowed, self.stop = np.zeros_like(self.start), allowed, first_rejected
        else:
            self.position = np.where(begins, 0, self.position)
            self.allowed = np.where(begins, allowed, self.allowed)
            self.stop = np.where(begins, first_rejected, self.stop)
        self.shift = self.branch.take(self.stop) - self.stop

    def _limit(self) -> Array:
        """The oracle's: as far as all is accepted, but for the token that the target adds anyway."""
        return np.minimum(self.rejected.take(self.start), self.end - 1) - self.start

    def _step(self, totals: _Totals) -> None:
        wants = self.position < self.allowed
        path = self.start + self.position
        at = np.where(path < self.stop, path, path + self.shift)
        np.minimum(at, len(self.is_eos) - 1, out=at)
        drawn = self._drawn(at)
        draws = wants
        if type(self.policy).stop_before is not Policy.stop_before:
            draws = wants & ~np.asarray(self.policy.stop_before(self.state, BeforeDraw(*drawn[:4])), dtype=bool)
        state, stops = self.policy.after(self.state, drawn)
        self.state = _merged(draws, state, self.state)
        self.position = self.position + draws
        ended = ~draws | stops | self.is_eos.take(at) | (self.position >= self.allowed)
        self._conclude(ended, wants & ~draws, totals)

    def _drawn(self, at: Array) -> AfterDraw:
        values: dict[str, Any] = dict.fromkeys(AfterDraw._fields, 0.0)
        values["position"] = self.position
        for name, signal in self.signals.items():
            values[name] = signal.take(at)
        if "fed_logit" in self.signals:
            values["fed_logit"] = np.where(self.position == 0, np.inf, values["fed_logit"])
        return AfterDraw(**values)

    def _conclude(self, ended: Array, has_unused_forward: Array, totals: _Totals) -> None:
        """Verification where the draft ended."""
        counted, position = self.counted, self.position
        over = (ended & (self.start < self.end)).nonzero()[0]
        start, drafted = self.start[over], position[over]
        accepted = np.minimum(drafted, self.stop[over] - start)
        emitted = np.minimum(accepted + 1, self.end[over] - start)
        for name, amount in zip(_COUNTED, (emitted, drafted, 1, accepted, drafted + has_unused_forward[over]), strict=True):
            counted[name][over] += amount
        totals.lengths[self.lanes[over], drafted] += 1
        state = self.state
        if self.has_memory:
            all_accepted = np.minimum(position, self.stop - self.start)
            is_rejected = all_accepted < position
            entropy = self.signals["entropy"].take(self.stop) if "entropy" in self.signals else 0.0
            outcome = Outcome(position, all_accepted, self.room, np.where(is_rejected, entropy, 0.0))
            state = self.policy.end(self.state, outcome)
        self.start[over] += emitted
        self._begin(ended, state)

    def _compact(self, totals: _Totals) -> None:
        """Write finished lanes away and drop them, once they are many."""
        alive = self.start < self.end
        num_alive = int(alive.sum())
        if num_alive > 0.8 * len(alive):
            return
        done = self.lanes[~alive]
        for name in _COUNTED:
            getattr(totals, name)[done] = self.counted[name][~alive]
            self.counted[name] = self.counted[name][alive]
        for name in ("lanes", "start", "end", "limit", "position", "allowed", "stop", "shift", "room"):
            setattr(self, name, getattr(self, name)[alive])
        self.state = tuple(value[alive] for value in self.state)
        self.policy = _expanded(self.policy, alive)


def _merged(mask: Array, new: State, old: State) -> State:
    return tuple(kept if value is kept else np.where(mask, value, kept) for value, kept in zip(new, old, strict=True))


def _signals(trace: Trace, policy: Policy) -> dict[str, Array]:
    """Arrays [drafts + 1] of the signals that the policy asks for; the last entry is read only by finished lanes."""
    heads = {"fed_logit": policy.fed_head, "drawn_logit": policy.drawn_head}
    values = {}
    for name in policy.signals & frozenset(AfterDraw._fields):
        values[name] = trace.logit(heads[name]) if name in heads else trace.signal(name)  # type: ignore[arg-type]
    return {name: np.append(value, value[-1:]) for name, value in values.items()}


def _array_fields(policy: Policy) -> Iterator[tuple[str, Array]]:
    for f in fields(policy):  # type: ignore[arg-type]
        value = getattr(policy, f.name)
        if isinstance(value, np.ndarray) and value.ndim == 1:
            yield f.name, value


def _num_settings(policy: Policy) -> int:
    lengths = {name: len(value) for name, value in _array_fields(policy)}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"array parameters of {type(policy).__name__} are settings side by side, but their lengths differ: {lengths}")
    return next(iter(lengths.values()), 1)


def _expanded(policy: Policy, index: Array) -> Policy:
    """The policy with its array parameters indexed, one number per lane."""
    result = copy.copy(policy)
    for name, value in list(_array_fields(policy)):
        object.__setattr__(result, name, value[index])
    return result

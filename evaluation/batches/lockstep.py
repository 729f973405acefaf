"""A continuous batch stepped through on a trace, for policies whose sequences depend on each other (law 4.13);
`load_of` for the others.
"""

from typing import Any

import numpy as np
from jaxtyping import Int

from decode.policies.base import Policy
from decode.policies.batch import BatchAuto
from evaluation.batches.load import Load
from evaluation.traces.replay import Lockstep, TraceLanes, merged
from evaluation.traces.trace import Array, Trace


class _Batch(Lockstep):
    """Lanes that are the rows of a batch, whose rounds end together."""

    def __init__(self, trace: Trace, policy: Policy, rows: Int[Array, " request"], size: int) -> None:
        self.every = TraceLanes.of(trace, np.arange(len(rows)), rows)
        self.controller = policy.controller() if isinstance(policy, BatchAuto) else None
        first = np.arange(len(rows)) < size
        super().__init__(trace, policy, self.every.at(first))
        self.next = int(first.sum())

    @property
    def busy(self) -> Array:
        """Rows with a sequence."""
        return self.lanes.start < self.lanes.end

    def allowed(self, drafting: Array) -> Array:
        """Rows in which the batch's rule lets drafting continue, among those whose policies continue."""
        if self.controller is None or not drafting.any():
            return drafting
        at = drafting.nonzero()[0]
        rule: Any = self.policy
        signals = self._drawn(self._indices()).before if rule.looks_ahead else None
        expected_tokens = np.broadcast_to(rule.expected_tokens(self.state, signals), drafting.shape)[at]
        result = np.zeros_like(drafting)
        result[at] = self.controller.continuing(expected_tokens, int((self.lanes.position + 1)[self.busy].sum()))
        return result

    def round(self) -> tuple[list[int], int, int]:
        """One round of all: (sequences in each draft step, tokens verified, tokens emitted)."""
        busy = self.busy
        drafting, unused = busy & (self.lanes.allowed > 0), np.zeros_like(busy)
        steps = [int(drafting.sum())] if self.has_blocks and drafting.any() else []
        while (drafting := self.allowed(drafting)).any():
            steps += [] if self.has_blocks else [int(drafting.sum())]
            ended, is_unused = self._drafted(drafting)
            unused |= is_unused
            drafting = drafting & ~ended
        num_tokens = int((self.lanes.position + 1)[busy].sum())
        rounds = self._conclude(np.ones_like(busy), unused)
        return steps, num_tokens, int(rounds.emitted.sum())

    def refill(self) -> bool:
        """Give empty rows the next requests; False if a row stays empty."""
        empty = (~self.busy).nonzero()[0]
        filled = empty[: len(self.every.index) - self.next]
        if len(filled):
            new = np.arange(self.next, self.next + len(filled))
            for name in ("index", "start", "end", "limit"):
                getattr(self.lanes, name)[filled] = getattr(self.every, name)[new]
            self.next += len(filled)
            begins = np.zeros(len(self.lanes.start), dtype=bool)
            begins[filled] = True
            self._begin(begins, merged(begins, self.policy.start(), self.state))
        return len(filled) == len(empty)


def step_through(
    trace: Trace, policy: Policy, rows: Int[Array, " request"], size: int, *, is_drained: bool = False
) -> Load:
    """Play a batch under one setting of a policy.

    Args:
        trace: of one or more prompts.
        policy: no parameter is an array.
        rows: the queue, no shorter than the batch.
        size: rows of the batch.
        is_drained: as for `load_of`.
    """
    size = min(size, len(rows))
    steps: list[list[int]] = []
    num_tokens, emitted = [], []
    begins, ends = np.zeros(len(rows), dtype=np.int64), np.zeros(len(rows), dtype=np.int64)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        batch = _Batch(trace, policy, rows, size)
        is_full = True
        while is_full or (is_drained and batch.busy.any()):
            before, index = batch.next, batch.lanes.index.copy()
            was_busy = batch.busy
            taken, verified, written = batch.round()
            steps.append(taken)
            num_tokens.append(verified)
            emitted.append(written)
            if batch.controller is not None:
                batch.controller.end(taken, verified, written)
            ends[index[was_busy & ~batch.busy]] = len(steps)
            is_full = batch.refill() and is_full
            begins[before : batch.next] = len(steps)
    table = np.zeros((len(steps), max(map(len, steps), default=0)), dtype=np.int64)
    for number, taken in enumerate(steps):
        table[number, : len(taken)] = taken
    done = ends > 0
    return Load(table, np.array(num_tokens), np.array(emitted), begins[done], ends[done])

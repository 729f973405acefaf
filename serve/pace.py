"""Law 4.13 in an engine that runs: the batch's rule, with costs and lambda that are measured and followed.

An engine's draft step takes all rows of its batch along, those that have stopped too, and its first one, which keeps
the draft's cache in step, is made whatever is drafted. One more step of rows that the rule decides for therefore costs

    lambda * (t_target(m + rows that go on) - t_target(m) + t_draft(rows of the batch))

without t_draft where the step is the round's first, or where a row with a policy of its own takes it anyway. t_draft is
measured between two steps of a round, t_target is all else between the begins of two rounds, and lambda is what those
curves say of the tokens that came out, at the least the target's own pace. Nothing is assumed before anything is
measured: the first rounds draft on.

What is old is forgotten. Times count `_MEMORY` times as much with each new one of their size; tokens and seconds are
counted per row, so that lambda follows at once when rows come and go. Where the rule has let no second step happen for
`_PROBE_EVERY` rounds it looks whether it still should.
"""

from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np

from decode.policies.batch import BatchCosts, Curve, gaining

_MEMORY = 0.95
_ROW_MEMORY = 0.995
"""Memory of a round of one row; a round of more rows says more, and makes the past count less."""
_PROBE_EVERY = 32
_FEW, _MOST = 8.0, 2.0
"""After so many measurements none counts as more than so many times their mean."""
_RIDGE = 0.1
"""Pulls a slope to zero as so many numbers would that are off their mean by all of it."""
_LEAST = 0.1
"""One row or token takes at the least this share of the mean."""


class Measured:
    """Seconds by a number of rows or tokens, a line through what was measured lately: `_MEMORY` times as much by each
    new measurement.
    """

    def __init__(self) -> None:
        self._weight = self._number = self._seconds = self._square = self._product = 0.0

    def see(self, number: int, seconds: float) -> None:
        """Add a measurement; what takes far longer than others did is an accident, and counts for less."""
        if self._weight > _FEW:
            seconds = min(seconds, _MOST * self._seconds)
        self._weight = self._weight * _MEMORY + 1.0
        share, kept = 1.0 / self._weight, 1.0 - 1.0 / self._weight
        distance, excess_s = number - self._number, seconds - self._seconds
        self._number, self._seconds = self._number + share * distance, self._seconds + share * excess_s
        self._square = kept * (self._square + share * distance * distance)
        self._product = kept * (self._product + share * distance * excess_s)

    @property
    def curve(self) -> Curve | None:
        """None where nothing was seen. The line is flat where numbers hardly differ, and never falls."""
        if not self._weight:
            return None
        spread = self._square + _RIDGE * self._number**2 / self._weight
        slope_s = max(self._product / spread, 0.0)
        first_s = self._seconds - (self._number - 1.0) * slope_s
        return Curve.line(max(first_s, _LEAST * self._seconds), slope_s)


class MeasuredController:
    """Told of every round and every draft step of the engine; says which rows of the batch's rule go on."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock, self._draft, self._target = clock, Measured(), Measured()
        self._costs: BatchCosts | None = None
        self._tokens = self._row_seconds = self._first_s = self._at_s = 0.0
        self._num_rows = self._num_steps = self._idle = 0

    def begin(self, num_rows: int, *, num_ended: int, num_tokens: int, num_emitted: int) -> None:
        """The round before is verified, and the next begins.

        Args:
            num_rows: the rows of the new round.
            num_ended: the rows that drafted in the round before.
            num_tokens: the tokens that the target was fed for them: their drafts, and one token more for each.
            num_emitted: the tokens that came out for them.
        """
        now_s = self._clock()
        # where other rows read their prompts in the same step, its time says nothing of verification
        if num_ended == num_rows > 0:
            self._target.see(num_tokens, now_s - self._at_s + self._first_s)
        self._learn(num_ended, num_tokens, num_emitted)
        self._idle = self._idle + 1 if self._num_steps < 2 else 0
        self._num_rows, self._num_steps, self._first_s, self._at_s = num_rows, 0, 0.0, now_s

    def step(self) -> None:
        """A draft step of all rows is done."""
        now_s = self._clock()
        if self._num_steps:
            self._draft.see(self._num_rows, now_s - self._at_s)
        else:
            self._first_s = now_s - self._at_s
        self._num_steps, self._at_s = self._num_steps + 1, now_s

    def chosen(self, expected_tokens: Any, num_tokens: int, *, is_paid: bool) -> Any:
        """The rows that go on, bool [row].

        Args:
            expected_tokens: [row] of those that the rule decides for.
            num_tokens: the tokens that verification is to be fed without them, those of the coming step included.
            is_paid: whether the coming step is made anyway.
        """
        if self._costs is None or (self._idle >= _PROBE_EVERY and self._num_steps < 2):
            return np.ones(len(expected_tokens), dtype=bool)
        target, sizes = self._costs.target, np.arange(1, len(expected_tokens) + 1)
        step_s = 0.0 if is_paid or self._num_steps == 0 else self._costs.draft(self._num_rows)
        return gaining(expected_tokens, self.throughput * (target(num_tokens + sizes) - target(num_tokens) + step_s))

    @property
    def throughput(self) -> float:
        """The rule's lambda for the rows of this round."""
        assert self._costs is not None, "there is something to divide by"
        alone = 1.0 / float(self._costs.target(self._num_rows))
        return self._num_rows * max(alone, self._tokens / self._row_seconds)

    def _learn(self, num_ended: int, num_tokens: int, num_emitted: int) -> None:
        draft, target = self._draft.curve, self._target.curve
        if draft is None or target is None or num_ended == 0:
            return
        self._costs = BatchCosts(draft, target)
        kept, num_more = _ROW_MEMORY**num_ended, max(self._num_steps - 1, 0)
        seconds = float(target(num_tokens) + num_more * draft(self._num_rows))
        self._tokens = kept * self._tokens + num_emitted
        self._row_seconds = kept * self._row_seconds + num_ended * seconds

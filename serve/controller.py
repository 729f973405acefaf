"""The batch rule of law 4.13 in a running engine, with costs and lambda (tokens per second) that are measured.

A draft step computes all rows of the batch, including those that have stopped. The first step always runs,
because it updates the draft's cache. Another step for the rows under the batch rule therefore costs

    lambda * (t_target(m + rows that continue) - t_target(m) + t_draft(rows of the batch))

without t_draft if the step is the first of the round, or runs anyway for a row with another policy. t_draft is
the time between two steps of a round; t_target is the rest of the time between the starts of two rounds. lambda
follows from both curves and the number of generated tokens, and is at least the target's own throughput. Until
both curves are measured, all rows continue.

Measurements decay: a time's weight by `_MEMORY` with each new one, tokens and seconds per row, so that lambda adapts at
once when rows join or leave. After `_PROBE_EVERY` rounds without a second step, one round drafts further to measure it.
"""

from collections.abc import Callable
from time import perf_counter

import numpy as np

from decode.policies.base import Number
from decode.policies.batch import BatchCosts, Controller, Curve

_MEMORY = 0.95
_ROW_MEMORY = 0.995  # decay of tokens and seconds per row of a round
_PROBE_EVERY = 32
# after `_FEW` measurements, a new one is limited to `_MOST` times their mean
_FEW = 8.0
_MOST = 2.0
_RIDGE = 0.1  # ridge penalty on the slope, relative to the squared mean number
_LEAST = 0.1  # one row or token takes at least this share of the mean time


class Measured:
    """Seconds as a linear function of a number of rows or tokens, fitted to measurements that decay by `_MEMORY`."""

    def __init__(self) -> None:
        self._weight = self._number = self._seconds = self._square = self._product = 0.0

    def add(self, number: int, seconds: float) -> None:
        """Add a measurement; outliers are limited."""
        if self._weight > _FEW:
            seconds = min(seconds, _MOST * self._seconds)
        self._weight = self._weight * _MEMORY + 1.0
        share = 1.0 / self._weight
        distance = number - self._number
        excess_s = seconds - self._seconds
        self._number, self._seconds = self._number + share * distance, self._seconds + share * excess_s
        self._square = (1.0 - share) * (self._square + share * distance * distance)
        self._product = (1.0 - share) * (self._product + share * distance * excess_s)

    @property
    def curve(self) -> Curve | None:
        """The fitted line, which never decreases and is flat if the numbers hardly differ; None before the first."""
        if not self._weight:
            return None
        spread = self._square + _RIDGE * self._number**2 / self._weight
        slope_s = max(self._product / spread, 0.0)
        first_s = self._seconds - (self._number - 1.0) * slope_s
        return Curve.line(max(first_s, _LEAST * self._seconds), slope_s)


class MeasuredController(Controller):
    """Measures the rounds and draft steps of an engine and decides which rows under the batch rule continue."""

    is_paid = False
    """The next step runs in any case, for rows with other policies."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock, self._draft, self._target = clock, Measured(), Measured()
        self._costs: BatchCosts | None = None
        self._tokens = self._row_seconds = self._first_s = self._at_s = 0.0
        self._num_rows = self._num_steps = self._idle = 0

    def begin(self, num_rows: int, *, num_ended: int, num_tokens: int, num_emitted: int) -> None:
        """Record the end of a round and begin the next.

        Args:
            num_rows: rows of the new round.
            num_ended: rows that drafted in the last round.
            num_tokens: tokens that the target verified for them: their drafts, and one more each.
            num_emitted: tokens that were generated for them.
        """
        now_s = self._clock()
        # a step in which other rows process their prompts does not measure verification
        if num_ended == num_rows > 0:
            self._target.add(num_tokens, now_s - self._at_s + self._first_s)
        draft = self._draft.curve
        target = self._target.curve
        num_more = max(self._num_steps - 1, 0)
        if draft is not None and target is not None and num_ended:
            self._costs = BatchCosts(draft, target)
            decay = _ROW_MEMORY**num_ended
            seconds = float(target(num_tokens) + num_more * draft(self._num_rows))
            self._tokens = decay * self._tokens + num_emitted
            self._row_seconds = decay * self._row_seconds + num_ended * seconds
        self._idle = self._idle + 1 if self._num_steps < 2 else 0
        self._num_rows = num_rows
        self._num_steps = 0
        self._first_s = 0.0
        self._at_s = now_s

    def step(self) -> None:
        """Record a draft step of all rows."""
        now_s = self._clock()
        if self._num_steps:
            self._draft.add(self._num_rows, now_s - self._at_s)
        else:
            self._first_s = now_s - self._at_s
        self._num_steps = self._num_steps + 1
        self._at_s = now_s

    def continuing(self, expected_tokens: Number, num_tokens: int) -> Number:
        if self._costs is None or (self._idle >= _PROBE_EVERY and self._num_steps < 2):
            return np.ones(len(expected_tokens), dtype=bool)
        return super().continuing(expected_tokens, num_tokens)

    def step_cost_s(self, numbers: Number, num_tokens: int) -> Number:  # type: ignore[override]
        assert self._costs is not None
        step_s = 0.0 if self.is_paid or self._num_steps == 0 else self._costs.draft(self._num_rows)
        return self._costs.target(num_tokens + numbers) - self._costs.target(num_tokens) + step_s

    @property
    def throughput(self) -> float:  # type: ignore[override]
        """lambda for the rows of this round."""
        assert self._costs is not None
        alone = 1.0 / float(self._costs.target(self._num_rows))
        return self._num_rows * max(alone, self._tokens / self._row_seconds)

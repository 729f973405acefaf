"""torchmetrics over histograms: their states are sums, so an epoch's result is right over any batches and any number of
processes.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from heads.measures.histogram import Histogram, observe
from heads.measures.survival import ExpectedCounts, by_position, expected_counts

NUM_POSITIONS = 8
"""Draft positions that are reported one by one."""
THRESHOLDS = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Values of max_rejection_prob at which expected rates are reported."""
MAX_DRAFT_LENGTH = 20


class Sums(Metric):
    """A NamedTuple of tensors, added up over batches and processes."""

    full_state_update = False

    def __init__(self, zeros: Histogram | ExpectedCounts) -> None:
        super().__init__()
        self._kind = type(zeros)
        for name, value in zeros._asdict().items():
            self.add_state(name, default=value, dist_reduce_fx="sum")

    def update(self, values: Histogram | ExpectedCounts) -> None:
        """Add what some tokens come to."""
        for name, value in values._asdict().items():
            getattr(self, name).add_(value)

    def compute(self) -> Any:
        """The sums so far, in the type of `zeros`."""
        return self._kind(*(getattr(self, name) for name in self._kind._fields))


class LogitHistogram(Sums):
    """`Histogram` of several rows of logits."""

    def __init__(self, num_rows: int) -> None:
        super().__init__(observe(torch.zeros(num_rows, 0), torch.zeros(1, 0)))


class DraftMetric(nn.Module):
    """Figures of predictions along a draft: `heads.measures.survival`, for one way of making a probability of the
    logit.

    Attributes:
        token, survival: the histograms of `by_position`.
        counts: the `ExpectedCounts`.
    """

    def __init__(self, num_heads: int, *, lag: int) -> None:
        super().__init__()
        self.lag = lag
        self.token, self.survival = LogitHistogram(num_heads * NUM_POSITIONS), LogitHistogram(num_heads * NUM_POSITIONS)
        zeros = (torch.zeros(num_heads, len(THRESHOLDS), dtype=torch.float64) for _ in ExpectedCounts._fields)
        self.counts = Sums(ExpectedCounts(*zeros))

    def update(self, logit: Tensor, acceptance_prob: Tensor, *, row_lengths: Tensor) -> None:
        """Add [heads, tokens] logits of whole responses."""
        token, survival = by_position(logit, acceptance_prob, row_lengths=row_lengths, num_positions=NUM_POSITIONS)
        self.token.update(token)
        self.survival.update(survival)
        counts = expected_counts(
            logit,
            acceptance_prob,
            row_lengths=row_lengths,
            thresholds=torch.tensor(THRESHOLDS),
            max_draft_length=MAX_DRAFT_LENGTH,
            lag=self.lag,
        )
        self.counts.update(counts)

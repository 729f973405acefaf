"""torchmetrics over histograms: their states are sums, so an epoch's result is right over any batches and any number of
processes.
"""

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from heads.measures.histogram import Histogram, observe
from heads.measures.survival import ExpectedCounts, by_position, expected_counts

NUM_POSITIONS = 8
"""Draft positions that are reported one by one."""
THRESHOLDS = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Values of max_rejection_prob at which expected rates are reported."""
MAX_DRAFT_LENGTH = 20


class LogitHistogram(Metric):
    """`Histogram` of several rows of logits."""

    full_state_update = False

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        of_no_token = observe(torch.zeros(num_rows, 0), torch.zeros(1, 0))
        for name, zeros in of_no_token._asdict().items():
            self.add_state(name, default=zeros, dist_reduce_fx="sum")

    def update(self, histogram: Histogram) -> None:
        """Add the observations of some tokens."""
        for name, value in histogram._asdict().items():
            getattr(self, name).add_(value)

    def compute(self) -> Histogram:
        """Histograms of all observations so far."""
        return Histogram(**{name: getattr(self, name) for name in Histogram._fields})


class DraftMetric(Metric):
    """Figures of predictions along a draft: `heads.measures.survival`, for one way of making a probability of the
    logit. The expected counts are its own; `token` and `survival` hold the histograms of `by_position`.
    """

    full_state_update = False

    def __init__(self, num_heads: int, *, lag: int) -> None:
        super().__init__()
        self.lag = lag
        self.token, self.survival = LogitHistogram(num_heads * NUM_POSITIONS), LogitHistogram(num_heads * NUM_POSITIONS)
        self.thresholds = torch.tensor(THRESHOLDS)
        for name in ExpectedCounts._fields:
            self.add_state(
                name, default=torch.zeros(num_heads, len(THRESHOLDS), dtype=torch.float64), dist_reduce_fx="sum"
            )

    def update(self, logit: Tensor, acceptance_prob: Tensor, *, row_lengths: Tensor) -> None:
        """Add [heads, tokens] logits of whole responses."""
        token, survival = by_position(logit, acceptance_prob, row_lengths=row_lengths, num_positions=NUM_POSITIONS)
        self.token.update(token)
        self.survival.update(survival)
        counts = expected_counts(
            logit,
            acceptance_prob,
            row_lengths=row_lengths,
            thresholds=self.thresholds,
            max_draft_length=MAX_DRAFT_LENGTH,
            lag=self.lag,
        )
        for name, value in counts._asdict().items():
            getattr(self, name).add_(value)

    def compute(self) -> ExpectedCounts:
        """Expected counts of all responses so far."""
        return ExpectedCounts(**{name: getattr(self, name) for name in ExpectedCounts._fields})

    def reset(self) -> Any:
        self.token.reset()
        self.survival.reset()
        super().reset()

"""torchmetrics over histograms: sums, so an epoch's result is exact for any batches and any number of processes."""

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from heads.measures.histogram import Histogram, observe
from heads.measures.survival import by_position

NUM_POSITIONS = 8
"""Number of draft positions with metrics of their own."""


class LogitHistogram(Metric):
    """A `Histogram`, summed over batches and processes."""

    full_state_update = False

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        for name, value in observe(torch.zeros(num_rows, 0), torch.zeros(1, 0))._asdict().items():
            self.add_state(name, default=value, dist_reduce_fx="sum")

    def update(self, values: Histogram) -> None:
        """Add a histogram."""
        for name, value in values._asdict().items():
            getattr(self, name).add_(value)

    def compute(self) -> Histogram:
        """The sums so far."""
        return Histogram(*(getattr(self, name) for name in Histogram._fields))


class DraftMetric(nn.Module):
    """The two histograms of `heads.measures.survival.by_position`, for raw or for calibrated logits."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.token, self.survival = LogitHistogram(num_heads * NUM_POSITIONS), LogitHistogram(num_heads * NUM_POSITIONS)

    def update(self, logit: Tensor, acceptance_prob: Tensor, *, row_lengths: Tensor) -> None:
        """Add [heads, tokens] logits of whole responses."""
        token, survival = by_position(logit, acceptance_prob, row_lengths=row_lengths, num_positions=NUM_POSITIONS)
        self.token.update(token)
        self.survival.update(survival)

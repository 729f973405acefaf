"""A histogram that is summed over batches and processes: training's, since torchmetrics takes long to import."""

import torch
from torchmetrics import Metric

from heads.measures.histogram import Histogram, observe


class Sums(Metric):
    """A `Histogram`, summed over batches and, by `compute`, over processes."""

    full_state_update = False

    def __init__(self, num_rows: int, device: torch.device) -> None:
        super().__init__()
        for name, value in observe(torch.zeros(num_rows, 0), torch.zeros(1, 0))._asdict().items():
            self.add_state(name, default=value, dist_reduce_fx="sum")
        self.to(device)

    def update(self, histogram: Histogram) -> None:
        """Add the histogram of a batch."""
        for name, value in histogram._asdict().items():
            getattr(self, name).add_(value)

    def compute(self) -> Histogram:
        """The sum so far; every process must call this."""
        return Histogram(*(getattr(self, name) for name in Histogram._fields))

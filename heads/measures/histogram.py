"""A histogram of logits against soft labels: constant memory for all metrics and the calibration of a head.

Bins of the logit z are 1/64 wide over [-16, 16]. Each bin is evaluated at its mean logit, so the error of a smooth
function g is about g'' / 98,304, below 3e-6 for the cross-entropy. Histograms add up, so the metrics of an epoch are
exact for any batches and any number of processes.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torchmetrics import Metric

NUM_BINS = 2048
LIMIT = 16.0


class Histogram(NamedTuple):
    """Sums of one histogram for each index of any leading axes (heads, draft positions); float64."""

    weight: Float[Tensor, "*lead bin"]
    accepted: Float[Tensor, "*lead bin"]
    """Sum of w P."""
    logit: Float[Tensor, "*lead bin"]
    """Sum of w z."""
    product: Float[Tensor, "*lead"]
    """Sum of w P z, which makes the linear part of the cross-entropy exact."""
    squares: Float[Tensor, "*lead"]
    """Sum of w P^2."""
    entropy: Float[Tensor, "*lead"]
    """Sum of w H(P), nats."""

    @property
    def total(self) -> Float[Tensor, "*lead"]:
        """Sum of the weights w."""
        return self.weight.sum(-1)

    @property
    def mean_logit(self) -> Float[Tensor, "*lead bin"]:
        """Mean logit of each bin; 0 for an empty one."""
        return torch.where(self.weight > 0, self.logit / self.weight.clamp_min(1e-300), torch.zeros_like(self.logit))


def observe(
    logit: Float[Tensor, "lead tokens"],
    acceptance_prob: Float[Tensor, "#lead tokens"],
    weight: Float[Tensor, "#lead tokens"] | None = None,
) -> Histogram:
    """The histogram of some tokens.

    Args:
        logit: z, one row per head (or per head and position).
        acceptance_prob: soft labels P in [0, 1]; one row per head, or one for all.
        weight: weights w, likewise; None: 1.
    """
    z, p = logit.double(), acceptance_prob.double().expand_as(logit)
    w = torch.ones_like(z) if weight is None else weight.double().expand_as(z)
    bins = ((z.clamp(-LIMIT, LIMIT) + LIMIT) * (NUM_BINS / (2 * LIMIT))).long().clamp(max=NUM_BINS - 1)
    entropy = -(torch.xlogy(p, p) + torch.xlogy(1 - p, 1 - p))
    weight, accepted, logits = (z.new_zeros(len(z), NUM_BINS).scatter_add_(1, bins, x) for x in (w, w * p, w * z))
    sums = ((w * value).sum(-1) for value in (p * z, p * p, entropy))
    return Histogram(weight, accepted, logits, *sums)


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

"""The metrics of a prediction P̂ = sigmoid(a z + b) against soft labels P, from a histogram of z
(`heads.measures.histogram`).

bce    mean of -P ln P̂ - (1 - P) ln(1 - P̂)
kl     bce - mean of H(P): binary KL(P || P̂) >= 0 (the official SpecDec++ code adds H instead of subtracting it)
brier  mean of (P̂ - P)^2
ece    sum over 15 equal bins of P̂ of (share of the bin) |mean P̂ - mean P|
auroc  probability that an accepted token is scored above a rejected one, each token counting P as accepted and 1 - P as
       rejected, ties one half; the same for raw and calibrated logits, since both increase with z
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from heads.measures.histogram import Histogram

NUM_ECE_BINS = 15


class Measures(NamedTuple):
    """One number per leading index; NaN where nothing was observed."""

    kl: Float[Tensor, "*lead"]
    bce: Float[Tensor, "*lead"]
    brier: Float[Tensor, "*lead"]
    ece: Float[Tensor, "*lead"]


class Reliability(NamedTuple):
    """Predicted against true probability, by bin of the prediction."""

    share: Float[Tensor, "*lead ece"]
    """Share of all weight; 0 for an empty bin."""
    predicted: Float[Tensor, "*lead ece"]
    true: Float[Tensor, "*lead ece"]


def measures(histogram: Histogram, slope: Tensor | float = 1.0, offset: Tensor | float = 0.0) -> Measures:
    """Metrics of sigmoid(slope z + offset); slope and offset by leading index."""
    z = _affine(histogram, slope, offset)
    total, accepted = histogram.total, histogram.accepted.sum(-1)
    prob = z.sigmoid()
    bce = ((histogram.weight * F.softplus(z)).sum(-1) - slope * histogram.product - offset * accepted) / total
    brier = ((histogram.weight * prob**2).sum(-1) - 2 * (histogram.accepted * prob).sum(-1) + histogram.squares) / total
    bins = reliability(histogram, slope, offset)
    ece = (bins.share * (bins.predicted - bins.true).abs()).sum(-1)
    return Measures(
        kl=bce - histogram.entropy / total,
        bce=bce,
        brier=brier,
        ece=torch.where(accepted.isnan() | (total == 0), torch.nan, ece),
    )


def reliability(histogram: Histogram, slope: Tensor | float = 1.0, offset: Tensor | float = 0.0) -> Reliability:
    """Mean prediction and mean label in each of 15 equal bins of the prediction."""
    prob = _affine(histogram, slope, offset).sigmoid()
    index = (prob * NUM_ECE_BINS).long().clamp(max=NUM_ECE_BINS - 1)
    zeros = torch.zeros(*prob.shape[:-1], NUM_ECE_BINS, dtype=prob.dtype, device=prob.device)
    weight, predicted, true = (
        zeros.scatter_add(-1, index, x) for x in (histogram.weight, histogram.weight * prob, histogram.accepted)
    )
    divisor, total = weight.clamp_min(1e-300), histogram.total.clamp_min(1e-300)
    return Reliability(share=weight / total[..., None], predicted=predicted / divisor, true=true / divisor)


def auroc(histogram: Histogram) -> Float[Tensor, "*lead"]:
    """Soft-label AUROC; tokens in one bin of the logit (1/64 wide) count as ties."""
    positive, negative = histogram.accepted, histogram.weight - histogram.accepted
    below = negative.cumsum(-1) - negative
    return (positive * (below + negative / 2)).sum(-1) / (positive.sum(-1) * negative.sum(-1))


def _affine(histogram: Histogram, slope: Tensor | float, offset: Tensor | float) -> Tensor:
    slope, offset = (torch.as_tensor(x, dtype=torch.float64, device=histogram.weight.device) for x in (slope, offset))
    return histogram.mean_logit * slope[..., None] + offset[..., None]

"""The metrics of a prediction P̂ = sigmoid(a z + b) against soft labels P, from a histogram of z
(`heads.measures.histogram`), and the a and b that minimise its cross-entropy.

bce    mean of -P ln P̂ - (1 - P) ln(1 - P̂)
kl     bce - mean of H(P): binary KL(P || P̂) >= 0 (the official SpecDec++ code adds H instead of subtracting it)
brier  mean of (P̂ - P)^2
ece    sum over 15 equal bins of P̂ of (share of the bin) |mean P̂ - mean P|
auroc  probability that an accepted token is scored above a rejected one, each token counting P as accepted and 1 - P as
       rejected, ties one half; the same for raw and calibrated logits, since both increase with z

A head's calibrated logit is (f + ln(w_rej / w_acc)) / T: the shift undoes the loss weights (law 4.7), and T minimises
the cross-entropy on dev. A signal such as log q(y) gets the a z + b of a logistic regression, for a fair comparison.
"""

from dataclasses import asdict, replace
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from heads.measures.histogram import Histogram, observe
from heads.model.head import AcceptanceHead

NUM_ECE_BINS = 15
_STEPS = 50
"""Newton steps of a fit; the cross-entropy is convex."""
_RIDGE = 1e-9
"""Keeps the curvature positive where all logits are equal."""


class Measures(NamedTuple):
    """One number per leading index; NaN where nothing was observed."""

    kl: Float[Tensor, "*lead"]
    bce: Float[Tensor, "*lead"]
    brier: Float[Tensor, "*lead"]
    ece: Float[Tensor, "*lead"]


def measures(histogram: Histogram, slope: Tensor | float = 1.0, offset: Tensor | float = 0.0) -> Measures:
    """Metrics of sigmoid(slope z + offset); slope and offset by leading index."""
    z = _affine(histogram, slope, offset)
    total = histogram.total
    accepted = histogram.accepted.sum(-1)
    prob = z.sigmoid()
    bce = ((histogram.weight * F.softplus(z)).sum(-1) - slope * histogram.product - offset * accepted) / total
    brier = ((histogram.weight * prob**2).sum(-1) - 2 * (histogram.accepted * prob).sum(-1) + histogram.squares) / total
    bins = reliability(histogram, slope, offset)
    ece = (bins["share"] * (bins["predicted"] - bins["true"]).abs()).sum(-1)
    return Measures(
        kl=bce - histogram.entropy / total,
        bce=bce,
        brier=brier,
        ece=torch.where(accepted.isnan() | (total == 0), torch.nan, ece),
    )


def reliability(
    histogram: Histogram, slope: Tensor | float = 1.0, offset: Tensor | float = 0.0
) -> dict[str, Float[Tensor, "*lead ece"]]:
    """share (of the weight), predicted and true (mean label) of each of 15 equal bins of the prediction; 0 if empty."""
    prob = _affine(histogram, slope, offset).sigmoid()
    index = (prob * NUM_ECE_BINS).long().clamp(max=NUM_ECE_BINS - 1)
    zeros = torch.zeros(*prob.shape[:-1], NUM_ECE_BINS, dtype=prob.dtype, device=prob.device)
    weight, predicted, true = (
        zeros.scatter_add(-1, index, x) for x in (histogram.weight, histogram.weight * prob, histogram.accepted)
    )
    divisor = weight.clamp_min(1e-300)
    total = histogram.total.clamp_min(1e-300)
    return {"share": weight / total[..., None], "predicted": predicted / divisor, "true": true / divisor}


def auroc(histogram: Histogram) -> Float[Tensor, "*lead"]:
    """Soft-label AUROC; tokens in one bin of the logit (1/64 wide) count as ties."""
    positive = histogram.accepted
    negative = histogram.weight - histogram.accepted
    below = negative.cumsum(-1) - negative
    return (positive * (below + negative / 2)).sum(-1) / (positive.sum(-1) * negative.sum(-1))


def fit_temperature(histogram: Histogram, shift: Float[Tensor, " heads"]) -> Float[Tensor, " heads"]:
    """T of each head, in [0.05, 20]."""
    z = histogram.mean_logit + shift.to(histogram.weight)[:, None]
    slope = torch.ones_like(z[:, 0])
    total = histogram.total.clamp_min(1e-300)
    label = histogram.product + shift.to(histogram.weight) * histogram.accepted.sum(-1)
    for _ in range(_STEPS):
        prob = (z * slope[:, None]).sigmoid()
        gradient = ((histogram.weight * prob * z).sum(-1) - label) / total
        curvature = (histogram.weight * prob * (1 - prob) * z * z).sum(-1) / total + _RIDGE
        # far from the optimum the curvature is near zero, and a full Newton step would overshoot
        slope = (slope - (gradient / curvature).clamp(-0.5, 0.5)).clamp(0.05, 20.0)
    return 1 / slope


def fit_logistic(histogram: Histogram) -> tuple[Float[Tensor, " signals"], Float[Tensor, " signals"]]:
    """(a, b) of the logistic regression of P on each signal z; z is standardised so that Newton's method converges."""
    total = histogram.total.clamp_min(1e-300)
    mean = (histogram.weight * histogram.mean_logit).sum(-1) / total
    scale = ((histogram.weight * (histogram.mean_logit - mean[:, None]) ** 2).sum(-1) / total).sqrt().clamp_min(1e-9)
    x = (histogram.mean_logit - mean[:, None]) / scale[:, None]
    design = torch.stack([x, torch.ones_like(x)], -1)
    accepted = histogram.accepted.sum(-1)
    label = torch.stack([(histogram.product - mean * accepted) / scale, accepted], -1)
    beta = torch.zeros(len(x), 2, dtype=x.dtype, device=x.device)
    for _ in range(_STEPS):
        prob = (design @ beta[..., None]).squeeze(-1).sigmoid()
        gradient = ((design * (histogram.weight * prob)[..., None]).sum(1) - label) / total[:, None]
        weight = histogram.weight * prob * (1 - prob)
        curvature = torch.einsum("sbi,sb,sbj->sij", design, weight, design) / total[:, None, None]
        curvature = curvature + _RIDGE * torch.eye(2, dtype=x.dtype, device=x.device)
        beta = beta - torch.linalg.solve(curvature, gradient).clamp(-2, 2)
    slope = beta[:, 0] / scale
    return slope, beta[:, 1] - slope * mean


def sequential_temperatures(
    logits: Float[Tensor, "draft position"], survival: Float[Tensor, "draft position"]
) -> dict[str, list[float]]:
    """Temperatures of confidences, position after position, each with the smallest ECE of the predicted survival: the
    product of the confidences so far (SGLang 0.5.23, `dspark_sts_fit`, whose 41 temperatures from 0.1 to 10 these are).
    `logits` are confidences of whole blocks, `survival` the probabilities that all tokens up to each are accepted.
    """
    grid = torch.logspace(-1, 1, 41, dtype=torch.float64)
    fitted: dict[str, list[float]] = {"temperatures": [], "ece_before": [], "ece_after": []}
    before = torch.zeros_like(logits[:, 0])
    after = torch.zeros_like(logits[:, 0])
    for logit, label in zip(logits.T, survival.T, strict=True):
        before = before + F.logsigmoid(logit)
        candidates = after + F.logsigmoid(logit / grid[:, None])
        predicted = torch.cat([before[None], candidates]).clamp(max=-1e-12)
        errors = measures(observe(predicted - torch.log(-torch.expm1(predicted)), label[None])).ece
        best = int(errors[1:].argmin())
        after = candidates[best]
        for column, value in zip(fitted.values(), (grid[best], errors[0], errors[1 + best]), strict=True):
            column.append(float(value))
    return fitted


def recalibrated(
    head: AcceptanceHead, logit: Float[Tensor, " tokens"], acceptance_prob: Float[Tensor, " tokens"]
) -> AcceptanceHead:
    """The head with slope and offset of its calibrated logit refitted to other tokens, such as those of another
    `Sampling`; its raw and calibrated probabilities are the same.
    """
    slope, offset = map(float, fit_logistic(observe(head.calibrated_logit(logit)[None], acceptance_prob[None])))
    plain = replace(head.provenance, accept_weight=1.0, reject_weight=1.0, calibration_temperature=1.0)
    fitted = AcceptanceHead.from_config(head.config | asdict(plain))
    scale = slope / head.provenance.calibration_temperature
    weights = {name: scale * t if name.startswith(("out.", "skip.")) else t for name, t in head.state_dict().items()}
    weights["out.bias"] = weights["out.bias"] + scale * head.calibration_shift + offset
    fitted.load_state_dict(weights)
    return fitted.eval()


def _affine(histogram: Histogram, slope: Tensor | float, offset: Tensor | float) -> Tensor:
    slope, offset = (torch.as_tensor(x, dtype=torch.float64, device=histogram.weight.device) for x in (slope, offset))
    return histogram.mean_logit * slope[..., None] + offset[..., None]

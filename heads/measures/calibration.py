"""Calibration: from a logit to an acceptance probability.

A head's calibrated logit is (f + ln(w_rej / w_acc)) / T: the shift undoes the loss weights (law 4.7), and T minimises
the cross-entropy on dev. The cross-entropy is convex in s = 1 / T, so Newton's method from s = 1 finds the minimum. A
signal such as log q(y) gets the a z + b of a one-dimensional logistic regression, for a fair comparison.
"""

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from heads.measures.histogram import Histogram, observe
from heads.model.head import AcceptanceHead

_STEPS = 50
_RIDGE = 1e-9
"""Keeps the curvature positive where all logits are equal."""


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
        curvature = (
            torch.einsum("sbi,sb,sbj->sij", design, histogram.weight * prob * (1 - prob), design) / total[:, None, None]
        )
        curvature = curvature + _RIDGE * torch.eye(2, dtype=x.dtype, device=x.device)
        beta = beta - torch.linalg.solve(curvature, gradient).clamp(-2, 2)
    slope = beta[:, 0] / scale
    return slope, beta[:, 1] - slope * mean


def recalibrated(
    head: AcceptanceHead, logit: Float[Tensor, " tokens"], acceptance_prob: Float[Tensor, " tokens"]
) -> AcceptanceHead:
    """The head with slope and offset of its calibrated logit refitted to other tokens, such as those of another
    `Sampling`; its raw and calibrated probabilities are the same.
    """
    slope, offset = map(float, fit_logistic(observe(head.calibrated_logit(logit)[None], acceptance_prob[None])))
    plain = replace(head.provenance, accept_weight=1.0, reject_weight=1.0, calibration_temperature=1.0)
    fitted = AcceptanceHead.from_config(head.config | plain.as_dict())
    scale = slope / head.temperature
    weights = {name: scale * t if name.startswith(("out.", "skip.")) else t for name, t in head.state_dict().items()}
    weights["out.bias"] = weights["out.bias"] + scale * head.calibration_shift + offset
    fitted.load_state_dict(weights)
    return fitted.eval()

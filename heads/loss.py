"""The loss of law 4.7 (SpecDec++, arXiv 2405.19715, section 3.3), for many heads at once.

    L = sum_i [w_acc P_i softplus(-f_i) + w_rej (1 - P_i) softplus(f_i)] / sum_i [w_acc P_i + w_rej (1 - P_i)]

Its population optimum is f* = logit(P) - ln(w_rej / w_acc). The denominator depends on the labels alone; across processes it is averaged
(`heads.sweep`), so that two processes with half a batch each take the same step as one process with the whole.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F  # noqa: N812


def loss_mass(
    acceptance_prob: Float[Tensor, " tokens"], accept_weight: Float[Tensor, " heads"], reject_weight: Float[Tensor, " heads"]
) -> Float[Tensor, " heads"]:
    """sum_i [w_acc P_i + w_rej (1 - P_i)] of each head: the denominator."""
    accepted = acceptance_prob.sum()
    return accept_weight * accepted + reject_weight * (acceptance_prob.numel() - accepted)


def weighted_bce(
    logit: Float[Tensor, "heads tokens"],
    acceptance_prob: Float[Tensor, " tokens"],
    *,
    accept_weight: Float[Tensor, " heads"],
    reject_weight: Float[Tensor, " heads"],
    mass: Float[Tensor, " heads"] | None = None,
) -> Float[Tensor, " heads"]:
    """L of each head; softplus(-f) = softplus(f) - f saves one of the two.

    Args:
        logit: f, one row per head.
        acceptance_prob: the label P in [0, 1], shared by all heads.
        mass: the denominator, where it is not this batch's own.
    """
    logit = logit.float()
    accept = accept_weight[:, None] * acceptance_prob
    total = accept + reject_weight[:, None] * (1 - acceptance_prob)
    mass = loss_mass(acceptance_prob, accept_weight, reject_weight) if mass is None else mass
    return (total * F.softplus(logit) - accept * logit).sum(-1) / mass.clamp_min(torch.finfo(torch.float32).tiny)

"""The loss of law 4.7 (SpecDec++, arXiv 2405.19715, section 3.3), for many heads at once.

    L = sum_i [w_acc P_i softplus(-f_i) + w_rej (1 - P_i) softplus(f_i)] / sum_i [w_acc P_i + w_rej (1 - P_i)]

Its population optimum is f* = logit(P) - ln(w_rej / w_acc). The denominator depends on the labels alone; across
processes it is averaged (`mean_over_processes`), so that two processes with half a batch each take the same step as one
process with the whole.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F  # noqa: N812


def loss_mass(
    acceptance_prob: Float[Tensor, " tokens"],
    accept_weight: Float[Tensor, " heads"],
    reject_weight: Float[Tensor, " heads"],
) -> Float[Tensor, " heads"]:
    """sum_i [w_acc P_i + w_rej (1 - P_i)] of each head: the denominator."""
    accepted = acceptance_prob.sum()
    return accept_weight * accepted + reject_weight * (acceptance_prob.numel() - accepted)


def mean_over_processes(values: Tensor) -> Tensor:
    """`values`, averaged over the processes of the run: of denominators, so that averaged gradients are those of the
    batch.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return values
    total = values.clone()
    torch.distributed.all_reduce(total)
    return total / torch.distributed.get_world_size()


class Targets(NamedTuple):
    """Targets and weights that the loss needs besides logits."""

    label: Float[Tensor, " tokens"]
    """P in [0, 1], shared by all heads."""
    accept_weight: Float[Tensor, " heads"]
    reject_weight: Float[Tensor, " heads"]
    mass: Float[Tensor, " heads"]
    """The denominator: `loss_mass`, averaged over processes."""

    @classmethod
    def of(cls, label: Tensor, accept_weight: Tensor, reject_weight: Tensor) -> "Targets":
        """Targets with the batch's own denominator."""
        return cls(label, accept_weight, reject_weight, loss_mass(label, accept_weight, reject_weight))


def weighted_bce(logit: Float[Tensor, "heads tokens"], targets: Targets) -> Float[Tensor, " heads"]:
    """L of each head; softplus(-f) = softplus(f) - f saves one of the two."""
    logit = logit.float()
    accept = targets.accept_weight[:, None] * targets.label
    total = accept + targets.reject_weight[:, None] * (1 - targets.label)
    return (total * F.softplus(logit) - accept * logit).sum(-1) / targets.mass.clamp_min(
        torch.finfo(torch.float32).tiny
    )

"""The loss of law 4.7 (SpecDec++, arXiv 2405.19715, section 3.3), for many heads at once.

    L = sum_i [w_acc P_i softplus(-f_i) + w_rej (1 - P_i) softplus(f_i)] / sum_i [w_acc P_i + w_rej (1 - P_i)]

Its population optimum is f* = logit(P) - ln(w_rej / w_acc). Token weights (`heads.reached`) multiply a token's terms in
numerator and denominator. The denominator is averaged over processes (`mean_over_processes`), so that two processes
with half a batch each take the same step as one with the whole batch.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F  # noqa: N812


def mean_over_processes(values: Tensor) -> Tensor:
    """`values`, averaged over the processes of the run."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return values
    total = values.clone()
    torch.distributed.all_reduce(total)
    return total / torch.distributed.get_world_size()


class Targets(NamedTuple):
    """The loss's arguments besides the logits."""

    accepted: Float[Tensor, " tokens"]
    """P in [0, 1] times the token's weight, shared by all heads."""
    rejected: Float[Tensor, " tokens"]
    """1 - P, likewise."""
    accept_weight: Float[Tensor, " heads"]
    reject_weight: Float[Tensor, " heads"]
    mass: Float[Tensor, " heads"]
    """The denominator, averaged over processes."""

    @classmethod
    def of(
        cls, label: Tensor, accept_weight: Tensor, reject_weight: Tensor, token_weight: Tensor | None = None
    ) -> "Targets":
        """Targets of a batch, with its own denominator; without token weights every token has weight 1."""
        accepted, rejected = label, 1 - label
        if token_weight is not None:
            accepted, rejected = token_weight * accepted, token_weight * rejected
        mass = accept_weight * accepted.sum() + reject_weight * rejected.sum()
        return cls(accepted, rejected, accept_weight, reject_weight, mass)

    def at(self, part: slice) -> "Targets":
        """Targets of some tokens, with the denominator of all."""
        return self._replace(accepted=self.accepted[part], rejected=self.rejected[part])

    @property
    def coefficients(self) -> tuple[Float[Tensor, "heads tokens"], Float[Tensor, "heads tokens"]]:
        """(a, b) of the numerator a softplus(f) - b f, since softplus(-f) = softplus(f) - f."""
        accept = self.accept_weight[:, None] * self.accepted
        return accept + self.reject_weight[:, None] * self.rejected, accept


def weighted_bce(logit: Float[Tensor, "heads tokens"], targets: Targets) -> Float[Tensor, " heads"]:
    """L of each head."""
    logit = logit.float()
    total, accept = targets.coefficients
    return (total * F.softplus(logit) - accept * logit).sum(-1) / targets.mass.clamp_min(
        torch.finfo(torch.float32).tiny
    )

"""Entropies in nats, from logits: H(q) and H(q, p) of untruncated distributions at temperature 1 (law 4.1).

A truncated or greedy distribution has an entropy near zero everywhere and says nothing, so signals never see the
sampling transform.
"""

from jaxtyping import Float
from torch import Tensor


def entropy(logits: Float[Tensor, "*position vocab"]) -> Float[Tensor, "*position"]:
    """H = -sum_v softmax(logits)_v log softmax(logits)_v >= 0, in nats, float32 or wider."""
    log_probs = _log_softmax(logits)
    return -(log_probs.exp() * log_probs.clamp_min(-1e4)).sum(-1).clamp_max(0.0)  # else -1e-7 for a near-certain token


def cross_entropy(
    q_logits: Float[Tensor, "*position vocab"], p_logits: Float[Tensor, "*position vocab"]
) -> Float[Tensor, "*position"]:
    """H(q, p) = -sum_v q_v log p_v, in nats, float32 or wider; at least H(q). SVIP (arXiv 2411.18462) bounds acceptance
    by it.
    """
    return -(_log_softmax(q_logits).exp() * _log_softmax(p_logits).clamp_min(-1e4)).sum(-1)


def _log_softmax(logits: Tensor) -> Tensor:
    return (logits if logits.itemsize >= 4 else logits.float()).log_softmax(-1)

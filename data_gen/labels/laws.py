"""Labels of law 4.6 from the logits of both models at the same positions; pure mathematics.

    Y_i ~ q_i                                   under the run's Sampling
    acceptance_prob_i = min(1, p_i(Y_i) / q_i(Y_i))
    log_p_i = log p_i(Y_i), log_q_i = log q_i(Y_i)             under the run's Sampling; log_p is -inf at p_i(Y_i) = 0
    acceptance_rate_i = sum_v min(p_i(v), q_i(v))              under the run's Sampling
    entropy_i = H(q_i), cross_entropy_i = H(q_i, p_i)          untruncated, temperature 1, in nats (law 4.1)
    log_token_prob_i = log q_i(Y_i)                            untruncated, temperature 1

With one model at a time (`mode: sequential`) the draft's labels come first and the target's later: acceptance_prob
needs only the two scalars log_p and log_q, while acceptance_rate and cross_entropy need both distributions at once.
With p from a server (`labels: server`) only cross_entropy is missing, which needs the untruncated p.
"""

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from lm import Sampling, acceptance_rate, cross_entropy
from lm.draws import draw
from lm.signals import signals_of, stored_scalars

Labels = dict[str, Shaped[Tensor, " position"]]
"""Some labels by their names on disk."""
NUMBERS_OF_DRAFT = ("log_q", *stored_scalars())
"""Labels that need only the draft, besides draft_ids."""
NUMBERS_OF_TARGET = ("log_p", "acceptance_prob")
"""Labels that need the target and the draft's labels."""
NUMBERS_OF_BOTH = ("acceptance_rate", "cross_entropy")
"""Labels that need both distributions at once."""


def label_draft(
    q_logits: Float[Tensor, "position vocab"],
    uniform: Float[Tensor, " position"] | None,
    sampling: Sampling,
    draft_ids: Int[Tensor, " position"] | None = None,
) -> tuple[Labels, Float[Tensor, "position vocab"]]:
    """Draw draft_ids, unless known, and compute `NUMBERS_OF_DRAFT` at them; also q, for `label_joint`."""
    q_logits = q_logits.float()
    q = sampling.probs(q_logits)
    if draft_ids is None:
        assert uniform is not None
        draft_ids = draw(q, uniform.to(q.device))
    draft_ids = draft_ids.to(q.device)
    # signals from the logits: under truncation or another temperature q is not the model's own probability
    return {"draft_ids": draft_ids, "log_q": _at(q, draft_ids).log(), **signals_of(q_logits, draft_ids)}, q


def label_target(
    p_logits: Float[Tensor, "position vocab"], draft_ids: Int[Tensor, " position"], sampling: Sampling
) -> tuple[Float[Tensor, " position"], Float[Tensor, "position vocab"]]:
    """log p(Y), and p for `label_joint`."""
    p = sampling.probs(p_logits.float())
    return _at(p, draft_ids).log(), p


def label_served(
    q: Float[Tensor, "position vocab"],
    ids: Int[Tensor, "position support"],
    probs: Float[Tensor, "position support"],
    *,
    labels: Labels,
) -> Labels:
    """The target's labels from a distribution p given by the `probs` of some `ids`, padded with 0."""
    p = torch.zeros_like(q).scatter_add_(-1, ids.to(q.device, torch.int64), probs.to(q.device, q.dtype))
    log_p = _at(p, labels["draft_ids"]).log()
    return {
        "log_p": log_p,
        "acceptance_prob": acceptance_prob_of(log_p, labels["log_q"]),
        "acceptance_rate": acceptance_rate(q, p),
    }


def label_joint(
    q: Float[Tensor, "position vocab"],
    p: Float[Tensor, "position vocab"],
    *,
    q_logits: Float[Tensor, "position vocab"],
    p_logits: Float[Tensor, "position vocab"],
) -> Labels:
    """acceptance_rate under the run's `Sampling`, cross_entropy from the logits, both over a chunk of positions."""
    return {
        "acceptance_rate": acceptance_rate(q, p),
        "cross_entropy": cross_entropy(q_logits.float(), p_logits.float()),
    }


def acceptance_prob_of(
    log_p: Float[Tensor, " position"], log_q: Float[Tensor, " position"]
) -> Float[Tensor, " position"]:
    """min(1, exp(log_p - log_q)); 0 where log_p is -inf. log_q is finite: Y was drawn from q."""
    return (log_p - log_q).clamp(max=0.0).exp()


def mixed(
    response_ids: Int[Tensor, " position"], draft_ids: Int[Tensor, " position"], from_target: Tensor
) -> Int[Tensor, " position"]:
    """The mixed sequence Z: X_i where the coin `from_target` is true, else Y_i."""
    return torch.where(from_target, response_ids, draft_ids)


def _at(values: Tensor, ids: Tensor) -> Tensor:
    return values.gather(-1, ids.unsqueeze(-1)).squeeze(-1)

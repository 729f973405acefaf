"""Labels of law 4.6 from the logits of both models at the same positions; pure mathematics.

    log_p_i = log p_i(Y_i), log_q_i = log q_i(Y_i)             under the run's Sampling; log_p is -inf at p_i(Y_i) = 0
    acceptance_rate_i = sum_v min(p_i(v), q_i(v))              under the run's Sampling
    entropy_i = H(q_i), cross_entropy_i = H(q_i, p_i)          untruncated, temperature 1, in nats (law 4.1)
    log_token_prob_i = log q_i(Y_i)                            untruncated, temperature 1

With one model at a time (`mode: sequential`) the draft's labels come first and the target's later:
acceptance_prob needs only the two scalars log_p and log_q, while acceptance_rate and cross_entropy need both
distributions at once. With p from a server (`labels: server`) only cross_entropy is missing, which needs the
untruncated p.
"""

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from lm import Sampling, acceptance_rate, cross_entropy
from lm.draws import draw
from lm.signals import Normalised, signals_of, stored_scalars

Labels = dict[str, Shaped[Tensor, " position"]]
"""Some labels by their names on disk."""
NUMBERS = ("log_q", *stored_scalars(), "log_p", "acceptance_prob", "acceptance_rate", "cross_entropy")
"""All labels but draft_ids."""


def label_draft(
    q_logits: Float[Tensor, "position vocab"],
    uniform: Float[Tensor, " position"] | None,
    sampling: Sampling,
    draft_ids: Int[Tensor, " position"] | None = None,
) -> tuple[Labels, Float[Tensor, "position vocab"]]:
    """Draw draft_ids, unless known, and compute log_q and the scalars at them; also q, for `label_target`."""
    q_logits = q_logits.float()
    q = sampling.probs(q_logits)
    if draft_ids is None:
        assert uniform is not None
        draft_ids = draw(q, uniform.to(q.device))
    draft_ids = draft_ids.to(q.device)
    # under truncation or another temperature q is not the model's own probability
    own = Normalised(q_logits, q if sampling.is_plain else None)
    return {"draft_ids": draft_ids, "log_q": _at(q, draft_ids).log(), **signals_of(own, draft_ids)}, q


def label_target(
    p: Float[Tensor, "position vocab"],
    known: Labels,
    q: Float[Tensor, "position vocab"] | None = None,
    *,
    q_logits: Float[Tensor, "position vocab"] | None = None,
    p_logits: Float[Tensor, "position vocab"] | None = None,
) -> Labels:
    """log_p and acceptance_prob from p and the `known` draft_ids and log_q; with q also acceptance_rate, and
    with the logits of both models cross_entropy.
    """
    log_p = _at(p, known["draft_ids"]).log()
    labels = {"log_p": log_p, "acceptance_prob": acceptance_prob_of(log_p, known["log_q"])}
    if q is not None:
        labels["acceptance_rate"] = acceptance_rate(q, p)
    if q_logits is not None and p_logits is not None:
        labels["cross_entropy"] = cross_entropy(q_logits.float(), p_logits.float())
    return labels


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

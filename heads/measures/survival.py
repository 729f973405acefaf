"""Predictions along a draft: metrics by draft position, weighted by reach, and of the survival probability.

A draft of k tokens that starts at position s survives with probability S_k(s) = P_s … P_{s+k-1}; a head predicts the
product of its own probabilities. Verification reaches draft position k with probability S_{k-1}, so tokens have this
weight: tokens that it reaches are easier than average.

The labels follow the target's response, which the draft need not have drawn, so these metrics are approximate. They are
for choosing heads; `evaluate` replays decoding exactly (law 4.10).
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from heads.measures.histogram import Histogram, observe


def reach_of(acceptance_prob: Float[Tensor, " tokens"], row_lengths: Int[Tensor, " rows"]) -> Float[Tensor, " tokens"]:
    """Probability that verification reaches each token: the product of the acceptance_probs before it in its row."""
    if not len(row_lengths):
        return acceptance_prob
    mask = torch.arange(int(row_lengths.max()), device=row_lengths.device) < row_lengths[:, None]
    padded = acceptance_prob.new_zeros(mask.shape)
    padded[mask] = acceptance_prob
    return F.pad(padded.cumprod(-1)[:, :-1], (1, 0), value=1.0)[mask]


def by_position(
    logit: Float[Tensor, "heads tokens"],
    acceptance_prob: Float[Tensor, " tokens"],
    *,
    row_lengths: Int[Tensor, " rows"],
    num_positions: int,
    label: Float[Tensor, "#heads tokens"] | None = None,
    is_draft: bool = False,
) -> tuple[Histogram, Histogram]:
    """Two histograms over [heads * K], one row per head and draft position 1 … K: the prediction of the k-th token
    against P, weighted by S_{k-1}; the predicted survival of k tokens against S_k.

    Args:
        logit: predictions, raw or calibrated.
        acceptance_prob: of the drafted tokens; decides how many drafts reach a position.
        row_lengths: tokens of each response, where drafts end.
        num_positions: K.
        label: true values of the predictions if they are not acceptance_prob, as of prefix heads.
        is_draft: each row is one draft, as blocks are; otherwise drafts start at every position of a row.
    """
    logit, prob = logit.double(), acceptance_prob.double()
    num_tokens, ends = len(prob), row_lengths.cumsum(0)
    # tokens from each position to the end of its row: rows of 3 and 1 tokens give [3, 2, 1, 1]
    left = ends.repeat_interleave(row_lengths) - torch.arange(num_tokens, device=ends.device)
    is_start = left == row_lengths.repeat_interleave(row_lengths) if is_draft else left > 0
    log_hat, reach, log_survival = F.logsigmoid(logit), torch.ones_like(prob), torch.zeros_like(logit)
    label, token, survival = prob[None] if label is None else label.double(), [], []
    for k in range(min(num_positions, num_tokens)):
        starts = num_tokens - k
        fits = (is_start[:starts] & (left[:starts] > k)).double()
        token.append(observe(logit[:, k:], label[:, k:], (reach[:starts] * fits)[None]))
        reach = reach[:starts] * prob[k:]
        log_survival = log_survival[:, :starts] + log_hat[:, k:]
        logit_of_survival = log_survival - torch.log(-torch.expm1(log_survival.clamp(max=-1e-12)))
        survival.append(observe(logit_of_survival, reach[None], fits[None]))
    return _interleave(token, num_positions), _interleave(survival, num_positions)


def _interleave(parts: list[Histogram], count: int) -> Histogram:
    """K histograms of [heads] -> one of [heads * K]; positions that no response reaches stay empty."""
    parts = parts + [Histogram(*map(torch.zeros_like, parts[0]))] * (count - len(parts))
    return Histogram(*(torch.stack(column, 1).flatten(0, 1) for column in zip(*parts, strict=True)))

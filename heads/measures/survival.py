"""Predictions along a draft: metrics by draft position, weighted by reach, and of the survival probability.

A draft of k tokens that starts at position s survives with probability S_k(s) = P_s … P_{s+k-1}; a head predicts the
product of its own probabilities. Drafts start at every position of a response. Verification reaches draft position k
with probability S_{k-1}, so tokens have this weight: tokens that it reaches are easier than average.

The labels follow the target's response, which the draft need not have drawn, so these metrics are approximate. They are
for choosing heads; `evaluate` replays decoding exactly (law 4.10).
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from heads.measures.histogram import Histogram, observe


def reach_of(acceptance_prob: Float[Tensor, " tokens"], row_lengths: Int[Tensor, " rows"]) -> Float[Tensor, " tokens"]:
    """Probability that verification reaches each token: the product of the acceptance_probs before it in its row."""
    if not len(row_lengths):
        return acceptance_prob
    mask = _mask(row_lengths)
    before = F.pad(_padded(acceptance_prob, mask).cumprod(-1)[..., :-1], (1, 0), value=1.0)
    return before[mask]


def by_position(
    logit: Float[Tensor, "heads tokens"],
    acceptance_prob: Float[Tensor, " tokens"],
    *,
    row_lengths: Int[Tensor, " rows"],
    num_positions: int,
) -> tuple[Histogram, Histogram]:
    """Two histograms over [heads * K], one row per head and draft position 1 … K: the prediction of the k-th token
    against P, weighted by S_{k-1}; the predicted survival of k tokens against S_k.

    Args:
        logit: predictions, raw or calibrated.
        row_lengths: tokens of each response, where drafts end.
    """
    logit, prob = logit.double(), acceptance_prob.double()
    num_tokens = len(prob)
    left = _tokens_left(row_lengths)
    log_hat, reach, log_survival = F.logsigmoid(logit), torch.ones_like(prob), torch.zeros_like(logit)
    token, survival = [], []
    for k in range(min(num_positions, num_tokens)):
        starts = num_tokens - k
        fits = (left[:starts] > k).double()
        token.append(observe(logit[:, k:], prob[None, k:], (reach[:starts] * fits)[None]))
        reach = reach[:starts] * prob[k:]
        log_survival = log_survival[:, :starts] + log_hat[:, k:]
        survival.append(observe(_logit_of_log(log_survival), reach[None], fits[None]))
    missing = num_positions - len(token)
    return _interleave(token, missing), _interleave(survival, missing)


def by_row_position(
    logit: Float[Tensor, "heads tokens"],
    *,
    label: Float[Tensor, "#heads tokens"],
    acceptance_prob: Float[Tensor, " tokens"],
    row_lengths: Int[Tensor, " rows"],
    num_positions: int,
) -> tuple[Histogram, Histogram]:
    """The two histograms of `by_position` for rows that are one draft each, as blocks are, over [heads * K].

    Args:
        logit: predictions.
        label: true values of the predictions: acceptance_prob, or acceptance_rate for prefix heads.
        acceptance_prob: of the drafted tokens; decides how many drafts reach a position.
        row_lengths: tokens of each draft.
        num_positions: K.
    """
    mask = _mask(row_lengths)

    def rows_of(flat: Tensor) -> Float[Tensor, "lead rows position"]:
        padded = _padded(flat.double(), mask)
        return F.pad(padded, (0, num_positions - mask.shape[1]))

    survival = rows_of(acceptance_prob[None]).cumprod(-1)
    is_inside = F.pad(mask, (0, num_positions - mask.shape[1])).double()
    reach = F.pad(survival[..., :-1], (1, 0), value=1.0) * is_inside
    log_survival = F.logsigmoid(rows_of(logit)).cumsum(-1)

    def by_row(values: Float[Tensor, "lead rows position"]) -> Float[Tensor, "lead_position rows"]:
        return values.expand(len(logit), -1, -1).transpose(1, 2).flatten(0, 1)

    token = observe(by_row(rows_of(logit)), by_row(rows_of(label)), by_row(reach))
    return token, observe(by_row(_logit_of_log(log_survival)), by_row(survival), by_row(is_inside[None]))


def _tokens_left(row_lengths: Int[Tensor, " rows"]) -> Int[Tensor, " tokens"]:
    """The number of tokens from each position to the end of its row: rows of 3 and 1 tokens give [3, 2, 1, 1]."""
    ends = row_lengths.cumsum(0).repeat_interleave(row_lengths)
    return ends - torch.arange(len(ends), device=ends.device)


def _mask(row_lengths: Int[Tensor, " rows"]) -> Bool[Tensor, "rows position"]:
    width = int(row_lengths.max())
    return torch.arange(width, device=row_lengths.device) < row_lengths[:, None]


def _padded(
    flat: Float[Tensor, "*lead tokens"], mask: Bool[Tensor, "rows position"]
) -> Float[Tensor, "*lead rows position"]:
    padded = flat.new_zeros(*flat.shape[:-1], *mask.shape)
    padded[..., mask] = flat
    return padded


def _logit_of_log(log_prob: Tensor) -> Tensor:
    """logit(exp(x)) for x <= 0."""
    return log_prob - torch.log(-torch.expm1(log_prob.clamp(max=-1e-12)))


def _interleave(parts: list[Histogram], missing: int) -> Histogram:
    """K histograms of [heads] -> one of [heads * K]; positions that no response reaches stay empty."""
    parts = parts + [Histogram(*map(torch.zeros_like, parts[0]))] * missing
    return Histogram(*(torch.stack(column, 1).flatten(0, 1) for column in zip(*parts, strict=True)))

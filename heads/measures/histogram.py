"""A histogram of logits against soft labels: constant memory for all metrics and the calibration of a head.

Bins of the logit z are 1/64 wide over [-16, 16]. Each bin is evaluated at its mean logit, so the error of a smooth
function g is about g'' / 98,304, below 3e-6 for the cross-entropy. Histograms add up, so the metrics of an epoch are
exact for any batches and any number of processes.

Along a draft (`by_position`): a draft of k tokens that starts at position s survives with probability S_k(s) =
P_s … P_{s+k-1}; a head predicts the product of its own probabilities. Verification reaches draft position k with
probability S_{k-1}, so tokens have this weight: tokens that it reaches are easier than average. The labels follow the
target's response, which the draft need not have drawn, so these metrics are approximate. They are for choosing heads;
`evaluate` replays decoding exactly (law 4.10).
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

NUM_BINS = 2048
LIMIT = 16.0


class Histogram(NamedTuple):
    """Sums of one histogram for each index of any leading axes (heads, draft positions); float64."""

    weight: Float[Tensor, "*lead bin"]
    accepted: Float[Tensor, "*lead bin"]
    """Sum of w P."""
    logit: Float[Tensor, "*lead bin"]
    """Sum of w z."""
    product: Float[Tensor, "*lead"]
    """Sum of w P z, which makes the linear part of the cross-entropy exact."""
    squares: Float[Tensor, "*lead"]
    """Sum of w P^2."""
    entropy: Float[Tensor, "*lead"]
    """Sum of w H(P), nats."""

    @property
    def total(self) -> Float[Tensor, "*lead"]:
        """Sum of the weights w."""
        return self.weight.sum(-1)

    @property
    def mean_logit(self) -> Float[Tensor, "*lead bin"]:
        """Mean logit of each bin; 0 for an empty one."""
        return torch.where(self.weight > 0, self.logit / self.weight.clamp_min(1e-300), torch.zeros_like(self.logit))


def observe(
    logit: Float[Tensor, "lead tokens"],
    acceptance_prob: Float[Tensor, "#lead tokens"],
    weight: Float[Tensor, "#lead tokens"] | None = None,
) -> Histogram:
    """The histogram of logits z, one row per head (or head and position), with soft labels P in [0, 1] and weights w
    (None: 1), of which there is one row per head, or one for all.
    """
    z = logit.double()
    p = acceptance_prob.double()  # one row for all heads stays one, so that its entropy is computed once
    w = torch.ones_like(z) if weight is None else weight.double().expand_as(z)
    bins = ((z.clamp(-LIMIT, LIMIT) + LIMIT) * (NUM_BINS / (2 * LIMIT))).long().clamp(max=NUM_BINS - 1)
    entropy = -(torch.xlogy(p, p) + torch.xlogy(1 - p, 1 - p))
    weight, accepted, logits = (z.new_zeros(len(z), NUM_BINS).scatter_add_(1, bins, x) for x in (w, w * p, w * z))
    sums = ((w * value).sum(-1) for value in (p * z, p * p, entropy))
    return Histogram(weight, accepted, logits, *sums)


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
    prob = acceptance_prob.double()
    num_tokens = len(prob)
    # tokens from each position to the end of its row: rows of 3 and 1 tokens give [3, 2, 1, 1]
    left = row_lengths.cumsum(0).repeat_interleave(row_lengths) - torch.arange(num_tokens, device=prob.device)
    is_start = left == row_lengths.repeat_interleave(row_lengths) if is_draft else left > 0
    log_hat = F.logsigmoid(logit.double())
    reach = torch.ones_like(prob)
    log_survival = torch.zeros_like(log_hat)
    label = prob[None] if label is None else label.double()
    token = []
    survival = []
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

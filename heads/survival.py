"""What token-wise predictions come to along a draft: reach-weighted metrics by draft position, the survival product, expected counts.

A draft of k tokens that starts at position s survives with probability S_k(s) = P_s … P_{s+k-1}; a head predicts the product of its own.
Drafts are taken to start at every position of a response. Draft position k is reached with probability S_{k-1}, so tokens are weighted
by it: the k-th drafted token that verification really looks at is an easier one than the average.

The labels are those along the target's response, whose tokens the draft need not have drawn; decoding along a real branch differs after the
first rejection. These are indications for choosing heads; `decode evaluate` replays the real law (design 4.10).
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from heads.histogram import Histogram, observe


class ByPosition(NamedTuple):
    """One histogram per head and draft position 1 … K, flattened to [heads * K]."""

    token: Histogram
    """P̂ of the k-th token against P, weighted by S_{k-1}."""
    survival: Histogram
    """The predicted survival of k tokens against S_k."""


class ExpectedCounts(NamedTuple):
    """Sums over responses, by head and threshold (law 4.4: num_drafted + num_rounds = num_tokens + num_discarded)."""

    num_drafted: Float[Tensor, "heads threshold"]
    num_rounds: Float[Tensor, "heads threshold"]
    num_tokens: Float[Tensor, "heads threshold"]

    @property
    def discard_rate(self) -> Float[Tensor, "heads threshold"]:
        """N_discarded / N."""
        return (self.num_drafted + self.num_rounds - self.num_tokens) / self.num_tokens

    @property
    def verification_rate(self) -> Float[Tensor, "heads threshold"]:
        """N_target / N."""
        return self.num_rounds / self.num_tokens


def by_position(
    logit: Float[Tensor, "heads tokens"], acceptance_prob: Float[Tensor, " tokens"], row_lengths: Int[Tensor, " rows"], num_positions: int
) -> ByPosition:
    """Both histograms of some responses.

    Args:
        logit: of the prediction that is to be judged (calibrated, or raw).
        row_lengths: where responses end; a draft does not run over the end.
    """
    logit, prob = logit.double(), acceptance_prob.double()
    num_tokens = len(prob)
    left = _tokens_left(row_lengths)
    log_hat, reach, log_survival = torch.nn.functional.logsigmoid(logit), torch.ones_like(prob), torch.zeros_like(logit)
    token, survival = [], []
    for k in range(min(num_positions, num_tokens)):
        starts = num_tokens - k
        fits = (left[:starts] > k).double()
        token.append(observe(logit[:, k:], prob[None, k:], (reach[:starts] * fits)[None]))
        reach = reach[:starts] * prob[k:]
        log_survival = log_survival[:, :starts] + log_hat[:, k:]
        survival.append(observe(_logit_of_log(log_survival), reach[None], fits[None]))
    missing = num_positions - len(token)
    return ByPosition(_interleave(token, missing), _interleave(survival, missing))


def expected_counts(
    logit: Float[Tensor, "heads tokens"],
    acceptance_prob: Float[Tensor, " tokens"],
    row_lengths: Int[Tensor, " rows"],
    *,
    thresholds: Float[Tensor, " threshold"],
    max_draft_length: int,
    is_lagging: bool,
) -> ExpectedCounts:
    """Expected counts when each round stops after the token where 1 - (product of predictions) exceeds max_rejection_prob.

    No coin is tossed: the probability that a round starts at each position is carried along the response, from which all counts follow.

    Args:
        thresholds: values of max_rejection_prob.
        is_lagging: the product leaves out the newest token (fed-time heads; law 4.8).
    """
    hat, prob, fits = _padded(logit.double().sigmoid(), row_lengths), _padded(acceptance_prob.double(), row_lengths), _mask(row_lengths)
    lead = (len(logit), len(thresholds), len(row_lengths))
    starts = hat.new_zeros(*lead, fits.shape[1] + 2)
    starts[..., 0] = 1.0
    num_drafted, num_rounds = hat.new_zeros(lead), hat.new_zeros(lead)
    limit = 1 - thresholds.to(hat)[:, None]
    for start in range(fits.shape[1]):
        visits = starts[..., start] * fits[:, start]
        num_rounds += visits
        is_drafting, alive, kept = visits > 0, visits, hat.new_ones(lead)
        for position in range(start, end := min(start + max_draft_length, fits.shape[1])):
            num_drafted += visits * is_drafting
            rejected = alive * (1 - prob[:, position])
            starts[..., position + 1] += rejected
            alive = alive - rejected
            before, kept = kept, kept * hat[:, None, :, position]
            stops = ((before if is_lagging else kept) < limit) | (
                ~fits[:, position + 1] if position + 1 < end else torch.ones_like(fits[:, 0])
            )
            starts[..., position + 2] += torch.where(stops, alive, 0)
            alive, is_drafting = torch.where(stops, 0, alive), is_drafting & ~stops
            if not is_drafting.any():
                break
    num_tokens = fits.sum().expand(lead[:2]).double()
    return ExpectedCounts(num_drafted.sum(-1), num_rounds.sum(-1), num_tokens)


def _tokens_left(row_lengths: Int[Tensor, " rows"]) -> Int[Tensor, " tokens"]:
    """Tokens from each position to the end of its row, itself included."""
    ends = row_lengths.cumsum(0).repeat_interleave(row_lengths)
    return ends - torch.arange(len(ends), device=ends.device)


def _mask(row_lengths: Int[Tensor, " rows"]) -> Bool[Tensor, "rows position"]:
    width = int(row_lengths.max())
    return torch.arange(width, device=row_lengths.device) < row_lengths[:, None]


def _padded(flat: Float[Tensor, "*lead tokens"], row_lengths: Int[Tensor, " rows"]) -> Float[Tensor, "*lead rows position"]:
    mask = _mask(row_lengths)
    padded = flat.new_zeros(*flat.shape[:-1], *mask.shape)
    padded[..., mask] = flat
    return padded


def _logit_of_log(log_prob: Tensor) -> Tensor:
    """logit(exp(x)) for x <= 0."""
    return log_prob - torch.log(-torch.expm1(log_prob.clamp(max=-1e-12)))


def _interleave(parts: list[Histogram], missing: int) -> Histogram:
    """K histograms of [heads] -> one of [heads * K]; positions that no response reaches stay empty."""
    parts = parts + [Histogram(*(torch.zeros_like(x) for x in parts[0]))] * missing
    return Histogram(*(torch.stack(column, 1).flatten(0, 1) for column in zip(*parts, strict=True)))

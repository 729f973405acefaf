"""95 % intervals of a head's KL and of its lead over the draft's own signal, from sums over responses.

Both are ratios A / B of sums over responses: nats over tokens, and nats of the head over those of the signal. With the
residual r = a - (A / B) b of each of n responses, A / B has the standard error sqrt(n / (n - 1) sum r^2) / B (the ratio
estimator: Cochran 1977, "Sampling Techniques", chapter 6), and the interval reaches t(n - 1) of them to either side.
Responses count as independent, turns of one conversation too. With fewer than `MIN_RESPONSES` there is no interval.
"""

import torch
from jaxtyping import Float, Int
from scipy.special import stdtrit
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torchmetrics import Metric

MIN_RESPONSES = 10
HEAD, SIGNAL, TOKENS, RESPONSES = range(4)
"""What `Products` multiplies: nats of the head and of the signal, and the tokens of a response; 1 for each response."""


class Products(Metric):
    """Sums over responses of the products of what `HEAD` … `RESPONSES` name, of each head; summed over processes by
    `compute`.
    """

    full_state_update = False
    sums: Tensor

    def __init__(self, num_heads: int, device: torch.device) -> None:
        super().__init__()
        self.add_state("sums", default=torch.zeros(num_heads, 4, 4, dtype=torch.float64), dist_reduce_fx="sum")
        self.to(device)

    def update(
        self,
        logit: Float[Tensor, "head token"],
        signal: Float[Tensor, " token"],
        label: Float[Tensor, " token"],
        response_lengths: Int[Tensor, " response"],
    ) -> None:
        """Add the tokens of some responses: calibrated logits of the heads and of the signal, and soft labels."""
        response = torch.arange(len(response_lengths), device=label.device).repeat_interleave(response_lengths)
        nats = binary_kl(torch.cat([logit, signal[None]]), label)
        of_responses = nats.new_zeros(len(nats), len(response_lengths)).index_add_(1, response, nats)
        heads = of_responses[:-1]
        of_signal = of_responses[-1]
        shared = torch.stack([of_signal, response_lengths.double(), torch.ones_like(of_signal)], -1)
        values = torch.cat([heads[..., None], shared.expand(len(heads), -1, -1)], -1)
        self.sums.add_(torch.einsum("hri,hrj->hij", values, values))

    def compute(self) -> Float[Tensor, "head 4 4"]:
        """The sums so far; every process must call this."""
        return self.sums


def binary_kl(logit: Float[Tensor, "head token"], label: Float[Tensor, " token"]) -> Float[Tensor, "head token"]:
    """KL(P || sigmoid(z)) of each token in nats, float64."""
    z = logit.double()
    p = label.double()
    entropy = -(torch.xlogy(p, p) + torch.xlogy(1 - p, 1 - p))
    return F.softplus(z) - p * z - entropy


def ratio_interval(
    products: Float[Tensor, "head 4 4"], numerator: int, denominator: int
) -> tuple[Float[Tensor, " head"], Float[Tensor, "head 2"]]:
    """A / B of each head and the ends of its interval; NaN where B is 0, and for the ends of too few responses."""
    num = products[:, RESPONSES, RESPONSES]
    a, b = (products[:, name, RESPONSES] for name in (numerator, denominator))
    ratio = a / b
    squares = products[:, numerator, numerator] - 2 * ratio * products[:, numerator, denominator]
    squares = (squares + ratio**2 * products[:, denominator, denominator]).clamp_min(0)
    quantile = torch.as_tensor(stdtrit((num - 1).clamp_min(1).numpy(force=True), 0.975)).to(num)
    reach = quantile * (num / (num - 1) * squares).sqrt() / b
    reach = torch.where(num >= MIN_RESPONSES, reach, torch.nan)
    return ratio, torch.stack([ratio - reach, ratio + reach], -1)

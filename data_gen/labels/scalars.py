"""Scalars: the numbers that a head may read beside the hidden state, one per drawn token y.

They describe the untruncated temperature-1 distribution q, in nats (law 4.1). To add one, add an entry to `SCALARS`:
data generation, training, exported heads, decoding, traces and replay look scalars up there by name
(docs/extending.md). `decode.loop` computes the two existing ones without these formulas where that is faster.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from jaxtyping import Float, Int
from torch import Tensor

from lm import entropy


class Scalar(NamedTuple):
    """One number that a head may read."""

    symbol: str
    """Its formula as model cards print it."""
    reads_token: bool
    """Whether it depends on y. If not, it is known before y is drawn, so a prefix head may read it."""
    formula: Callable[[Float[Tensor, "position vocab"], Int[Tensor, " position"]], Float[Tensor, " position"]]
    """From logits of q in float32 or wider and y, position by position."""


def _log_token_prob(logits: Tensor, token: Tensor) -> Tensor:
    return logits.gather(-1, token.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)


SCALARS = {
    "log_token_prob": Scalar("log q(y)", True, _log_token_prob),
    "entropy": Scalar("H(q)", False, lambda logits, _: entropy(logits)),
}
"""Every scalar that a head can read, by name."""


def scalars_of(
    logits: Float[Tensor, "position vocab"], token: Int[Tensor, " position"], names: Iterable[str] = SCALARS
) -> dict[str, Float[Tensor, " position"]]:
    """The named scalars of tokens, from float32 logits of the distributions that they were drawn from.

    The logits are the model's, before truncation and temperature.
    """
    return {name: SCALARS[name].formula(logits, token) for name in names}

"""Scalars: the numbers that a head may read beside the hidden state, one per drawn token y.

They are those of the untruncated temperature-1 distribution q that y was drawn from, in nats (law 4.1). A new one is a
field and its formula here, and in `decode.loop.signals`, which computes it for one token at a time. Shards, batches,
heads and replay know scalars by these names alone, and a config asks for them by name.
"""

from typing import NamedTuple

from jaxtyping import Float, Int
from torch import Tensor

from lm import entropy


class Scalars(NamedTuple):
    """All scalars that a head can ask for, [position] each."""

    log_token_prob: Float[Tensor, " position"]
    """log q(y)."""
    entropy: Float[Tensor, " position"]
    """H(q)."""


def scalars_of(logits: Float[Tensor, "position vocab"], token: Int[Tensor, " position"]) -> Scalars:
    """The scalars of tokens, from float32 logits of the distributions that they were drawn from."""
    # from the logits, not from the q that y was drawn from, which is truncated or at another temperature
    of_token = logits.gather(-1, token.unsqueeze(-1)).squeeze(-1)
    return Scalars(log_token_prob=of_token - logits.logsumexp(-1), entropy=entropy(logits))

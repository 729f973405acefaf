"""Law 4.2: verification (Leviathan et al. 2023, arXiv 2211.17192, Algorithm 1).

Accept drafted tokens y_1 … y_K left to right while u_i < p_i(y_i) / q_i(y_i); at the first rejection emit one token from
norm(max(0, p_i - q_i)), the *residual* token; after full acceptance emit one token from p_{K+1}, the *bonus* token.
Each emitted token then has exactly the law p, whatever q was, as long as y_i was drawn from the very q_i that is passed here.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lm.draws import Draws, RandomDraws


class Verdict(NamedTuple):
    """Outcome of one verification."""

    num_accepted: int
    """0..K: length of the accepted prefix of the draft."""
    next_token: int
    """The residual token if num_accepted < K, else the bonus token."""


def acceptance_prob(
    tokens: Int[Tensor, "*draft"], q: Float[Tensor, "*draft vocab"], p: Float[Tensor, "*draft vocab"]
) -> Float[Tensor, "*draft"]:
    """min(1, p(y) / q(y)) of each token y under its own row of q and p; 0 where p(y) = 0."""
    index = tokens.unsqueeze(-1)
    return (p.gather(-1, index) / q.gather(-1, index)).squeeze(-1).clamp_(max=1.0).nan_to_num_(0.0)


def acceptance_rate(q: Float[Tensor, "*draft vocab"], p: Float[Tensor, "*draft vocab"]) -> Float[Tensor, "*draft"]:
    """sum_v min(p(v), q(v)) = 1 - TV(p, q): the probability that a token drawn from q is accepted."""
    return torch.minimum(p, q).sum(-1).clamp(max=1.0)


def residual_probs(q: Float[Tensor, "*draft vocab"], p: Float[Tensor, "*draft vocab"]) -> Float[Tensor, "*draft vocab"]:
    """norm(max(0, p - q)); p itself where that mass is zero (p = q: a rejection there has probability zero up to rounding)."""
    excess = (p - q).clamp_(min=0.0)
    mass = excess.sum(-1, keepdim=True)
    return torch.where(mass > 0, excess / mass, p)


def verify(
    tokens: Int[Tensor, " draft"],
    q: Float[Tensor, "draft vocab"],
    p: Float[Tensor, "draft+1 vocab"],
    generator: torch.Generator | Draws | None = None,
) -> Verdict:
    """One verification of a draft (K = 0 is allowed: the bonus token is drawn from p).

    Args:
        tokens: drafted token ids y_1 … y_K.
        q: the distribution that each was drawn from.
        p: the target's distribution at the same positions and at the one after.
        generator: source of chance; anything that is no `Draws` is wrapped in `RandomDraws`.
    """
    draws = RandomDraws(generator) if generator is None or isinstance(generator, torch.Generator) else generator
    num_accepted = draws.num_accepted(acceptance_prob(tokens, q, p[:-1])) if len(tokens) else 0
    if num_accepted == len(tokens):
        return Verdict(num_accepted, draws.token(p[-1]))
    return Verdict(num_accepted, draws.token(residual_probs(q[num_accepted], p[num_accepted])))

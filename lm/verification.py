"""Law 4.2: verification (Leviathan et al. 2023, arXiv 2211.17192, Algorithm 1).

Accept drafted tokens y_1 … y_K left to right while u_i < p_i(y_i) / q_i(y_i); at the first rejection emit one token
from norm(max(0, p_i - q_i)), the *residual* token; after full acceptance emit one token from p_{K+1}, the *bonus*
token. Each emitted token then has exactly the law p, whatever q was, as long as y_i was drawn from the very q_i that is
passed here.

At temperature 0 (`GreedySampler`) every distribution is one-hot: accept while y_i is the target's most probable token,
then emit the target's token. So `num_accepted`, `next_law` and `verify` take q and p as laws
(`lm.draws`), which logits are at temperature 0; the other functions take probabilities.
"""

from collections.abc import Iterable, Sequence
from itertools import islice
from operator import eq
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from lm.arrays import array_of
from lm.draws import GreedySampler, RandomSampler, Sampler


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
    """norm(max(0, p - q)); p itself where that mass is zero (p = q: a rejection there has probability zero up to
    rounding).
    """
    excess = (p - q).clamp_(min=0.0)
    mass = excess.sum(-1, keepdim=True)
    return torch.where(mass > 0, excess / mass, p)


def num_accepted(
    tokens: Sequence[int], q: Sequence[Float[Tensor, " _"]], p: Float[Tensor, "rows vocab"], draws: Sampler
) -> int:
    """Length of the accepted prefix of a draft; the draws are asked about an empty draft too, so that they see every
    round.

    Args:
        tokens: drafted token ids y_1 … y_K.
        q: the law that each token was drawn from, on any device, at most as wide as p; `GreedySampler` ignores it.
        p: the target's laws at the same positions, with rows after them or not.
        draws: source of chance.
    """
    return draws.num_accepted(_chances(tokens, q, p, draws))


def revealed_probs(
    num_accepted: int,
    tokens: Sequence[int],
    q: Sequence[Float[Tensor, " _"]],
    p: Float[Tensor, "rows vocab"],
    draws: Sampler,
) -> list[float]:
    """`acceptance_prob` of the accepted tokens and of the first rejected one; the other arguments are those of
    `num_accepted`.
    """
    return [float(chance) for chance in islice(_chances(tokens, q, p, draws), num_accepted + 1)]


def next_law(
    num_accepted: int, q: Sequence[Float[Tensor, " _"]], p: Float[Tensor, "rows vocab"], draws: Sampler
) -> Float[Tensor, " vocab"]:
    """Law of the token after the accepted ones: the residual where one was rejected, else p (the bonus token).

    One-hot distributions that disagree have the residual p.
    """
    row = p[num_accepted]
    if num_accepted == len(q) or isinstance(draws, GreedySampler):
        return row
    return residual_probs(_widened(q[num_accepted].to(row.device), row.shape[-1]), row)


def verify(
    tokens: Sequence[int],
    q: Sequence[Float[Tensor, " _"]],
    p: Float[Tensor, "rows vocab"],
    generator: torch.Generator | Sampler | None = None,
) -> Verdict:
    """One verification of a draft (K = 0 is allowed: the bonus token is drawn from p).

    Args:
        tokens: drafted token ids y_1 … y_K.
        q: the law that each token was drawn from, each on any device; one narrower than p gets zeros.
        p: the target's laws at the same positions and at the one after.
        generator: a torch generator or None is wrapped in `RandomSampler`.

    Raises:
        ValueError: the row that the next token is drawn from is not finite.
    """
    draws = RandomSampler(generator) if generator is None or isinstance(generator, torch.Generator) else generator
    count = num_accepted(tokens, q, p, draws)
    return Verdict(count, draws.token(next_law(count, q, p, draws)))


def _chances(
    tokens: Sequence[int], q: Sequence[Float[Tensor, " _"]], p: Float[Tensor, "rows vocab"], draws: Sampler
) -> Iterable[float]:
    """Acceptance probability of each drafted token, computed lazily."""
    if not tokens:
        return ()
    return (
        map(eq, tokens, _places_of_largest(p)) if isinstance(draws, GreedySampler) else _acceptance_probs(tokens, q, p)
    )


def _acceptance_probs(
    tokens: Sequence[int], q: Sequence[Float[Tensor, " _"]], p: Float[Tensor, "rows vocab"]
) -> Iterable[float]:
    """`acceptance_prob` of each drafted token as a number: on the CPU one by one as they are asked for, from a device
    in one transfer.
    """
    rows = _brought(q, p.device)
    if p.is_cpu:
        return map(_ratio, tokens, map(array_of, rows), array_of(p))
    index = torch.tensor(tokens, device=p.device)
    return acceptance_prob(index, torch.stack([_widened(row, p.shape[-1]) for row in rows]), p[: len(tokens)]).tolist()


def _brought(q: Sequence[Float[Tensor, " _"]], device: torch.device) -> Sequence[Float[Tensor, " _"]]:
    """The rows of q on this device, those that are alike in one transfer; models that draft in turns may be on
    several.
    """
    kinds = {(row.device, row.shape[-1]) for row in q}
    if all(place == device for place, _ in kinds):
        return q
    if len(kinds) == 1:
        return torch.stack(list(q)).to(device).unbind()
    return [row.to(device) for row in q]


def _ratio(token: int, q: np.ndarray, p: np.ndarray) -> float:
    """min(1, p(token) / q(token)); 0 where p is 0."""
    drafted, wanted = float(q[token]), float(p[token])
    # in this order min keeps NaN, which no uniform is below: a distribution that is not finite rejects
    return min(wanted / drafted, 1.0) if drafted != 0.0 else float(wanted > 0.0)


def _places_of_largest(p: Float[Tensor, "rows vocab"]) -> list[int]:
    # torch on the CPU takes five times as long as numpy
    return (array_of(p) if p.is_cpu else p).argmax(-1).tolist()


def _widened(q: Float[Tensor, " draft_vocab"], width: int) -> Float[Tensor, " vocab"]:
    """q with zeros for the tokens that only the target has."""
    return q if q.shape[-1] == width else functional.pad(q, (0, width - q.shape[-1]))

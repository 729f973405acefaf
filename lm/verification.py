"""Law 4.2: verification (Leviathan et al. 2023, arXiv 2211.17192, Algorithm 1), of chains and of trees.

Accept drafted tokens y_1 … y_K left to right while u_i < p_i(y_i) / q_i(y_i). At the first rejection emit the
*residual* token, drawn from norm(max(0, p_i - q_i)); after full acceptance the *bonus* token, drawn from p_{K+1}. Each
emitted token then has exactly the distribution p, whatever q was, if y_i was drawn from the very q_i that is passed.

At temperature 0 (`GreedySampler`) every distribution is one-hot: accept while y_i is the target's most probable token,
then emit the target's token. `num_accepted`, `next_dist` and `verify` then take logits as q and p (`lm.draws`); the
other functions take probabilities.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from operator import eq

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from lm.draws import GreedySampler, RandomSampler, Sampler, array_of
from lm.masks import ROOT, Tree

Probs = Float[Tensor, "*draft vocab"]
Numbers = Float[Tensor, "*draft"]
Rows = Float[Tensor, "rows vocab"]
"""The target's distributions at the positions of a draft's tokens, and at the one after."""
Drawn = Sequence[Float[Tensor, " _"]]
"""The distribution that each token was drawn from, on any device; one narrower than the target's has zeros there."""


def acceptance_prob(tokens: Int[Tensor, "*draft"], q: Probs, p: Probs) -> Numbers:
    """min(1, p(y) / q(y)) of each token y under its own row of q and p; 0 where p(y) = 0."""
    index = tokens.unsqueeze(-1)
    return (p.gather(-1, index) / q.gather(-1, index)).squeeze(-1).clamp_(max=1.0).nan_to_num_(0.0)


def acceptance_rate(q: Probs, p: Probs) -> Numbers:
    """sum_v min(p(v), q(v)) = 1 - TV(p, q): the probability that a token drawn from q is accepted."""
    return torch.minimum(p, q).sum(-1).clamp(max=1.0)


def residual_probs(q: Probs, p: Probs) -> Probs:
    """norm(max(0, p - q)); p where that mass is zero (p = q, where a rejection has probability zero)."""
    excess = (p - q).clamp_(min=0.0)
    mass = excess.sum(-1, keepdim=True)
    return torch.where(mass > 0, excess / mass, p)


def num_accepted(tokens: Sequence[int], q: Drawn, p: Rows, draws: Sampler) -> int:
    """Length of the accepted prefix of a draft, which may be empty. `GreedySampler` ignores q."""
    return draws.num_accepted(_accept_probs(tokens, q, p, draws))


def revealed_probs(num_accepted: int, tokens: Sequence[int], q: Drawn, p: Rows, draws: Sampler) -> list[float]:
    """`acceptance_prob` of the accepted tokens and of the first rejected one."""
    return [float(prob) for prob in islice(_accept_probs(tokens, q, p, draws), num_accepted + 1)]


def next_dist(num_accepted: int, q: Drawn, p: Rows, draws: Sampler) -> Float[Tensor, " vocab"]:
    """Distribution of the next token: the residual after a rejection (p where one-hot rows disagree), else p."""
    row = p[num_accepted]
    if num_accepted == len(q) or isinstance(draws, GreedySampler):
        return row
    return residual_probs(_widened(q[num_accepted].to(row.device), row.shape[-1]), row)


def verify(
    tokens: Sequence[int], q: Drawn, p: Rows, generator: torch.Generator | Sampler | None = None
) -> tuple[int, int]:
    """One verification of the drafted token ids y_1 … y_K (K = 0 is allowed): (length of the accepted prefix, next
    token: the residual one, or after full acceptance the bonus one). A torch generator or None is wrapped in
    `RandomSampler`. ValueError: the row of the next token is not finite.
    """
    draws = RandomSampler(generator) if generator is None or isinstance(generator, torch.Generator) else generator
    count = num_accepted(tokens, q, p, draws)
    return count, draws.token(next_dist(count, q, p, draws))


def _accept_probs(tokens: Sequence[int], q: Drawn, p: Rows, draws: Sampler) -> Iterable[float]:
    """Acceptance probabilities: on the CPU one by one as they are read, from a device in one transfer."""
    if not tokens:
        return ()
    if isinstance(draws, GreedySampler):  # torch on the CPU takes five times as long as numpy
        return map(eq, tokens, (array_of(p) if p.is_cpu else p).argmax(-1).tolist())
    rows = [row.to(p.device) for row in q]
    if p.is_cpu:
        return map(_ratio, tokens, map(array_of, rows), array_of(p))
    index = torch.tensor(tokens, device=p.device)
    return acceptance_prob(index, torch.stack([_widened(row, p.shape[-1]) for row in rows]), p[: len(tokens)]).tolist()


def _ratio(token: int, q: np.ndarray, p: np.ndarray) -> float:
    q_token, p_token = float(q[token]), float(p[token])
    # in this order min keeps NaN, which no uniform is below: a distribution that is not finite rejects
    return min(p_token / q_token, 1.0) if q_token != 0.0 else float(p_token > 0.0)


def _widened(q: Float[Tensor, " draft_vocab"], width: int) -> Float[Tensor, " vocab"]:
    """q with zeros for the tokens that only the target has."""
    return q if q.shape[-1] == width else functional.pad(q, (0, width - q.shape[-1]))


def verify_tree(tree: Tree, p: Rows, draws: Sampler) -> tuple[list[int], int]:
    """One verification of a tree (EAGLE-2, arXiv 2406.16858; SpecInfer, 2305.09781): (the accepted nodes, from the
    root's child on; the token after them).

    From the root on, with p the target's distribution after the node, for the node's children x in turn, each with a
    fresh uniform r: move to x if r <= p(x); else p(x) <- 0, and p is renormalised. If every child is rejected, the next
    token is drawn from what remains of p; if there is none, from p. A candidate was chosen, not drawn (its q is 1), so
    each position emits x with probability p(x) whatever the candidates were, as long as the tree depends on the text
    alone. The candidates are then a function of the text, so a policy may look at them (unlike law 4.3's chains).

    At temperature 0 this is the longest path of the target's most probable tokens, then the target's own token.
    `p`: the target's distributions after the text, and after each node. ValueError: the row of the next token is not
    finite.
    """
    path: list[int] = []
    node = ROOT
    while children := tree.children(node):
        tokens, dist = tree.tokens_of(children), p[node + 1]
        num_rejected = draws.num_accepted(_rejection_probs(tokens, dist, draws))
        if num_rejected == len(children):
            return path, draws.token(_remaining(tokens, dist, draws))
        node = children[num_rejected]
        path.append(node)
    return path, draws.token(p[node + 1])


def node_probs(tree: Tree, path: Sequence[int], p: Rows, draws: Sampler) -> list[float]:
    """p(x) of each node of a path: the probability that it is accepted as a first child."""
    pairs = [(tree.tokens[node], p[tree.parents[node] + 1]) for node in path]
    if isinstance(draws, GreedySampler):
        return [float(token == int(row.argmax())) for token, row in pairs]
    return [float(row[token]) for token, row in pairs]


def _rejection_probs(tokens: Sequence[int], dist: Float[Tensor, " vocab"], draws: Sampler) -> Iterator[float]:
    """The probability that each candidate is rejected, given that those before it were."""
    if isinstance(draws, GreedySampler):
        best = int(dist.argmax())
        yield from (float(token != best) for token in tokens)
        return
    remaining = 1.0
    for prob in dist[tokens].tolist():
        # a distribution that is not finite rejects every candidate, and the draw after them raises
        yield min(max(1.0 - prob / remaining, 0.0), 1.0) if prob == prob and remaining > 0.0 else 1.0
        remaining -= prob


def _remaining(tokens: Sequence[int], dist: Float[Tensor, " vocab"], draws: Sampler) -> Float[Tensor, " vocab"]:
    """The distribution without these tokens, renormalised; unchanged if rounding leaves nothing."""
    if isinstance(draws, GreedySampler):
        return dist
    remaining = dist.clone()
    remaining[tokens] = 0.0
    mass = remaining.sum()
    return remaining / mass if mass > 0 else dist

"""Law 4.2: verification (Leviathan et al. 2023, arXiv 2211.17192, Algorithm 1), of chains and of trees.

Accept drafted tokens y_1 … y_K left to right while u_i < p_i(y_i) / q_i(y_i). At the first rejection emit the
*residual* token, drawn from norm(max(0, p_i - q_i)); after full acceptance the *bonus* token, drawn from p_{K+1}. Each
emitted token then has exactly the distribution p, whatever q was, if y_i was drawn from the very q_i that is passed.

At temperature 0 (`GreedySampler`) every distribution is one-hot: accept while y_i is the target's most probable
token, then emit the target's token. `revealed_probs`, `next_dist` and `verify` then take logits as q and p
(`lm.draws`); the other functions take probabilities.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from operator import eq

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from lm.draws import GreedySampler, RandomSampler, Sampler, array_of, draw_rows, refuse_no_token
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


def revealed_probs(tokens: Sequence[int], q: Drawn, p: Rows, draws: Sampler) -> list[float]:
    """`acceptance_prob` of each token of a draft, for `Sampler.num_accepted`; a policy learns those up to the first
    rejected token. `GreedySampler` ignores q.
    """
    if isinstance(draws, GreedySampler):
        return list(map(float, map(eq, tokens, _best_tokens(p))))
    return _ratios([tokens], [q], [p])[0]


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
    [(count, token, _)] = verify_rows([tokens], [q], [p], [draws])
    return count, token


def verify_rows(
    tokens: Sequence[Sequence[int]], q: Sequence[Drawn], p: Sequence[Float[Tensor, "_ vocab"]], draws: Sequence[Sampler]
) -> list[tuple[int, int, list[float]]]:
    """One verification of several drafts, all at temperature 0 or none: for each what `verify` returns, and
    `revealed_probs`. An accelerator is read twice, for acceptance and for the next tokens; at temperature 0 once.
    """
    is_greedy = isinstance(draws[0], GreedySampler)
    if is_greedy:
        best = iter(_best_tokens(p[0] if len(p) == 1 else torch.cat([*p])))
        owns = [list(islice(best, len(rows))) for rows in p]
        probs = [list(map(float, map(eq, *pair))) for pair in zip(tokens, owns, strict=True)]
    else:
        probs = _ratios(tokens, q, p)
    counts = [each.num_accepted(known) for each, known in zip(draws, probs, strict=True)]
    dists = list(map(next_dist, counts, q, p, draws))
    if is_greedy:
        next_tokens = [own[count] for own, count in zip(owns, counts, strict=True)]
    else:
        next_tokens = draw_rows(dists, draws).tolist()
    return list(zip(counts, map(refuse_no_token, next_tokens, dists), probs, strict=True))


def _best_tokens(p: Rows) -> list[int]:
    """The most probable token of each row; the width, which is no token, where a row has NaN."""
    if not p.is_cpu:
        return GreedySampler.draw(p).flatten().tolist()
    rows = array_of(p)  # torch on the CPU takes five times as long as numpy
    best = rows.argmax(-1)
    best[np.isnan(rows[np.arange(len(rows)), best])] = rows.shape[-1]
    return best.tolist()


def _ratios(
    tokens: Sequence[Sequence[int]], q: Sequence[Drawn], p: Sequence[Float[Tensor, "_ vocab"]]
) -> list[list[float]]:
    """Acceptance probabilities of several drafts, with one transfer from a device."""
    if p[0].is_cpu:
        return list(map(_ratios_on_host, tokens, q, p))
    q_cells: list[Tensor] = []  # of all drafts; an index that is a number needs no transfer
    p_cells: list[Tensor] = []
    for drafted, drawn, dists in zip(tokens, q, p, strict=True):
        p_cells += [dist[token] for token, dist in zip(drafted, dists, strict=False)]
        q_cells += [row[token].to(dists.device, dists.dtype) for token, row in zip(drafted, drawn, strict=True)]
    if not p_cells:
        return [[] for _ in tokens]
    ratios = map(_ratio, *torch.stack(q_cells + p_cells).view(2, -1).tolist())
    return [list(islice(ratios, len(drafted))) for drafted in tokens]


def _ratios_on_host(tokens: Sequence[int], q: Drawn, p: Rows) -> list[float]:
    drawn = zip(tokens, q, p, strict=False)  # numpy takes a fifth of torch's time
    return [_ratio(array_of(row.cpu()).item(token), array_of(dist).item(token)) for token, row, dist in drawn]


def _ratio(q: float, p: float) -> float:
    # in this order min keeps NaN, which no uniform is below: a distribution that is not finite rejects
    return min(p / q, 1.0) if q != 0.0 else float(p > 0.0)


def _widened(q: Float[Tensor, " draft_vocab"], width: int) -> Float[Tensor, " vocab"]:
    """q with zeros for the tokens that only the target has."""
    return q if q.shape[-1] == width else functional.pad(q, (0, width - q.shape[-1]))


def verify_tree(tree: Tree, p: Rows, draws: Sampler) -> tuple[list[int], int]:
    """One verification of a tree (EAGLE-2, arXiv 2406.16858; SpecInfer, 2305.09781): (the accepted nodes, from
    the root's child on; the token after them).

    From the root on, with p the target's distribution after the node, for the node's children x in turn, each with a
    fresh uniform r: move to x if r <= p(x); else p(x) <- 0, and p is renormalised. If every child is rejected, the next
    token is drawn from what remains of p; if there is none, from p. A candidate was chosen, not drawn (its q is 1), so
    each position emits x with probability p(x) whatever the candidates were, as long as the tree depends on the text
    alone. The candidates are then a function of the text, so a policy may look at them (unlike law 4.3's chains).

    At temperature 0 this is the longest path of the target's most probable tokens, then the target's own token.
    `p`: the target's distributions after the text, and after each node. ValueError: the row of the next token is
    not finite.
    """
    path: list[int] = []
    node = ROOT
    probs = node_probs(tree, range(len(tree)), p, draws)  # all of them, in one transfer
    while children := tree.children(node):
        num_rejected = draws.num_accepted(_rejection_probs(probs[child] for child in children))
        if num_rejected == len(children):
            return path, draws.token(_remaining(tree.tokens_of(children), p[node + 1], draws))
        node = children[num_rejected]
        path.append(node)
    return path, draws.token(p[node + 1])


def node_probs(tree: Tree, path: Sequence[int], p: Rows, draws: Sampler) -> list[float]:
    """p(x) of each of these nodes: the probability that it is accepted as a first child."""
    cells = [(tree.parents[node] + 1, tree.tokens[node]) for node in path]
    if not cells:
        return []
    if isinstance(draws, GreedySampler):
        best = _best_tokens(p)
        return [float(token == best[row]) for row, token in cells]
    return torch.stack([p[cell] for cell in cells]).tolist()


def _rejection_probs(probs: Iterable[float]) -> Iterator[float]:
    """The probability that each candidate is rejected, given that those before it were."""
    remaining = 1.0
    for prob in probs:
        # a distribution that is not finite rejects every candidate, and the draw after them raises
        yield min(max(1.0 - prob / remaining, 0.0), 1.0) if prob == prob and remaining > 0.0 else 1.0
        remaining -= prob


def _remaining(tokens: Sequence[int], dist: Float[Tensor, " vocab"], draws: Sampler) -> Float[Tensor, " vocab"]:
    """The distribution without these tokens, renormalised; unchanged if rounding leaves nothing."""
    if isinstance(draws, GreedySampler):
        return dist
    remaining = dist.clone()
    for token in tokens:  # an index that is a number needs no transfer
        remaining[token] = 0.0
    mass = remaining.sum()
    return torch.where(mass > 0, remaining / mass, dist)

"""Verification of a tree of candidates: law 4.2 with several candidates for each place (EAGLE-2, arXiv 2406.16858;
SpecInfer, 2305.09781).

From the root on, with p the target's law after the node (warped by the `Sampling`), for the node's children x in turn,
each with a fresh uniform r: go on to x if r <= p(x); else p(x) <- 0, and p is renormalised. Where every child is
refused the next token is drawn from what is left of p; where there is none, from p. A candidate was chosen, not drawn
(its q is 1), so each place emits x with probability p(x) whatever the candidates were: exactly the target's law, as
long as the tree depends on the text alone. The candidates' own values are part of a tree that is a function of the
text, so a policy may look at them (unlike law 4.3's chains).

At temperature 0 this comes to: the longest path of the target's most probable tokens, then the target's own.
"""

from collections.abc import Iterator, Sequence

from jaxtyping import Float
from torch import Tensor

from lm.draws import GreedySampler, Sampler
from lm.trees.tree import ROOT, Tree


def verify_tree(tree: Tree, p: Float[Tensor, "rows vocab"], draws: Sampler) -> tuple[list[int], int]:
    """One verification: (the accepted nodes, from the root's child on; the token after them). The token comes from what
    was left of p where children were refused, else it is the bonus token. With an empty tree it is drawn from p.

    Args:
        tree: a function of the text alone.
        p: the target's laws (`lm.draws`) after the text, and after each node.
        draws: source of chance.

    Raises:
        ValueError: the row that the next token is drawn from is not finite.
    """
    path: list[int] = []
    node = ROOT
    while children := tree.children(node):
        tokens, law = tree.tokens_of(children), p[node + 1]
        num_refused = draws.num_accepted(_refusals(tokens, law, draws))
        if num_refused == len(children):
            return path, draws.token(_left(tokens, law, draws))
        node = children[num_refused]
        path.append(node)
    return path, draws.token(p[node + 1])


def node_probs(tree: Tree, path: Sequence[int], p: Float[Tensor, "rows vocab"], draws: Sampler) -> list[float]:
    """p(x) of each node of a path, which is what verification accepts it with as a first child; 0 or 1 at temperature
    0.
    """
    rows = [p[tree.parents[node] + 1] for node in path]
    tokens = tree.tokens_of(path)
    if isinstance(draws, GreedySampler):
        return [float(token == int(row.argmax())) for token, row in zip(tokens, rows, strict=True)]
    return [float(row[token]) for token, row in zip(tokens, rows, strict=True)]


def _refusals(tokens: Sequence[int], law: Float[Tensor, " vocab"], draws: Sampler) -> Iterator[float]:
    """The probability that each candidate is refused, given that those before it were."""
    if isinstance(draws, GreedySampler):
        best = int(law.argmax())
        yield from (float(token != best) for token in tokens)
        return
    left = 1.0
    for prob in law[tokens].tolist():
        # a law that is not finite refuses every candidate, and the draw after them says so
        yield min(max(1.0 - prob / left, 0.0), 1.0) if prob == prob and left > 0.0 else 1.0
        left -= prob


def _left(tokens: Sequence[int], law: Float[Tensor, " vocab"], draws: Sampler) -> Float[Tensor, " vocab"]:
    """The law without these tokens, renormalised; the law itself where nothing is left, which rounding alone can bring
    about.
    """
    if isinstance(draws, GreedySampler):
        return law
    left = law.clone()
    left[tokens] = 0.0
    mass = left.sum()
    return left / mass if mass > 0 else law

"""One verification of a tree keeps the target's law, by enumeration; and mutants of it do not."""

import pytest
import torch
from torch import Tensor

import lm.verification
from lm import Sampler
from lm.masks import ROOT, Tree
from lm.verification import verify_tree
from tests.toys.enumeration import assert_same_law, law_of

_VOCAB, _LENGTH = 4, 3
_rejection_probs = lm.verification._rejection_probs


def random_tree(generator: torch.Generator) -> Tree:
    """Two levels of up to three candidates for each place, in random order."""
    tokens, parents, level = [], [], [ROOT]
    for _ in range(2):
        below = []
        for node in level:
            for token in torch.randperm(_VOCAB, generator=generator)[
                : int(torch.randint(4, (), generator=generator))
            ].tolist():
                below.append(len(tokens))
                tokens.append(token)
                parents.append(node)
        level = below
    return Tree(tokens, parents)


def test_a_two_level_tree_keeps_the_targets_law():
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        tree, cube = (
            random_tree(generator),
            torch.randn(_LENGTH, *[_VOCAB] * 3, generator=generator, dtype=torch.float64).mul(1.5).softmax(-1),
        )

        def law_after(tokens: list[int], cube: Tensor = cube) -> Tensor:
            first, second = [*tokens, 0, 0][:2]
            return cube[len(tokens), first, second]

        def play(draws: Sampler, tree: Tree = tree) -> tuple[int, ...]:
            rows = torch.stack([law_after(tree.tokens_of(tree.path(node))[:2]) for node in range(-1, len(tree))])
            path, token = verify_tree(tree, rows, draws)
            tokens = [*tree.tokens_of(path), token]
            while len(tokens) < _LENGTH:
                tokens.append(draws.token(law_after(tokens)))
            return tuple(tokens)

        expected = {
            (a, b, c): float(law_after([])[a] * law_after([a])[b] * law_after([a, b])[c])
            for a in range(_VOCAB)
            for b in range(_VOCAB)
            for c in range(_VOCAB)
        }
        assert_same_law(law_of(play), expected)


def _shared_draw(tokens, law, draws):
    """One uniform for all siblings: the first is accepted whose conditional probability is above it."""
    lowest = 1.0
    for refusal in _rejection_probs(tokens, law, draws):
        before, lowest = lowest, min(lowest, refusal)
        yield lowest / before if before else 1.0


def _unreduced(tokens, law, draws):
    yield from (1.0 - law[token].item() for token in tokens)


def _as_drawn(tokens, law, draws):
    """min(1, p / q), as if candidates had been drawn from q, which is uniform here."""
    yield from (1.0 - min(1.0, law[token].item() * len(law)) for token in tokens)


_MUTANTS = {
    "shared_draw": ("_rejection_probs", _shared_draw),
    "siblings_on_unreduced_p": ("_rejection_probs", _unreduced),
    "candidate_as_drawn": ("_rejection_probs", _as_drawn),
    "residual_with_the_refused": ("_remaining", lambda tokens, law, draws: law),
}


@pytest.mark.parametrize("mutant", _MUTANTS)
def test_mutants_of_verification_change_the_law(mutant, monkeypatch):
    name, broken = _MUTANTS[mutant]
    monkeypatch.setattr(lm.verification, name, broken)
    with pytest.raises(AssertionError):
        test_a_two_level_tree_keeps_the_targets_law()

"""Trees in `lm`: verification keeps the target's law, and a cache holds a tree; against mutants."""

from itertools import product

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma2Config

import lm.cache
import lm.verification
from lm import CachedModel, GreedySampler, RandomSampler, Sampler
from lm.masks import ROOT, Tree
from lm.verification import node_probs, verify_tree
from tests.toys.enumeration import assert_same_law, law_of, seeded
from tests.toys.small_pair import SIZES, random_llama

_VOCAB, _LENGTH = 4, 3
_rejection_probs, _ancestors = lm.verification._rejection_probs, Tree.ancestors


def random_tree(generator: torch.Generator) -> Tree:
    """Two levels of up to three candidates for each place, in random order."""
    tokens, parents, level = [], [], [ROOT]
    for _ in range(2):
        below = []
        for node in level:
            shuffled = torch.randperm(_VOCAB, generator=generator).tolist()
            for token in shuffled[: int(torch.randint(4, (), generator=generator))]:
                below.append(len(tokens))
                tokens.append(token)
                parents.append(node)
        level = below
    return Tree(tokens, parents)


def test_a_two_level_tree_keeps_the_targets_law():
    generator = seeded()
    for _ in range(20):
        tree, shape = random_tree(generator), (_LENGTH, *[_VOCAB] * 3)
        cube = torch.randn(shape, generator=generator, dtype=torch.float64).mul(1.5).softmax(-1)

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
            for a, b, c in product(range(_VOCAB), repeat=_LENGTH)
        }
        assert_same_law(law_of(play), expected)


def _shared_draw(probs):
    """One uniform for all siblings: the first is accepted whose conditional probability is above it."""
    lowest = 1.0
    for refusal in _rejection_probs(probs):
        before, lowest = lowest, min(lowest, refusal)
        yield lowest / before if before else 1.0


def unreduced(probs):
    yield from (1.0 - prob for prob in probs)


def _as_drawn(probs):
    """min(1, p / q), as if candidates had been drawn from q, which is uniform here."""
    yield from (1.0 - min(1.0, prob * _VOCAB) for prob in probs)


_MUTANTS = {
    "shared_draw": ("_rejection_probs", _shared_draw),
    "siblings_on_unreduced_p": ("_rejection_probs", unreduced),
    "candidate_as_drawn": ("_rejection_probs", _as_drawn),
    "residual_with_the_refused": ("_remaining", lambda tokens, law, draws: law),
}


@pytest.mark.parametrize("mutant", _MUTANTS)
def test_mutants_of_verification_change_the_law(mutant, monkeypatch):
    name, broken = _MUTANTS[mutant]
    monkeypatch.setattr(lm.verification, name, broken)
    with pytest.raises(AssertionError):
        test_a_two_level_tree_keeps_the_targets_law()


def test_greedy_takes_the_longest_path_of_argmaxes_and_the_argmax_behind_it():
    tree = Tree((1, 2, 3, 0), (-1, -1, 1, 2))
    logits = torch.zeros(5, _VOCAB)
    for row, token in enumerate((2, 0, 3, 1, 0)):
        logits[row, token] = 5.0
    assert verify_tree(tree, logits, GreedySampler()) == ([1, 2], 1)
    assert node_probs(tree, [1, 2, 3], logits, GreedySampler()) == [1.0, 1.0, 0.0]


NO_NUMBERS = torch.full((2, _VOCAB), torch.nan)
GEMMA = Gemma2Config(**SIZES, num_key_value_heads=1, head_dim=8)


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (lambda: verify_tree(Tree((1,), (-1,)), NO_NUMBERS, RandomSampler()), "not finite"),
        (lambda: Tree((1,), (0,)), "node 0 has parent 0"),
        (lambda: Tree((1, 1), (-1, -1)), "siblings are distinct"),
        (
            lambda: CachedModel(AutoModelForCausalLM.from_config(GEMMA).eval(), holds_trees=True),
            r"cannot hold a tree of drafts: its cache has DynamicSlidingWindowLayer; .*draft chains",
        ),
    ],
)
def test_what_is_no_tree_no_law_or_no_holder_of_trees_is_refused(refused, message):
    with pytest.raises(ValueError, match=message):
        refused()


def _model() -> CachedModel:
    model = random_llama(vocab_size=12, initializer_range=0.4, max_position_embeddings=128)
    cached = CachedModel(model, holds_trees=True)
    cached.keep_hidden()
    return cached


def assert_tree_is_its_paths(cached: CachedModel) -> None:
    """Trees fed at once and level by level, kept and rolled back, give what each path gives alone."""
    alone, text = CachedModel(cached.model), [1, 2, 3, 4] * 10  # longer than what is fed with a tree
    alone.keep_hidden()
    tree = Tree((5, 6, 7, 5, 8, 2), (-1, -1, 0, 1, 1, 3))
    for turn in range(3):
        if turn % 2:
            levels = [Tree(tree.tokens[:num], tree.parents[:num]) for num in (0, 2, 5, 6)]
            parts = [(cached.feed_tree(text[len(cached) :], level), cached.hidden) for level in levels]
            logits, hidden = (torch.cat(each) for each in zip(*parts, strict=True))
        else:
            logits, hidden = cached.feed_tree(text[len(cached) :], tree), cached.hidden
        for row, node in enumerate(range(-1, len(tree))):
            alone.reset()
            expected = alone.feed(text + tree.tokens_of(tree.path(node)))
            torch.testing.assert_close(logits[row : row + 1], expected, rtol=0, atol=1e-10)
            torch.testing.assert_close(hidden[row : row + 1], alone.hidden, rtol=0, atol=1e-10)
        path = ([1, 3], [1, 3, 5], [])[turn]
        cached.keep(path)
        text = [*text, *tree.tokens_of(path), 9]
        assert len(cached) == len(text) - 1
    cached.roll_back(len(text) - 3)
    alone.reset()
    torch.testing.assert_close(cached.feed(text[len(cached) :]), alone.feed(text), rtol=0, atol=1e-10)


def test_a_tree_in_the_cache_is_its_paths():
    assert_tree_is_its_paths(_model())


def _seen_siblings(self):
    seen = _ancestors(self)
    for node in range(len(self)):
        seen[node, self.children(self.parents[node])] = True
    return seen


def _unmoved(self, length, places):
    self.length = length + len(places)


@pytest.mark.parametrize(
    "mutant", [(Tree, "ancestors", _seen_siblings), (lm.cache.BufferLayer, "keep_entries", _unmoved)]
)
def test_mutants_of_the_cache_change_the_logits(mutant, monkeypatch):
    cached = _model()
    monkeypatch.setattr(*mutant)
    with pytest.raises(AssertionError):
        assert_tree_is_its_paths(cached)

"""Trees in `lm`: greedy verification, what is refused, and a cache that holds a tree, against mutants."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config

import lm.cache
from lm import CachedModel, GreedySampler, RandomSampler
from lm.masks import Tree
from lm.verification import node_probs, verify_tree
from tests.toys.small_pair import llama

_VOCAB = 4
_ancestors = Tree.ancestors


def test_greedy_takes_the_longest_path_of_argmaxes_and_the_argmax_behind_it():
    tree = Tree((1, 2, 3, 0), (-1, -1, 1, 2))
    logits = torch.zeros(5, _VOCAB)
    for row, token in enumerate((2, 0, 3, 1, 0)):
        logits[row, token] = 5.0
    assert verify_tree(tree, logits, GreedySampler()) == ([1, 2], 1)
    assert node_probs(tree, [1, 2, 3], logits, GreedySampler()) == [1.0, 1.0, 0.0]


def test_a_law_that_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="not finite"):
        verify_tree(Tree((1,), (-1,)), torch.full((2, _VOCAB), torch.nan), RandomSampler())


def test_a_tree_is_refused_that_is_none():
    with pytest.raises(ValueError, match="node 0 has parent 0"):
        Tree((1,), (0,))
    with pytest.raises(ValueError, match="siblings are distinct"):
        Tree((1, 1), (-1, -1))


def _model() -> CachedModel:
    config = llama(vocab_size=12, initializer_range=0.4, max_position_embeddings=128)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
    return CachedModel(model.double().eval(), with_hidden=True, holds_trees=True)


def assert_tree_is_its_paths(cached: CachedModel) -> None:
    """Trees fed at once and level by level, kept and rolled back, give the logits and hidden states of each path
    alone.
    """
    alone, text = CachedModel(cached.model, with_hidden=True), [1, 2, 3, 4] * 10  # longer than what is fed with a tree
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


def test_a_model_with_more_than_full_attention_is_refused_in_one_line():
    config = Gemma2Config(
        vocab_size=12,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    with pytest.raises(ValueError, match=r"cannot hold a tree of drafts: its cache has WindowLayer; .*draft chains"):
        CachedModel(AutoModelForCausalLM.from_config(config).eval(), holds_trees=True)

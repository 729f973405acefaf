"""The two models of a loop with trees, as `decode.loop.models` has those of chains."""

from typing import NamedTuple

from lm import FeatureDraft, Pair
from lm.features.trees import TappedTreeModel, TreeDraft, feature_tree_model
from lm.trees.cached import TreeModel


class TreeModels(NamedTuple):
    """The models that a `TreeDecoder` and its `TreeDrafter` share; chains can be drafted with them too. A feature draft
    reads this very target.
    """

    target: TreeModel
    draft: TreeDraft


def tree_models_of(pair: Pair, *, with_hidden: bool = False) -> TreeModels:
    """Both, with empty caches; a draft that is a model of its own keeps hidden states `with_hidden`, for heads.

    Raises:
        ValueError: a model that cannot hold a tree.
    """
    drafting, width = pair.drafting, pair.vocab_size
    if isinstance(drafting, FeatureDraft):
        target = TappedTreeModel(pair.target, drafting, vocab_size=width)
        return TreeModels(target, feature_tree_model(drafting, target, vocab_size=width))
    return TreeModels(
        TreeModel(pair.target, vocab_size=width), TreeModel(drafting, vocab_size=width, with_hidden=with_hidden)
    )

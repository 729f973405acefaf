"""Trees of feature drafts, and the target that verifies them: EAGLE-2's, grown by an EAGLE draft, and CaPE's, a GliDe
chain with siblings.

The target keeps the features of a tree's nodes as it keeps their keys and values, and moves those of the accepted path
together with them (`lm.trees.cached`). An EAGLE draft feeds a node with the output of its parent.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from lm.features.draft import FeatureDraft
from lm.features.eagle import Eagle
from lm.features.stepwise import EagleModel, GlideModel
from lm.features.taps import TappedModel
from lm.trees.cached import TreeModel
from lm.trees.tree import Tree


class TappedTreeModel(TappedModel, TreeModel):
    """A target that verifies trees and keeps what one feature draft reads."""

    def roll_back(self, length: int) -> None:
        super().roll_back(min(length, len(self) - len(self._tree)))

    def keep(self, path: Sequence[int]) -> None:
        start = len(self) - len(self._tree)
        self.move_features(start, torch.tensor(path, dtype=torch.long) + start)
        super().keep(path)


class EagleTreeModel(EagleModel):
    """One text and one tree through one EAGLE draft."""

    def reset(self) -> None:
        super().reset()
        self._tree = Tree()

    def roll_back(self, length: int) -> None:
        super().roll_back(length)
        self._tree = Tree()

    @torch.inference_mode()
    def forward_tree(self, token_ids: Sequence[int], tree: Tree) -> Float[Tensor, "rows vocab"]:
        """The same as `TreeModel.forward_tree`; nodes whose parents are new as well wait for the next call.

        Args:
            token_ids: the whole text.
            tree: begins with the nodes that were fed before.
        """
        new = slice(len(self._tree), len(tree))
        logits, hidden = [], []
        if len(token_ids) > len(self):
            assert not len(self._tree), "a text that has grown leaves its tree behind: roll back first"
            logits.append(self.forward(token_ids))
            assert self.outputs is not None
            self._states, hidden = self.outputs.states[0, -1:], [self.outputs.hidden[0, -1:]]
        if new.stop > new.start:
            parents, depths, tokens = (
                torch.tensor(column[new], device=self.device) for column in (tree.parents, tree.depths, tree.tokens)
            )
            mask = torch.from_numpy(tree.sees()[new]).to(self.device)
            outputs, rows = self.grow(tokens, self._states[parents + 1], depths=depths, mask=mask)
            self._states = torch.cat([self._states, outputs.states[0]])
            logits, hidden = [*logits, rows], [*hidden, outputs.hidden[0]]
        self._tree, self.hidden = tree, torch.cat(hidden)
        return torch.cat(logits)


class GlideTreeModel(GlideModel):
    """One text and the chain of one tree through one GliDe draft."""

    @torch.inference_mode()
    def forward_tree(self, token_ids: Sequence[int], tree: Tree) -> Float[Tensor, "1 vocab"]:
        """The same as `TreeModel.forward_tree`, for trees that are one chain: the siblings beside it are leaves, which
        no draft feeds.
        """
        assert list(tree.parents) == list(range(-1, len(tree) - 1)), "a GliDe draft feeds one chain; use CaPE's shape"
        return self.forward([*token_ids, *tree.tokens])


TreeDraft = TreeModel | EagleTreeModel | GlideTreeModel
"""A model that drafts trees."""


def feature_tree_model(
    draft: FeatureDraft, target: TappedTreeModel, *, vocab_size: int | None = None
) -> EagleTreeModel | GlideTreeModel:
    """The model for this draft's kind, as `feature_model`."""
    return (EagleTreeModel if isinstance(draft, Eagle) else GlideTreeModel)(draft, target, vocab_size=vocab_size)

"""Law 4.5 for a tree: a causal model whose cache holds a prefix of the text, and after it nodes of one tree.

One forward feeds what the cache lacks of the text, and nodes. A node sees the text and the nodes of its own path (a
mask of four dimensions), and has the position that it would have in its path. Nodes may be added level by level, as a
draft does, or all at once, as the target does; then the accepted path's keys and values are moved together behind the
text, and the other nodes are forgotten. That is exact for full attention with positions that are given; other models
are refused, by their kind of cache, or because their logits differ from those of each path by itself, which is tried
once per model.
"""

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from lm.caches.buffers import BufferLayer
from lm.models.cached import CachedModel
from lm.models.masked import additive, tree_feed
from lm.probe import probe, refusal_of
from lm.trees.tree import EMPTY, Tree

_MOST_PENDING = 32
"""Tokens of the text that are fed together with nodes; of a longer text (the prompt) the rest goes before, by
itself.
"""
_TEXT, _TREE = (1, 2, 3), Tree((1, 2, 3, 1, 2), (-1, -1, 0, 1, 3))


class TreeModel(CachedModel):
    """One text and one tree through one causal model.

    `len` counts tokens of the text and nodes together. `hidden` has the rows that the last forward returned.
    """

    _tree = EMPTY
    """The nodes that are in the cache."""

    def __init__(self, model: PreTrainedModel, *, vocab_size: int | None = None, with_hidden: bool = False) -> None:
        """Args are those of `CachedModel`.

        Raises:
            ValueError: a model that a `CachedModel` refuses, or that has more than full attention.
        """
        super().__init__(model, vocab_size=vocab_size, with_hidden=with_hidden)
        others = {type(layer).__name__ for layer in self._cache.layers if type(layer) is not BufferLayer}
        remedy = "only full attention can: draft chains with this model"
        refusal = refusal_of(model, "hold a tree of drafts", remedy)
        if others:
            raise refusal(f"its cache has {', '.join(sorted(others))}")
        difference = "its logits in a tree differ from those of a path alone"
        # a row that is not finite is an error here: with other models it is refused where it is decoded
        probe(model, _fed_paths(self), refusal, how="a mask for a tree", difference=difference, unknown=float("nan"))

    def roll_back(self, length: int) -> None:
        super().roll_back(min(length, len(self) - len(self._tree)))
        self._tree = EMPTY

    @torch.inference_mode()
    def forward_tree(self, token_ids: Sequence[int], tree: Tree) -> Float[Tensor, "rows vocab"]:
        """Logits that follow the text's last token, unless the cache holds it, and each node that the cache lacks.

        Args:
            token_ids: the whole text; its tokens that are not in the cache are fed.
            tree: begins with the nodes that are in the cache.
        """
        self._check_side(len(token_ids), len(token_ids) + tree.depth)
        num_pending = len(token_ids) - (len(self) - len(self._tree))
        assert num_pending == 0 or not len(self._tree), "a text that has grown leaves its tree behind: roll back first"
        if num_pending > _MOST_PENDING:
            self.forward(token_ids[:-1])
            num_pending = 1
        num_known = len(self._tree)
        ids = [*token_ids[len(token_ids) - num_pending :], *tree.tokens[num_known:]]
        depths, sees = tree.depths[num_known:], tree.sees()[num_known:]
        positions, seen = tree_feed(depths, sees, len(token_ids), num_pending=num_pending)
        mask = additive(seen, self.model.dtype)[None, None].to(self._device)
        placed = {"position_ids": positions[None].to(self._device), "attention_mask": mask}
        num_rows = len(tree) - num_known + bool(num_pending)
        logits = self._logits_at(placed, torch.tensor([ids], device=self._device), num_rows)
        self._tree = tree
        return logits

    @torch.inference_mode()
    def keep(self, path: Sequence[int]) -> None:
        """The text goes on with the nodes of this path; the other nodes are forgotten."""
        length = len(self) - len(self._tree)
        places = torch.tensor(path, dtype=torch.long) + length
        for layer in self._buffers:
            layer.gather(length, places)
        self._length, self._tree = length + len(path), EMPTY
        self._check_lengths()


def _fed_paths(cached: TreeModel) -> Iterator[tuple[Float[Tensor, "1 vocab"], Float[Tensor, "1 vocab"]]]:
    """(logits of a path in a tree, its logits alone), for every path, and for one after it was kept."""
    num_ids = cached.model.config.get_text_config().vocab_size
    text = [token % num_ids for token in _TEXT]
    tree = (
        Tree([token % num_ids for token in _TREE.tokens], _TREE.parents)
        if num_ids > max(_TREE.tokens)
        else Tree([0, 1, 0], [-1, -1, 1])
    )
    path = tree.path(len(tree) - 1)
    first = cached.forward_tree(text, tree)[1:]
    cached.keep(path[:1])
    second = cached.forward([*text, *tree.tokens_of(path)], 1)
    for alone, logits in [*zip(map(tree.path, range(len(tree))), first.split(1), strict=True), (path, second)]:
        cached.reset()
        yield logits, cached.forward([*text, *tree.tokens_of(alone)])
    cached.reset()

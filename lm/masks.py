"""Trees of tokens, and positions and masks of forwards in which each token sees some entries of the cache.

The mask of a forward has a row for every token. Its columns are the entries of the cache, old ones first, then
those of the forward: first a text, whose entries are at positions 0, 1, …, then whatever branches off from it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Fed = Int[Tensor, " fed"]
Mask = Bool[Tensor, "fed cached"]
Visible = Bool[Tensor, "*batch fed cached"]
ROOT = -1  # the last token of the text, from which a tree grows


@dataclass(frozen=True)
class Tree:
    """Candidate tokens after a text: for each token the node that it follows, parents before their children.

    Worked example: tokens (5, 7, 2) and parents (-1, -1, 0) offer the continuations "5 2" and "7". ValueError for
    a parent that does not come before its child, or siblings with one token.
    """

    tokens: Sequence[int] = ()
    parents: Sequence[int] = ()
    depths: list[int] = field(init=False, compare=False)
    """Depth of each node; the root's children have 1."""
    _children: dict[int, list[int]] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        depths: list[int] = []
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            if not ROOT <= parent < node:
                raise ValueError(
                    f"node {node} has parent {parent}; a parent is {ROOT} (the text's last token) or an earlier node"
                )
            depths.append(1 if parent == ROOT else depths[parent] + 1)
            children.setdefault(parent, []).append(node)
        for parent, nodes in children.items():
            tokens = self.tokens_of(nodes)
            if len(set(tokens)) < len(nodes):
                raise ValueError(f"node {parent} has children {tokens}; siblings are distinct tokens")
        object.__setattr__(self, "depths", depths)
        object.__setattr__(self, "_children", children)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def depth(self) -> int:
        """Tokens of its longest continuation."""
        return max(self.depths, default=0)

    def children(self, node: int) -> list[int]:
        """Nodes right after this one, which may be `ROOT`."""
        return self._children.get(node, [])

    def path(self, node: int) -> list[int]:
        """Nodes from the root's child to this one."""
        path = []
        while node != ROOT:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def tokens_of(self, path: Sequence[int]) -> list[int]:
        return [self.tokens[node] for node in path]

    def ancestors(self) -> Bool[np.ndarray, "node node"]:
        """Mask of each node's path, itself included."""
        mask = np.eye(len(self), dtype=bool)
        for node, parent in enumerate(self.parents):
            if parent != ROOT:
                mask[node] |= mask[parent]
        return mask


EMPTY = Tree()


def visible(
    last_visible: Int[Tensor, "*batch fed"], num_text: int, branch: Bool[Tensor, "*batch fed branched"] | None = None
) -> Visible:
    """Mask of what each token sees: of a text the entries up to position `last_visible`, after it those of `branch`."""
    text = torch.arange(num_text, device=last_visible.device) <= last_visible[..., None]
    return text if branch is None else torch.cat([text, branch], -1)


def additive(mask: Visible, dtype: torch.dtype) -> Float[Tensor, "*batch fed cached"]:
    """The mask as attention adds it to its scores: 0 for a visible entry, the lowest number for a hidden one."""
    return torch.full(mask.shape, torch.finfo(dtype).min, dtype=dtype, device=mask.device).masked_fill_(mask, 0.0)


def tree_feed(
    tree: Tree, num_cached: int, num_text: int, *, pending: Sequence[int] = (), device: torch.device | str = "cpu"
) -> tuple[Fed, Fed, Mask]:
    """(ids, positions, mask) of a forward of the end of a text and of the nodes that come after a tree's first
    `num_cached`; they reach the device in one transfer. `pending`, the last tokens of the text, which has
    `num_text`, are fed before them.

    With a text of 3 tokens, the last of them pending, and two new siblings of depth 1, the positions are 2, 3 and
    3, and the rows of the mask 11100, 11110 and 11101.
    """
    ancestors = tree.ancestors()[num_cached:]
    num_pending = len(pending)
    # numpy's calls on so few numbers take half as long as torch's
    table = np.zeros((num_pending + len(ancestors), 2 + len(tree)), dtype=np.int64)
    table[:, 0] = [*pending, *tree.tokens[num_cached:]]
    table[:num_pending, 1] = np.arange(num_text - num_pending, num_text)
    table[num_pending:, 1] = num_text - 1 + np.asarray(tree.depths[num_cached:], dtype=np.int64)
    table[num_pending:, 2:] = ancestors
    sent = torch.from_numpy(table).to(device)
    return sent[:, 0], sent[:, 1], visible(sent[:, 1], num_text, sent[:, 2:].bool())

"""A tree of candidate tokens after a text, its nodes numbered so that parents come first."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Bool

ROOT = -1
"""The last token of the text, from which the tree grows."""


@dataclass(frozen=True)
class Tree:
    """Tokens, and for each the node that it follows.

    Worked example: tokens (5, 7, 2) and parents (-1, -1, 0) offer the continuations "5 2" and "7".

    Raises:
        ValueError: a parent that does not come before its child, siblings with one token.
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
            if len({self.tokens[node] for node in nodes}) < len(nodes):
                raise ValueError(
                    f"node {parent} has children {[self.tokens[node] for node in nodes]}; siblings are distinct tokens"
                )
        object.__setattr__(self, "depths", depths)
        object.__setattr__(self, "_children", children)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def depth(self) -> int:
        """Tokens of its longest continuation."""
        return max(self.depths, default=0)

    def children(self, node: int) -> list[int]:
        """Nodes right after this one; `ROOT` is a node here."""
        return self._children.get(node, [])

    def path(self, node: int) -> list[int]:
        """Nodes from the root's child to this one."""
        path = []
        while node != ROOT:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def tokens_of(self, path: Sequence[int]) -> list[int]:
        """The tokens of these nodes."""
        return [self.tokens[node] for node in path]

    def sees(self) -> Bool[np.ndarray, "node node"]:
        """For each node a row: True at the nodes that it may attend to, those of its path, itself included."""
        seen = np.eye(len(self), dtype=bool)
        for node, parent in enumerate(self.parents):
            if parent != ROOT:
                seen[node] |= seen[parent]
        return seen


EMPTY = Tree()
"""The tree of no candidates."""

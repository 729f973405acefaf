"""A tree of drafts while it grows, level by level, from the draft's distributions alone; any policy is legal on it.

Candidates are numbered as they are made, parents first. Expanded ones are fed to the draft. The candidates to verify
are selected at the end; since no child is more probable than its parent, they form a tree.
"""

from collections.abc import Sequence, Set
from math import inf

from jaxtyping import Float
from torch import Tensor

from decode.drafters.trees.shapes import Shape
from lm.masks import ROOT, Tree


class Growth:
    """The candidates of one tree."""

    def __init__(self, shape: Shape, eos_ids: Set[int]) -> None:
        """Args:
        shape: how the tree branches.
        eos_ids: tokens after which nothing is drafted.
        """
        self._shape, self._eos_ids = shape, eos_ids
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.scores: list[float] = []
        """Sum of log q along the path of each candidate."""
        self.depth = 0
        self.level: list[int] = []
        """The candidates of the deepest level."""
        self.expanded: list[int] = [ROOT]
        """The nodes whose distributions make the next level."""
        self._fed: list[int] = []

    def add_level(self, log_q: Float[Tensor, "expanded vocab"]) -> None:
        """Add the children of the expanded nodes, from their log probabilities.

        Raises:
            ValueError: log probabilities that are not finite.
        """
        nums = [self._shape.num_children(max_prob) for max_prob in log_q.amax(-1).exp().tolist()]
        values, ids = (column.tolist() for column in log_q.topk(min(max(nums), log_q.shape[-1])))
        start = len(self.tokens)
        for row, node in enumerate(self.expanded):
            before = 0.0 if node == ROOT else self.scores[node]
            for value, token in list(zip(values[row], ids[row], strict=True))[: nums[row]]:
                if value > -inf:
                    self.tokens.append(token)
                    self.parents.append(node)
                    self.scores.append(before + min(value, 0.0))
        if start == len(self.tokens):
            raise ValueError(
                "a distribution to choose candidates from is not finite; load the model in float32 or check its weights"
            )
        self.level = list(range(start, len(self.tokens)))
        self.depth += 1

    def drop_level(self) -> None:
        """Remove the last level."""
        for column in (self.tokens, self.parents, self.scores):
            del column[len(column) - len(self.level) :]
        self.level, self.depth = [], self.depth - 1

    def expand(self) -> Tree | None:
        """Select the nodes that get children; returns the tree of all nodes that are fed, None if none is expanded."""
        self.expanded = sorted(self._best(self.open, self._shape.num_expanded))
        self._fed += self.expanded
        return self._tree_of(self._fed) if self.expanded else None

    @property
    def open(self) -> list[int]:
        """Candidates of the deepest level that may be followed by other tokens."""
        return [node for node in self.level if self.tokens[node] not in self._eos_ids]

    def path(self, node: int) -> list[int]:
        """Candidates from the first level to this one."""
        path = [node]
        while self.parents[path[-1]] != ROOT:
            path.append(self.parents[path[-1]])
        return path[::-1]

    def best_path(self) -> list[int]:
        """The path to the best candidate of the deepest level."""
        return self.path(self._best(self.level, 1)[0])

    def selected(self) -> list[int]:
        """The candidates that are verified, in the order of their numbers."""
        candidates = range(len(self.tokens))
        return sorted(self._best(candidates, self._shape.num_nodes or len(candidates)))

    def tree(self) -> Tree:
        """The tree of the candidates that are verified."""
        return self._tree_of(self.selected())

    def _best(self, nodes: Sequence[int], num: int) -> list[int]:
        """The most probable, best first; of equals the first, so a parent comes before its children."""
        return sorted(nodes, key=lambda node: -self.scores[node])[:num]

    def _tree_of(self, nodes: Sequence[int]) -> Tree:
        indices = {node: index for index, node in enumerate(nodes)} | {ROOT: ROOT}
        return Tree([self.tokens[node] for node in nodes], [indices[self.parents[node]] for node in nodes])

"""How a tree of drafts branches: EAGLE-2's dynamic tree, and CaPE's expansion of a greedy chain.

EAGLE-2 (arXiv 2406.16858; `topK_genrate` of SafeAILab/EAGLE at cb7e084): every level offers the `width` most probable
    children of each expanded node; of these the `width` best by the sum of log q along their path are expanded next; of
    all candidates the best `num_nodes` are verified. Published: width 10, 59 nodes, 6 levels.
CaPE (GliDe with a CaPE, arXiv 2402.02082; cape.sh of its code at edf4c9a): a greedy chain (published: of 4) whose
    tokens get siblings, more where the draft is less sure: 8 candidates if the largest probability is below .3, 6 below
    .6, 4 below .8, else 2, including the chain's own token. All are verified.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

_BANDS = ((0.3, 8), (0.6, 6), (0.8, 4), (1.0, 2))


@runtime_checkable
class Shape(Protocol):
    """How a tree branches."""

    @property
    def num_expanded(self) -> int:
        """Number of nodes of a level, the best, that get children."""
        ...

    @property
    def num_nodes(self) -> int | None:
        """Number of candidates, the best of all, that are verified; None: all."""
        ...

    def num_children(self, max_prob: float) -> int:
        """Number of candidates after a node at which the draft's largest probability is `max_prob`."""
        ...


@dataclass(frozen=True)
class Dynamic:
    """EAGLE-2's tree, which grows where the draft is confident."""

    width: int = 10
    num_nodes: int | None = 59

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ValueError(f"width is {self.width}; it must be at least 1")
        if self.num_nodes is not None and self.num_nodes < 1:
            raise ValueError(f"num_nodes is {self.num_nodes}; it must be at least 1, or None to verify all candidates")

    @property
    def num_expanded(self) -> int:
        return self.width

    def num_children(self, max_prob: float) -> int:
        return self.width


@dataclass(frozen=True)
class Cape:
    """CaPE's tree, whose width follows the draft's confidence."""

    bands: tuple[tuple[float, int], ...] = _BANDS
    """(upper bound of the largest probability, candidates), in rising order; the last is for all larger ones."""
    num_expanded: int = 1
    num_nodes: int | None = None

    def num_children(self, max_prob: float) -> int:
        return next((count for below, count in self.bands if max_prob < below), self.bands[-1][1])


SHAPES: dict[str, Shape] = {"eagle2": Dynamic(), "cape": Cape()}
"""Published shapes, by their names in commands."""

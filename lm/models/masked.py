"""Feeds over a cache in which each token says which entries it sees: those of branches, chains, trees and batches.

A feed has a position for every token and a mask with a row for every token. Its columns are the entries of the cache,
old ones first, then those of the feed itself, in their order.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

_TEXT = -1
"""Stands for the text where branches are numbered from 0."""


def additive(seen: Bool[Tensor, "*batch fed cached"], dtype: torch.dtype) -> Float[Tensor, "*batch fed cached"]:
    """What attention adds to its scores: 0 where a token sees an entry, the lowest number where it does not."""
    return torch.full(seen.shape, torch.finfo(dtype).min, dtype=dtype, device=seen.device).masked_fill_(seen, 0.0)


class Branching:
    """Who owns each entry of a cache that holds a text and, behind it, branches from places of the text; a branch sees
    the text before its root, and itself.

    With roots 2 and 4, a first feed of owners 0, 1 at depths 0, 0 has positions 2 and 4; behind a text of 5 entries the
    rows of its mask are 1100010 and 1111001.
    """

    def __init__(self, num_text: int, roots: Int[Tensor, " branch"]) -> None:
        """Args:
        num_text: entries of the text, which have positions 0, 1, ...
        roots: the position at which each branch begins.
        """
        self.roots = roots
        self._owners = torch.full((num_text,), _TEXT, device=roots.device)
        self._positions = torch.arange(num_text, device=roots.device)

    def depths(self, owners: Int[Tensor, " fed"]) -> Int[Tensor, " fed"]:
        """How many entries each of these branches has."""
        return (self._owners[:, None] == owners).sum(0)

    def feed(
        self, owners: Int[Tensor, " fed"], depths: Int[Tensor, " fed"]
    ) -> tuple[Int[Tensor, " fed"], Bool[Tensor, "fed cached"]]:
        """Append entries: (position of each, the entries that each sees).

        Args:
            owners: the branch of each.
            depths: its place in its branch, 0 first.
        """
        roots = self.roots[owners]
        positions = roots + depths
        self._owners, self._positions = torch.cat([self._owners, owners]), torch.cat([self._positions, positions])
        in_text = (self._owners == _TEXT) & (self._positions < roots[:, None])
        return positions, in_text | ((self._owners == owners[:, None]) & (self._positions <= positions[:, None]))

"""Feeds over a cache in which each token says which entries it sees: those of branches, chains, trees and batches.

A feed has a position for every token and a mask with a row for every token. Its columns are the entries of the cache,
old ones first, then those of the feed itself, in their order: first a text, whose entries stand at positions 0, 1, ...,
and behind it whatever branches off. A token sees the text up to some place, and some of what is behind it.
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def visible(
    last_seen: Int[Tensor, "*batch fed"], num_text: int, behind: Bool[Tensor, "*batch fed behind"] | None = None
) -> Bool[Tensor, "*batch fed cached"]:
    """The entries of the cache that each token of a feed sees.

    Args:
        last_seen: place of the text up to which a token sees it; places beyond the text stand for all of it.
        num_text: entries of the text.
        behind: the entries behind the text that a token sees; None: there are none.
    """
    text = torch.arange(num_text, device=last_seen.device) <= last_seen[..., None]
    return text if behind is None else torch.cat([text, behind], -1)


def additive(seen: Bool[Tensor, "*batch fed cached"], dtype: torch.dtype) -> Float[Tensor, "*batch fed cached"]:
    """What attention adds to its scores: 0 where a token sees an entry, the lowest number where it does not."""
    return torch.full(seen.shape, torch.finfo(dtype).min, dtype=dtype, device=seen.device).masked_fill_(seen, 0.0)


def tree_feed(
    depths: Sequence[int], sees: Bool[np.ndarray, "new node"], num_text: int, *, num_pending: int = 0
) -> tuple[Int[Tensor, " fed"], Bool[Tensor, "fed cached"]]:
    """Feed the end of a text and nodes of a tree behind it: (position of each, the entries that each sees), on the CPU.

    With a text of 3 entries, the last of them pending, and two new siblings of depth 1, the positions are 2, 3 and 3,
    and the rows of the mask 11100, 11110 and 11101.

    Args:
        depths: depth of each new node; the root's children have 1.
        sees: the nodes that each new node sees: those in the cache first, then the new ones.
        num_text: entries of the text, pending ones included.
        num_pending: how many of the last entries of the text are fed, before the nodes.
    """
    # numpy's calls on so few numbers take half as long as torch's
    pending, new = np.arange(num_text - num_pending, num_text), num_text - 1 + np.asarray(depths, dtype=np.int64)
    positions = np.concatenate([pending, new])
    seen = np.zeros((len(positions), num_text + sees.shape[1]), dtype=bool)
    seen[:, :num_text] = np.arange(num_text) <= positions[:, None]
    seen[num_pending:, num_text:] = sees
    return torch.from_numpy(positions), torch.from_numpy(seen)


class Branching:
    """The branches behind a text, each from a place of the text; a branch sees the text before its root, and itself.

    With roots 2 and 4, a first feed of owners 0, 1 at depths 0, 0 has positions 2 and 4; behind a text of 5 entries the
    rows of its mask are 1100010 and 1111001.
    """

    def __init__(self, num_text: int, roots: Int[Tensor, " branch"]) -> None:
        """Args:
        num_text: entries of the text.
        roots: the position at which each branch begins.
        """
        self._num_text, self._roots = num_text, roots
        self._owners = self._depths = roots.new_empty(0)

    def depths(self, owners: Int[Tensor, " fed"]) -> Int[Tensor, " fed"]:
        """How many entries each of these branches has."""
        return (self._owners[:, None] == owners).sum(0)

    def feed(
        self, owners: Int[Tensor, " fed"], depths: Int[Tensor, " fed"]
    ) -> tuple[Int[Tensor, " fed"], Bool[Tensor, "fed cached"]]:
        """Append entries: (position of each, the entries that each sees).

        Args:
            owners: the branch of each entry.
            depths: the place of each entry in its branch, 0 first.
        """
        self._owners, self._depths = torch.cat([self._owners, owners]), torch.cat([self._depths, depths])
        in_branch = (self._owners == owners[:, None]) & (self._depths <= depths[:, None])
        roots = self._roots[owners]
        return roots + depths, visible(roots - 1, self._num_text, in_branch)

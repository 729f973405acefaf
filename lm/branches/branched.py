"""A model that reads many continuations of one text side by side: branches, each from a place of its own.

A branch that begins at a place has the text before it as its context, which is in the model's KV cache already: it is
stored once, and each branch attends to the part before its place and to its own earlier tokens, by a four-dimensional
attention mask and explicit positions. So a step costs one forward of one token per branch, and nothing is copied. Which
models take that is tried (`lm.branches.probe`).

Departure: a model with sliding-window layers sees its whole context here; texts longer than its window are refused
there.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from lm.forwards import device_of

_TRUNK = -1
"""Stands for the text where branches are numbered from 0."""


@dataclass
class Branched:
    """A model with a text in its cache, and branches that grow from it.

    Attributes:
        roots: how many tokens of the text each branch sees.
    """

    model: PreTrainedModel
    vocab_size: int
    cache: DynamicCache
    roots: Int[Tensor, " branch"]

    def __post_init__(self) -> None:
        self._trunk = self.cache.get_seq_length()
        # of each token in the cache, the branch that it belongs to (none: the text) and its place there
        self._owners = torch.full((self._trunk,), _TRUNK, device=self.roots.device)
        self._depths = torch.arange(self._trunk, device=self.roots.device)

    @torch.inference_mode()
    def feed(
        self, tokens: Int[Tensor, " fed"], owners: Int[Tensor, " fed"], depths: Int[Tensor, " fed"]
    ) -> Float[Tensor, "fed hidden"]:
        """Final hidden states after each token.

        Args:
            tokens: in any order in which no token comes before an earlier one of its branch.
            owners: the branch of each.
            depths: its place in its branch, 0 first.
        """
        self._owners, self._depths = torch.cat([self._owners, owners]), torch.cat([self._depths, depths])
        hidden_from = ~self._seen(owners, depths)
        mask = torch.zeros(hidden_from.shape, dtype=self.model.dtype, device=tokens.device)
        mask.masked_fill_(hidden_from, torch.finfo(mask.dtype).min)
        output = self.model.base_model(
            input_ids=tokens[None],
            attention_mask=mask[None, None],
            position_ids=(self.roots[owners] + depths)[None],
            past_key_values=self.cache,
            use_cache=True,
        )
        return output.last_hidden_state[0]

    def cut(self) -> None:
        """Forget all branches."""
        self.cache.crop(self._trunk - self.cache.get_seq_length())  # a negative number: so many tokens less
        self._owners, self._depths = self._owners[: self._trunk], self._depths[: self._trunk]

    def _seen(self, owners: Int[Tensor, " fed"], depths: Int[Tensor, " fed"]) -> Bool[Tensor, "fed cached"]:
        in_trunk = (self._owners == _TRUNK) & (self._depths < self.roots[owners][:, None])
        return in_trunk | ((self._owners == owners[:, None]) & (self._depths <= depths[:, None]))


def trunk(model: PreTrainedModel, ids: list[int]) -> tuple[DynamicCache, Float[Tensor, "position hidden"]]:
    """A cache that holds `ids`, and the final hidden states after each."""
    cache = DynamicCache()  # every layer keeps everything: what a branch sees is for the mask to say
    with torch.inference_mode():
        output = model.base_model(
            input_ids=torch.tensor([ids], device=device_of(model)), past_key_values=cache, use_cache=True
        )
    return cache, output.last_hidden_state[0]

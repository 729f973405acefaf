"""A model that reads many continuations of one text side by side: branches, each from some place of the text.

A branch that begins at a place has the text before it as its context, which is in the model's KV cache already: it is
stored once, and each branch attends to the part before its place and to its own earlier tokens, by a four-dimensional
attention mask and explicit positions. So a step costs one forward of one token per branch, and nothing is copied. Which
models take that is tried (`lm.branches.probe`).

Departure: a model with sliding-window layers sees its whole context here; texts longer than its window are refused
there.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from lm.forwards import body_of, device_of
from lm.models.masked import Branching, additive


@dataclass
class Branched:
    """A model with a text in its cache, and branches that grow from it.

    Attributes:
        vocab_size: width of the distributions that callers make of hidden states.
        cache: holds the text, and behind it what is fed.
        roots: how many tokens of the text each branch sees.
    """

    model: PreTrainedModel
    vocab_size: int
    cache: DynamicCache
    roots: Int[Tensor, " branch"]

    def __post_init__(self) -> None:
        self._trunk = self.cache.get_seq_length()
        self._branching = Branching(self._trunk, self.roots)

    @torch.inference_mode()
    def feed(
        self, tokens: Int[Tensor, " fed"], owners: Int[Tensor, " fed"], depths: Int[Tensor, " fed"]
    ) -> Float[Tensor, "fed hidden"]:
        """Final hidden states after each token.

        Args:
            tokens: tokens of any branches; those of one branch in their order.
            owners: the branch of each token.
            depths: the place of each token in its branch, 0 first.
        """
        positions, seen = self._branching.feed(owners, depths)
        output = body_of(self.model)(
            input_ids=tokens[None],
            attention_mask=additive(seen, self.model.dtype)[None, None],
            position_ids=positions[None],
            past_key_values=self.cache,
            use_cache=True,
        )
        return output.last_hidden_state[0]

    def cut(self) -> None:
        """Forget all branches; the text stays."""
        self.cache.crop(self._trunk - self.cache.get_seq_length())  # a negative number: so many tokens less
        self._branching = Branching(self._trunk, self.roots)


def trunk(model: PreTrainedModel, ids: list[int]) -> tuple[DynamicCache, Float[Tensor, "position hidden"]]:
    """A cache that holds `ids`, and the final hidden states after each."""
    cache = DynamicCache()  # every layer keeps everything: what a branch sees is for the mask to say
    with torch.inference_mode():
        output = body_of(model)(
            input_ids=torch.tensor([ids], device=device_of(model)), past_key_values=cache, use_cache=True
        )
    return cache, output.last_hidden_state[0]

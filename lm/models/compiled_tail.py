"""A `CachedModel` whose forwards stay eager, while what a caller makes of each is compiled (`decode.compile: stop`).

A stop is some thirty calls on single rows, which take longer than what they compute; compiled they are one. Any model
serves that a `CachedModel` does, on any cache, and what is compiled is small: seconds, where a model takes a minute.
"""

from collections.abc import Hashable, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from lm.models.cached import CachedModel
from lm.models.captured import GuardFreeGraph, Tail, Tensors, holder
from lm.models.compiled import CompiledModel

Inputs = tuple[Float[Tensor, "1 vocab"], Float[Tensor, "1 hidden"] | None, Int[Tensor, " 1"]]
"""Inputs of tails: logits, final hidden state, token."""


class CompiledTailModel(CachedModel):
    """One sequence through one causal model; each tail compiles on first use (seconds)."""

    def __init__(self, model: PreTrainedModel, *, vocab_size: int | None = None, with_hidden: bool = False) -> None:
        self.makers: dict[Hashable, Any] = {}
        """Makers of tails, as in `CompiledModel`."""
        self._inputs: Inputs | None = None
        """Memory for what tails read, at one place for good."""
        self._tails: dict[Hashable, GuardFreeGraph] = {}
        super().__init__(model, vocab_size=vocab_size, with_hidden=with_hidden)

    def forward_then(self, token_ids: Sequence[int], tail: Tail) -> Tensors:
        """What the tail makes of the last token's forward.

        Args:
            token_ids: the whole sequence, of which the cache holds the beginning.
            tail: a function of tensors that stay where they are. Keep it: a new one is compiled anew.
        """
        if not torch.is_inference_mode_enabled():
            with torch.inference_mode():
                return self.forward_then(token_ids, tail)
        logits = self.forward(token_ids)
        kept_logits, kept_hidden, kept_token = self._inputs_like(logits)
        kept_logits.copy_(logits)
        if kept_hidden is not None and self.hidden is not None:
            kept_hidden.copy_(self.hidden)
        kept_token.fill_(token_ids[-1])
        key = tail, holder(logits.device)
        step = self._tails.get(key)
        if step is None:
            # a copy, since what a tail returns may be the very logits, which the next forward overwrites
            made = GuardFreeGraph(lambda: tail(kept_logits.clone(), kept_hidden, kept_token), logits.device)
            step = self._tails[key] = made
        return step()

    def _inputs_like(self, logits: Float[Tensor, "1 vocab"]) -> Inputs:
        """Memory for what tails read; where that of before does not fit, another, and tails are compiled anew."""
        if self._inputs is not None:
            kept = self._inputs[0]
            if (logits.shape, logits.dtype, logits.device) == (kept.shape, kept.dtype, kept.device):
                return self._inputs
        hidden = torch.empty_like(self.hidden) if self.with_hidden and self.hidden is not None else None
        token = torch.zeros(1, dtype=torch.long, device=logits.device)
        self._inputs, self._tails = (torch.empty_like(logits), hidden, token), {}
        for tensor in (part for part in self._inputs if part is not None):
            torch._dynamo.mark_static_address(tensor)
        return self._inputs


Compile = bool | Literal["stop"]
"""`decode.compile`: how much of a loop is compiled: nothing, the stop alone, or whole steps."""
KINDS: dict[Compile, type[CachedModel]] = {False: CachedModel, "stop": CompiledTailModel, True: CompiledModel}

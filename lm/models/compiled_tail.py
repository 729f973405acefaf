"""A `CachedModel` whose forwards stay eager, while what a caller makes of each is compiled (`decode.compile: stop`).

A stop is some thirty calls on single rows, which take longer than what they compute; compiled they are one. Any model
serves that a `CachedModel` does, on any cache, and what is compiled is small: seconds, where a model takes a minute.
"""

from collections.abc import Hashable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from lm.models.cached import CachedModel
from lm.models.captured import Captured, Tail, Tensors, holder
from lm.models.compiled import CompiledModel


class _Kept(NamedTuple):
    """Inputs of tails, at one place for good."""

    logits: Float[Tensor, "1 vocab"]
    hidden: Float[Tensor, "1 hidden"] | None
    fed: Int[Tensor, " 1"]

    def fits(self, logits: Tensor) -> bool:
        return (logits.shape, logits.dtype, logits.device) == (self.logits.shape, self.logits.dtype, self.logits.device)


class CompiledTailModel(CachedModel):
    """One sequence through one causal model; each tail compiles on first use (seconds)."""

    def __init__(self, model: PreTrainedModel, *, vocab_size: int | None = None, with_hidden: bool = False) -> None:
        self.makers: dict[Hashable, Any] = {}
        """Makers of tails, as in `CompiledModel`."""
        self._kept: _Kept | None = None
        self._tails: dict[Hashable, Captured] = {}
        super().__init__(model, vocab_size=vocab_size, with_hidden=with_hidden)

    def forward_then(self, token_ids: Sequence[int], tail: Tail) -> Tensors:
        """tail of the last token's forward.

        Args:
            token_ids: as for `forward`.
            tail: reads tensors that stay where they are. Keep it: each is compiled anew.
        """
        if not torch.is_inference_mode_enabled():
            with torch.inference_mode():
                return self.forward_then(token_ids, tail)
        logits = self.forward(token_ids)
        kept = self._kept
        if kept is None or not kept.fits(logits):
            kept = self._keep(logits)
        kept.logits.copy_(logits)
        if kept.hidden is not None and self.hidden is not None:
            kept.hidden.copy_(self.hidden)
        kept.fed.fill_(token_ids[-1])
        key = tail, holder(logits.device)
        step = self._tails.get(key)
        if step is None:
            # a copy, since what a tail returns may be the very logits, which the next forward overwrites
            step = self._tails[key] = Captured(lambda: tail(kept.logits.clone(), kept.hidden, kept.fed), logits.device)
        return step()

    def _keep(self, logits: Float[Tensor, "1 vocab"]) -> _Kept:
        """Memory for what tails read, in which they are compiled anew."""
        hidden = torch.empty_like(self.hidden) if self.with_hidden and self.hidden is not None else None
        fed = torch.zeros(1, dtype=torch.long, device=logits.device)
        self._kept, self._tails = _Kept(torch.empty_like(logits), hidden, fed), {}
        for tensor in (part for part in self._kept if part is not None):
            torch._dynamo.mark_static_address(tensor)
        return self._kept


Compile = bool | Literal["stop"]
"""`decode.compile`: how much of a loop is compiled: nothing, the stop alone, or whole steps."""
KINDS: dict[Compile, type[CachedModel]] = {False: CachedModel, "stop": CompiledTailModel, True: CompiledModel}

"""A head for one token at a time: `AcceptanceHead.forward` as bare calls on its weights.

A draft step of a small model takes half a millisecond, and module calls on vectors of 64 numbers would be a sixth of that. The mathematics
and the weights are the head's own (law 4.7); tests hold the two equal.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from heads.head import AcceptanceHead


class FusedHead:
    """One head's weights, read once, on its device; it takes scalars and embedding always and reads what the head takes."""

    def __init__(self, head: AcceptanceHead) -> None:
        self._dtype = head.out.weight.dtype
        self._blocks = [(block.weight.detach(), block.bias.detach()) for block in head.blocks]  # type: ignore[operator]
        self._out = head.out.weight.detach(), head.out.bias.detach()
        self._takes = head.scalars, head.embedding
        self._mix = None if head.mix is None else (head.mix.weight.detach(), head.mix.bias.detach())
        self._skip = None if head.skip is None else head.skip.weight.detach()

    def __call__(
        self,
        hidden: Float[Tensor, " hidden"],
        scalars: Float[Tensor, " scalar"] | None = None,
        embedding: Float[Tensor, " hidden"] | None = None,
    ) -> Float[Tensor, " 1"]:
        """The logit f."""
        stream = hidden if hidden.dtype == self._dtype else hidden.to(self._dtype)
        beside = None if self._skip is None else self._beside(scalars, embedding)
        if self._mix is not None and beside is not None:
            stream = stream + torch.addmv(self._mix[1], self._mix[0], beside)
        for weight, bias in self._blocks:
            stream = functional.silu(torch.addmv(bias, weight, stream), True).add_(stream)
        logit = torch.addmv(self._out[1], self._out[0], stream)
        return logit if self._skip is None or beside is None else torch.addmv(logit, self._skip, beside)

    def _beside(self, scalars: Tensor | None, embedding: Tensor | None) -> Tensor | None:
        """Scalars and embedding side by side, those that the head takes."""
        given = zip((scalars, embedding), self._takes, strict=True)
        inputs = [value.to(self._dtype) for value, is_taken in given if is_taken and value is not None]
        return torch.cat(inputs) if len(inputs) > 1 else inputs[0] if inputs else None

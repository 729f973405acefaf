"""A head for one token at a time: `AcceptanceHead.forward` as bare calls on its weights.

A draft step of a small model takes half a millisecond, and module calls on vectors of 64 numbers would be a sixth of that. The mathematics
and the weights are the head's own (law 4.7); tests hold the two equal.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from heads.model.head import AcceptanceHead


class FusedHead:
    """One head's weights, read once, on its device; it takes scalars and embedding always and reads what the head takes."""

    def __init__(self, head: AcceptanceHead) -> None:
        self._dtype = head.out.weight.dtype
        self._blocks = [(block.weight.detach(), block.bias.detach()) for block in head.blocks]  # type: ignore[operator]
        self._out = head.out.weight.detach(), head.out.bias.detach()
        self._takes = head.scalars, head.embedding
        self._mix = None if head.mix is None else (head.mix.weight.detach(), head.mix.bias.detach())
        self._skip = None if head.skip is None else head.skip.weight.detach()
        self._columns = None if self._mix is None else [column.contiguous() for column in self._mix[0].T[:2]]
        self._slopes = [] if self._skip is None else self._skip[0, :2].tolist()

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
        logit = self._of_stream(stream)
        return logit if self._skip is None or beside is None else torch.addmv(logit, self._skip, beside)

    def score(
        self,
        hidden: Float[Tensor, " hidden"],
        scalars: tuple[float, float] | None = None,
        embedding: Float[Tensor, " hidden"] | None = None,
    ) -> float:
        """The same as a number, from scalars that are numbers: on the CPU a tensor made of them would cost as much as a block."""
        if self._takes != (True, False) or scalars is None:
            return self(hidden, None if scalars is None else torch.tensor(scalars, dtype=torch.float64), embedding).item()
        stream = hidden if hidden.dtype == self._dtype else hidden.to(self._dtype)
        if self._mix is not None and self._columns is not None:
            mixed = torch.add(self._mix[1], self._columns[0], alpha=scalars[0]).add_(self._columns[1], alpha=scalars[1])
            stream = mixed.add_(stream)
        return self._of_stream(stream).item() + self._slopes[0] * scalars[0] + self._slopes[1] * scalars[1]

    def _of_stream(self, stream: Float[Tensor, " hidden"]) -> Float[Tensor, " 1"]:
        for weight, bias in self._blocks:
            stream = functional.silu(torch.addmv(bias, weight, stream), True).add_(stream)
        return torch.addmv(self._out[1], self._out[0], stream)

    def _beside(self, scalars: Tensor | None, embedding: Tensor | None) -> Tensor | None:
        """Scalars and embedding side by side, those that the head takes."""
        given = zip((scalars, embedding), self._takes, strict=True)
        inputs = [value.to(self._dtype) for value, is_taken in given if is_taken and value is not None]
        return torch.cat(inputs) if len(inputs) > 1 else inputs[0] if inputs else None

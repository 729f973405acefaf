"""A head for one token at a time: `AcceptanceHead.forward` as bare calls on its weights, by torch on a device and by numpy on the CPU.

A draft step of a small model takes half a millisecond, and module calls on vectors of 64 numbers would be a sixth of that. The mathematics
and the weights are the head's own (law 4.7); tests hold the three equal. Both take scalars and embedding always and read what the head
takes.
"""

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from heads.head import AcceptanceHead


class FusedHead:
    """One head's weights, read once, on its device."""

    def __init__(self, head: AcceptanceHead) -> None:
        self.scalars, self.embedding = head.scalars, head.embedding
        self._dtype = head.out.weight.dtype
        self._blocks = [(block.weight.detach(), block.bias.detach()) for block in head.blocks]  # type: ignore[operator]
        self._out = head.out.weight.detach(), head.out.bias.detach()
        self._mix = None if head.mix is None else (head.mix.weight.detach(), head.mix.bias.detach())
        self._skip = None if head.skip is None else head.skip.weight.detach()

    def __call__(
        self,
        hidden: Float[Tensor, " hidden"],
        scalars: Float[Tensor, " scalar"] | None = None,
        embedding: Float[Tensor, " hidden"] | None = None,
    ) -> Float[Tensor, " 1"]:
        """The logit f."""
        stream = hidden.to(self._dtype)
        given = [(scalars, self.scalars), (embedding, self.embedding)]
        inputs = [value.to(self._dtype) for value, is_taken in given if is_taken and value is not None]
        beside = torch.cat(inputs) if len(inputs) > 1 else inputs[0] if inputs else None
        if self._mix is not None and beside is not None:
            stream = stream + torch.addmv(self._mix[1], self._mix[0], beside)
        for weight, bias in self._blocks:
            stream = functional.silu(torch.addmv(bias, weight, stream), inplace=True).add_(stream)
        logit = torch.addmv(self._out[1], self._out[0], stream)
        return logit if self._skip is None or beside is None else torch.addmv(logit, self._skip, beside)


class HostHead:
    """The same with numpy."""

    def __init__(self, head: AcceptanceHead) -> None:
        dtype = torch.promote_types(head.out.weight.dtype, torch.float32)
        weights = {name: value.to(dtype).numpy() for name, value in head.state_dict().items()}
        self._takes = head.scalars, head.embedding
        # SiLU(z) = z / 2 (1 + tanh(z / 2)) cannot overflow; the halves are taken of the weights
        self._halves = [(0.5 * weights[f"blocks.{d}.weight"], 0.5 * weights[f"blocks.{d}.bias"]) for d in range(head.depth)]
        self._out, self._out_bias = weights["out.weight"][0], float(weights["out.bias"][0])
        self._mix = None if head.mix is None else (weights["mix.weight"], weights["mix.bias"])
        self._skip = None if head.skip is None else weights["skip.weight"][0]

    def __call__(
        self,
        hidden: Float[np.ndarray, " hidden"],
        scalars: tuple[float, float] | None = None,
        embedding: Float[np.ndarray, " hidden"] | None = None,
    ) -> float:
        """The logit f."""
        beside = None if self._skip is None else self._beside(hidden, scalars, embedding)
        stream = hidden if self._mix is None or beside is None else hidden + self._mix[0] @ beside + self._mix[1]
        for weight, bias in self._halves:
            half = weight.dot(stream)
            half += bias
            risen = np.tanh(half)
            risen += 1.0
            risen *= half
            risen += stream
            stream = risen
        logit = float(self._out.dot(stream)) + self._out_bias
        return logit if self._skip is None or beside is None else logit + float(self._skip @ beside)

    def _beside(self, hidden: np.ndarray, scalars: tuple[float, float] | None, embedding: np.ndarray | None) -> np.ndarray | None:
        """Scalars and embedding side by side, those that the head takes."""
        takes_scalars, takes_embedding = self._takes
        numbers = np.array(scalars, dtype=hidden.dtype) if takes_scalars else None
        if numbers is not None and takes_embedding:
            return np.concatenate([numbers, embedding])  # type: ignore[list-item]
        return numbers if numbers is not None else embedding if takes_embedding else None

"""A head for one token at a time: `heads.model.formula` as bare calls on its weights.

A draft step of a small model takes half a millisecond, and module calls and batched products on vectors of 64 numbers would be a sixth of
that. So the formula is written again here; tests/decode/loop/test_signals.py holds it to `AcceptanceHead.forward`.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from heads.model.head import AcceptanceHead


class StepwiseHead:
    """One head's weights, read once, on its device."""

    def __init__(self, head: AcceptanceHead, *, names: Sequence[str] | None = None) -> None:
        """Args:
        names: of the numbers that `score` is given, the head's scalars among them; None: the head's scalars alone.
        """
        weights = {name: weight.detach() for name, weight in head.named_parameters()}
        self.inputs = head.inputs
        self._dtype = head.out.weight.dtype
        self._blocks = [(weights[f"blocks.{d}.weight"], weights[f"blocks.{d}.bias"]) for d in range(head.depth)]
        self._out = weights["out.weight"], weights["out.bias"]
        self._mix = (weights["mix.weight"], weights["mix.bias"]) if head.mix is not None else None
        self._skip = weights.get("skip.weight")
        scalars = head.inputs.scalars
        self._places = [(scalars if names is None else tuple(names)).index(name) for name in scalars]
        columns = [] if self._mix is None else [column.contiguous() for column in self._mix[0].T[: len(scalars)]]
        slopes = [] if self._skip is None else self._skip[0, : len(scalars)].tolist()
        self._columns, self._slopes = list(zip(columns, self._places, strict=False)), list(zip(slopes, self._places, strict=True))
        self._other_columns = self._columns[1:]

    def __call__(self, hidden: Float[Tensor, " hidden"], inputs: Float[Tensor, " input"] | None = None) -> Float[Tensor, " 1"]:
        """The logit f; `inputs` are those of the head, concatenated."""
        stream = hidden if hidden.dtype == self._dtype else hidden.to(self._dtype)
        if self._skip is None or inputs is None:
            return self._of_stream(stream)
        inputs = inputs.to(self._dtype)
        if self._mix is not None:
            stream = stream + torch.addmv(self._mix[1], self._mix[0], inputs)
        return torch.addmv(self._of_stream(stream), self._skip, inputs)

    def score(
        self, hidden: Float[Tensor, " hidden"], numbers: Sequence[float] = (), embedding: Float[Tensor, " hidden"] | None = None
    ) -> float:
        """The same as a number, with scalars that are numbers: `names` in their order."""
        if self.inputs.embedding:
            scalars = torch.tensor([numbers[place] for place in self._places], dtype=torch.float64) if self._places else None
            return self(hidden, self.inputs.concatenated(scalars, embedding)).item()
        # on the CPU a tensor made of the numbers would cost as much as a block, so the columns of U are scaled by them one by one
        stream = hidden if hidden.dtype == self._dtype else hidden.to(self._dtype)
        if self._mix is not None:
            column, place = self._columns[0]
            mixed = torch.add(self._mix[1], column, alpha=numbers[place])
            for column, place in self._other_columns:
                mixed.add_(column, alpha=numbers[place])
            stream = mixed.add_(stream)
        logit = self._of_stream(stream).item()
        for slope, place in self._slopes:
            logit += slope * numbers[place]
        return logit

    def _of_stream(self, stream: Float[Tensor, " hidden"]) -> Float[Tensor, " 1"]:
        for weight, bias in self._blocks:
            stream = functional.silu(torch.addmv(bias, weight, stream), True).add_(stream)
        return torch.addmv(self._out[1], self._out[0], stream)

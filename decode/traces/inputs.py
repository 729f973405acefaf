"""What heads read of a trace: hidden states and embeddings of the draft, the bulk of it, made when a head first asks for them.

A policy that reads signals only never does, so that replaying it loads a hundredth of the trace.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor


class InputTensors(NamedTuple):
    """The tensors themselves."""

    hidden: Float[Tensor, "drafts hidden"]
    """The state that produced each token's distribution."""
    embedding_ids: Int[Tensor, " known"]
    """Token ids, ascending."""
    embedding: Float[Tensor, "known hidden"]
    """Rows of the draft's input embeddings."""


class TokenInputs:
    """The tensors, kept once they were made."""

    def __init__(self, make: Callable[[], InputTensors]) -> None:
        self.make = make

    @classmethod
    def of(cls, *tensors: Tensor) -> "TokenInputs":
        """Tensors that are there already: hidden, embedding_ids, embedding."""
        made = InputTensors(*tensors)
        return cls(lambda: made)

    @cached_property
    def tensors(self) -> InputTensors:
        """All of them."""
        return self.make()

    def at(self, drafts: Int[Tensor, " drafts"]) -> "TokenInputs":
        """Those of some tokens."""
        return TokenInputs(lambda: self.tensors._replace(hidden=self.tensors.hidden[drafts]))


def join_inputs(parts: Sequence[TokenInputs | None], num_positions: Sequence[int]) -> TokenInputs | None:
    """The inputs of joined traces, all paths before all branches; None if one of them has none.

    Args:
        parts: of each trace.
        num_positions: of each, the length of its path.
    """
    every = [part for part in parts if part is not None]
    # `make`, not `tensors`: the parts' own copies end with the joining
    return TokenInputs(lambda: _joined([part.make() for part in every], num_positions)) if len(every) == len(parts) else None


def _joined(parts: Sequence[InputTensors], ends: Sequence[int]) -> InputTensors:
    paths = [part.hidden[:end] for part, end in zip(parts, ends, strict=True)]
    branches = [part.hidden[end:] for part, end in zip(parts, ends, strict=True)]
    ids, place = torch.cat([part.embedding_ids for part in parts]).unique(return_inverse=True)
    rows = torch.cat([part.embedding for part in parts])
    embedding = rows.new_empty(len(ids), rows.shape[-1])
    embedding[place] = rows
    return InputTensors(torch.cat([*paths, *branches]), ids, embedding)

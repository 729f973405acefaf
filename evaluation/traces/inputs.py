"""What heads read of a trace: hidden states and embeddings of the draft, the bulk of it, made when a head first asks
for them.

A policy that reads signals only never does, so that replaying it loads a hundredth of the trace.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from heads.model.head import AcceptanceHead

_ROWS_AT_ONCE = 65536


class InputTensors(NamedTuple):
    """The tensors that heads read of a trace."""

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
        """All inputs as tensors."""
        return self.make()

    def at(self, drafts: Int[Tensor, " drafts"]) -> "TokenInputs":
        """Inputs of some tokens."""
        return TokenInputs(lambda: self.tensors._replace(hidden=self.tensors.hidden[drafts]))


def join_inputs(parts: Sequence[TokenInputs | None], num_positions: Sequence[int]) -> TokenInputs | None:
    """The inputs of joined traces, all paths before all branches; None if one trace has none.

    Args:
        parts: the inputs of each trace, None for a trace without.
        num_positions: the length of the path of each trace.
    """
    present = [part for part in parts if part is not None]
    # `make`, not `tensors`: the parts' own copies end with the joining
    return (
        TokenInputs(lambda: _joined([part.make() for part in present], num_positions))
        if len(present) == len(parts)
        else None
    )


def _joined(parts: Sequence[InputTensors], ends: Sequence[int]) -> InputTensors:
    paths = [part.hidden[:end] for part, end in zip(parts, ends, strict=True)]
    branches = [part.hidden[end:] for part, end in zip(parts, ends, strict=True)]
    ids, place = torch.cat([part.embedding_ids for part in parts]).unique(return_inverse=True)
    rows = torch.cat([part.embedding for part in parts])
    embedding = rows.new_empty(len(ids), rows.shape[-1])
    embedding[place] = rows
    return InputTensors(torch.cat([*paths, *branches]), ids, embedding)


@torch.inference_mode()
def scores_of(
    head: AcceptanceHead,
    inputs: TokenInputs | None,
    *,
    token: Int[np.ndarray, " drafts"],
    before: Int[np.ndarray, " drafts"],
    signals: Mapping[str, Float[np.ndarray, " drafts"]],
) -> Float[np.ndarray, " drafts"]:
    """Logits of a head for the tokens of a trace, or for those before them (fed-time); the arguments are the trace's
    own.

    Raises:
        ValueError: inputs that were not recorded, a head of another width, or of scalars that the trace has none of.
    """
    if inputs is None:
        raise ValueError(
            "this head has no scores in the trace and the trace holds no hidden states to compute them from; record "
            "it again with "
            "decode.trace_hidden=true, or with the head in decode.heads"
        )
    hidden, known_ids, embedding = inputs.tensors
    if head.hidden_size != hidden.shape[-1]:
        raise ValueError(
            f"the head reads hidden states of width {head.hidden_size}, the trace's are {hidden.shape[-1]} wide"
        )
    if not set(head.inputs.scalars) <= signals.keys():
        raise ValueError(
            f"the head reads {', '.join(head.inputs.scalars)}, and the trace has {', '.join(signals)}; record it again"
        )
    of = torch.from_numpy(before) if head.timing == "fed" else torch.arange(len(token))
    columns = {name: torch.from_numpy(signals[name]) for name in head.inputs.scalars}
    tokens = torch.searchsorted(known_ids, torch.from_numpy(token).to(known_ids.dtype))

    def logits(rows: slice) -> Tensor:
        scored = of[rows]
        chosen = {name: column[scored] for name, column in columns.items()}
        return head(hidden[rows], *head.inputs.among(chosen, lambda: embedding[tokens[scored]]))

    parts = [logits(slice(start, start + _ROWS_AT_ONCE)) for start in range(0, len(of), _ROWS_AT_ONCE)]
    return torch.cat(parts).float().numpy()

"""A head on the CPU, one token at a time, from numbers to a number.

A draft step of a small model takes half a millisecond, and the torch calls of a head would take a third of that. So
numpy computes the stream up to the first block, in preallocated memory, and torch only the blocks.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from heads.model.inputs import EPSILON
from heads.model.stepwise import EmbeddingTerms, StepwiseHead


class HostHead:
    """`StepwiseHead` from numbers to a number. Not reentrant: its memory is reused."""

    def __init__(self, head: StepwiseHead, *, names: Sequence[str] | None = None) -> None:
        """Args:
        head: on the CPU.
        names: names of the numbers that `score` gets, the head's scalars among them; None: only the head's scalars.
        """
        self._head, self._has_embedding = head, head.inputs.embedding
        scalars = head.inputs.scalars
        self._columns_read = [(scalars if names is None else tuple(names)).index(name) for name in scalars]
        self._dtype = torch.float64 if head.dtype == torch.float64 else torch.float32
        self._added = head.architecture.added_to_token
        self._blocks = [{name: self._of(weight) for name, weight in block.items()} for block in head.blocks]
        self._out, self._out_bias = self._of(head.out), self._of(head.out_bias)
        with torch.inference_mode(False):  # memory made in inference mode could not be written to outside it
            self._stream = torch.empty(head.out.shape[1], dtype=self._dtype)
        self._values = self._stream.numpy()
        self._spare, self._scalars = np.empty_like(self._values), np.empty(len(scalars), self._values.dtype)
        self._columns = None if head.mix_scalars is None or not scalars else self._of(head.mix_scalars.T).numpy()
        self._slopes: list[float] = [] if head.skip_scalars is None else head.skip_scalars[0].tolist()
        self._mix_bias = None if head.mix_bias is None else self._of(head.mix_bias).numpy()
        self._table: tuple[np.ndarray | None, np.ndarray | None] = (
            (None, None) if head.table is None else self._as_arrays(head.table)
        )

    def score(self, hidden: np.ndarray, numbers: Sequence[float] = (), token_id: int | None = None) -> float:
        """The logit f.

        Args:
            hidden: the draft's final hidden state at the head's timing.
            numbers: values of `names`, in their order.
            token_id: the token that is scored; only if the head reads its embedding.
        """
        values = self._values
        row, logit = self._of_token(token_id) if self._has_embedding else (self._mix_bias, 0.0)
        if self._head.inputs.is_normalised:
            hidden = self._normalised(hidden)
        if row is None:
            values[:] = hidden
        else:
            np.add(hidden, row, out=values, casting="unsafe")
        if self._columns_read:
            self._scalars[:] = scalars = [numbers[index] for index in self._columns_read]
            for slope, scalar in zip(self._slopes, scalars, strict=True):
                logit += slope * scalar
            if self._columns is not None:
                values += self._scalars.dot(self._columns, self._spare)
        stream = self._stream
        for block in self._blocks:
            stream = self._added(block, stream).add_(stream)
        return logit + torch.addmv(self._out_bias, self._out, stream).item()

    def _normalised(self, hidden: np.ndarray) -> np.ndarray:
        """`heads.model.inputs.normalised` in numpy."""
        centred = hidden.astype(self._values.dtype) - hidden.mean(dtype=self._values.dtype)
        centred *= 1.0 / math.sqrt(centred.dot(centred) / len(centred) + EPSILON)
        return centred

    def _of_token(self, token_id: int | None) -> tuple[np.ndarray | None, float]:
        """What the token's embedding adds to the stream and to the logit."""
        assert token_id is not None
        rows, logits = self._table
        if logits is None:
            (rows, logits), token_id = self._as_arrays(self._head.of_embedding(torch.tensor([token_id]))), 0
        return None if rows is None else rows[token_id], logits.item(token_id)

    def _as_arrays(self, added: EmbeddingTerms) -> tuple[np.ndarray | None, np.ndarray]:
        return None if added.stream is None else self._of(added.stream).numpy(), self._of(added.logit).numpy()

    def _of(self, weight: Tensor) -> Tensor:
        return weight.to(self._dtype).contiguous()

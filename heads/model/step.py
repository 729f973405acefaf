"""A head for one token at a time on the CPU, with numpy.

A token's embedding e adds U_e e + c to the stream and v_e . e to the logit. Both are computed once for the whole
vocabulary, so a step reads a table row instead of computing two products. tests/decode/loop/test_signals.py compares
`HostHead` with `AcceptanceHead.forward`.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from heads.model.formula import architecture_of, blocks_of
from heads.model.head import AcceptanceHead
from heads.model.inputs import EPSILON

_LARGEST_TABLE = 2**24
"""Numbers in a table (64 MiB). No larger one is built: two products cost little beside a draft of that size."""


class Vocabulary(NamedTuple):
    """The draft's input embeddings."""

    num_tokens: int
    embedding: Callable[[Int[Tensor, " tokens"]], Float[Tensor, "tokens hidden"]]
    """Token ids -> embeddings."""
    module: nn.Module | None = None
    """The embedding module; each head builds one table for it. None: each `HostHead` builds its own."""


Terms = tuple[Float[Tensor, "tokens hidden"] | None, Float[Tensor, " tokens"]]
"""What embeddings of tokens add: U_e e + c (None for a head without blocks), and v_e . e."""

_TABLES: WeakKeyDictionary[AcceptanceHead, WeakKeyDictionary[nn.Module, tuple[Any, Terms | None]]] = WeakKeyDictionary()
"""Head -> embedding module -> (state of both when the table was computed, table)."""


class EmbeddingTerms:
    """What the embeddings of tokens add to a head that reads them.

    Attributes:
        table: the terms of the whole vocabulary; None if they are too many.
    """

    def __init__(self, head: AcceptanceHead, vocabulary: Vocabulary) -> None:
        """`head` is in evaluation mode, on the embeddings' device."""
        assert head.skip is not None, "a head that reads embeddings has inputs"
        count = len(head.inputs.scalars)
        self._taken = head.inputs.taken
        self._vocabulary = vocabulary
        self._hidden_size = head.hidden_size
        self._skip = head.skip.weight.detach()[0, count:]
        self._mix = None if head.mix is None else head.mix.weight.detach()[:, count:]
        self._bias = None if head.mix is None else head.mix.bias.detach()
        self.table = self._cached_table(head)

    def of_tokens(self, tokens: Int[Tensor, " tokens"]) -> Terms:
        """The terms of these tokens, computed now."""
        embeddings = self._taken(self._vocabulary.embedding(tokens).detach().to(self._skip.dtype))
        stream = None if self._mix is None or self._bias is None else embeddings @ self._mix.T + self._bias
        return stream, embeddings @ self._skip

    def _cached_table(self, head: AcceptanceHead) -> Terms | None:
        """The table, rebuilt only if weights of the head or of the embeddings have changed."""
        module = self._vocabulary.module
        sources = [] if module is None else [*head.parameters(), *module.parameters(), *module.buffers()]
        # changes are invisible in inference tensors, and when a submodule of the embedding (an adapter) is switched
        if module is None or [*module.children()] or any(tensor.is_inference() for tensor in sources):
            return self._new_table()
        dtype = self._vocabulary.embedding(torch.zeros(1, dtype=torch.long, device=self._skip.device)).dtype
        state = dtype, [(StorageWeakRef(t.untyped_storage()), t._version, t.dtype) for t in sources]
        tables = _TABLES.setdefault(head, WeakKeyDictionary())
        if module not in tables or tables[module][0] != state:
            tables[module] = state, self._new_table()
        return tables[module][1]

    def _new_table(self) -> Terms | None:
        num_tokens = self._vocabulary.num_tokens
        if num_tokens * self._hidden_size > _LARGEST_TABLE:
            return None
        with torch.inference_mode(False), torch.no_grad():  # inference tensors could not be used outside inference mode
            return self.of_tokens(torch.arange(num_tokens, device=self._skip.device))


class HostHead:
    """A head from numbers to a number. Not reentrant: its memory is reused.

    A draft step of a small model takes half a millisecond, and the torch calls of a head would take a third of that. So
    numpy computes the stream up to the first block, in preallocated memory, and torch only the blocks.
    """

    def __init__(
        self, head: AcceptanceHead, vocabulary: Vocabulary | None = None, *, names: Sequence[str] | None = None
    ) -> None:
        """`head` is on the CPU, in evaluation mode, and needs `vocabulary` if it reads embeddings; `names` are those of
        the numbers that `score` gets; None: the head's scalars alone.
        """
        scalars = head.inputs.scalars
        self._columns_read = [(scalars if names is None else tuple(names)).index(name) for name in scalars]
        self._dtype = torch.float64 if head.out.weight.dtype == torch.float64 else torch.float32
        weights = {name: self._of(weight.detach()) for name, weight in head.named_parameters()}
        self._added = architecture_of(head.architecture).added_to_token
        self._blocks = blocks_of(weights)
        self._out = weights["out.weight"]
        self._out_bias = weights["out.bias"]
        with torch.inference_mode(False):  # memory made in inference mode could not be written to outside it
            self._stream = torch.empty(head.hidden_size, dtype=self._dtype)
        self._values = self._stream.numpy()
        self._spare = np.empty_like(self._values)
        self._scalars = np.empty(len(scalars), self._values.dtype)
        # the columns of the scalars; those of the embedding are in its terms
        self._slopes: list[float] = weights["skip.weight"][0, : len(scalars)].tolist() if scalars else []
        self._columns: np.ndarray | None = None
        self._mix_bias: np.ndarray | None = None
        if head.mix is not None:
            self._mix_bias = weights["mix.bias"].numpy()
            if scalars:
                self._columns = weights["mix.weight"][:, : len(scalars)].T.contiguous().numpy()
        self._is_normalised = head.inputs.is_normalised
        self._terms: EmbeddingTerms | None = None
        self._table: tuple[np.ndarray | None, np.ndarray] | None = None
        if head.inputs.embedding:
            assert vocabulary is not None, "this head reads the draft's embeddings"
            self._terms = EmbeddingTerms(head, vocabulary)
            self._table = None if self._terms.table is None else self._as_arrays(self._terms.table)

    def score(self, hidden: np.ndarray, numbers: Sequence[float] = (), token_id: int | None = None) -> float:
        """The logit f, from the draft's final hidden state at the head's timing, the values of `names`, and, only if
        the head reads its embedding, the token.
        """
        values = self._values
        row, logit = self._of_token(token_id)
        if self._is_normalised:
            hidden = self._normalised(hidden)
        np.add(hidden, 0.0 if row is None else row, out=values, casting="unsafe")
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
        """`Inputs.taken` in numpy."""
        centred = hidden.astype(self._values.dtype) - hidden.mean(dtype=self._values.dtype)
        centred *= 1.0 / math.sqrt(centred.dot(centred) / len(centred) + EPSILON)
        return centred

    def _of_token(self, token_id: int | None) -> tuple[np.ndarray | None, float]:
        """What a token's embedding adds to the stream and the logit; c alone of a head that does not read it."""
        if self._terms is None:
            return self._mix_bias, 0.0
        assert token_id is not None
        index = token_id if self._table else 0
        rows, logits = self._table or self._as_arrays(self._terms.of_tokens(torch.tensor([token_id])))
        return None if rows is None else rows[index], logits.item(index)

    def _as_arrays(self, terms: Terms) -> tuple[np.ndarray | None, np.ndarray]:
        stream, logit = terms
        return None if stream is None else self._of(stream).numpy(), self._of(logit).numpy()

    def _of(self, weight: Tensor) -> Tensor:
        return weight.to(self._dtype).contiguous()

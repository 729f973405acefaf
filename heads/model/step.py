"""A head for one token at a time on the CPU: `HostHead` with numpy, and `StepwiseHead`, what it computes in advance.

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
    """The embedding module; each head builds one table for it. None: each `StepwiseHead` builds its own."""


Terms = tuple[Float[Tensor, "tokens hidden"] | None, Float[Tensor, " tokens"]]
"""What embeddings of tokens add: U_e e + c (None for a head without blocks), and v_e . e."""

_TABLES: WeakKeyDictionary[AcceptanceHead, WeakKeyDictionary[nn.Module, tuple[Any, Terms | None]]] = WeakKeyDictionary()
"""Head -> embedding module -> (state of both when the table was computed, table)."""


class StepwiseHead:
    """The weights of one head, and what the embedding of a token adds, as `HostHead` reads them."""

    def __init__(self, head: AcceptanceHead, vocabulary: Vocabulary | None = None) -> None:
        """`head` is in evaluation mode, on the hidden states' device; it needs `vocabulary` if it reads embeddings."""
        assert vocabulary is not None or not head.inputs.embedding, "this head reads the draft's embeddings"
        self.inputs, self.architecture = head.inputs, architecture_of(head.architecture)
        self.dtype = head.out.weight.dtype
        self.device = head.out.weight.device
        self.hidden_size = head.hidden_size
        weights = {name: weight.detach() for name, weight in head.named_parameters()}
        self.mix_bias, count = weights.get("mix.bias"), len(head.inputs.scalars)
        self._vocabulary = vocabulary if head.inputs.embedding else None
        mixes = {name: weights[name] for name in ("mix.weight", "skip.weight") if name in weights}
        self._of_embedding = {name: weight[:, count:] for name, weight in mixes.items()}
        if head.inputs.embedding:  # the table has the embedding's columns and c; the formula gets the rest
            weights = {name: weight for name, weight in weights.items() if not name.startswith(("mix.", "skip."))}
            if count:
                weights |= {name: weight[:, :count] for name, weight in mixes.items()}
                weights |= {} if self.mix_bias is None else {"mix.bias": torch.zeros_like(self.mix_bias)}
        self.weights = {name: weight[None] for name, weight in weights.items()}
        self.table = self._cached_table(head)

    def of_embedding(self, tokens: Int[Tensor, " tokens"]) -> Terms:
        """What the embeddings of these tokens add; only for a head that reads them."""
        if self.table is None:
            return self._computed_terms(tokens)
        stream, logit = self.table
        return None if stream is None else stream.index_select(0, tokens), logit.index_select(0, tokens)

    def _cached_table(self, head: AcceptanceHead) -> Terms | None:
        """The table, rebuilt only if weights of the head or of the embeddings have changed."""
        module = None if self._vocabulary is None else self._vocabulary.module
        sources = [] if module is None else [*head.parameters(), *module.parameters(), *module.buffers()]
        # changes are invisible in inference tensors, and when a submodule of the embedding (an adapter) is switched
        if self._vocabulary is None or module is None or [*module.children()] or any(t.is_inference() for t in sources):
            return self._new_table()
        dtype = self._vocabulary.embedding(torch.zeros(1, dtype=torch.long, device=self.device)).dtype
        state = dtype, [(StorageWeakRef(t.untyped_storage()), t._version, t.dtype) for t in sources]
        tables = _TABLES.setdefault(head, WeakKeyDictionary())
        if module not in tables or tables[module][0] != state:
            tables[module] = state, self._new_table()
        return tables[module][1]

    def _new_table(self) -> Terms | None:
        """The terms of the whole vocabulary; None if they are too many."""
        if self._vocabulary is None or self._vocabulary.num_tokens * self.hidden_size > _LARGEST_TABLE:
            return None
        with torch.inference_mode(False), torch.no_grad():  # inference tensors could not be used outside inference mode
            return self._computed_terms(torch.arange(self._vocabulary.num_tokens, device=self.device))

    def _computed_terms(self, tokens: Int[Tensor, " tokens"]) -> Terms:
        assert self._vocabulary is not None
        embeddings = self.inputs.taken(self._vocabulary.embedding(tokens).detach().to(self.dtype))
        mix = self._of_embedding.get("mix.weight")
        bias = self.mix_bias
        stream = None if mix is None or bias is None else embeddings @ mix.T + bias
        return stream, embeddings @ self._of_embedding["skip.weight"][0]


class HostHead:
    """A `StepwiseHead` from numbers to a number. Not reentrant: its memory is reused.

    A draft step of a small model takes half a millisecond, and the torch calls of a head would take a third of that. So
    numpy computes the stream up to the first block, in preallocated memory, and torch only the blocks.
    """

    def __init__(self, head: StepwiseHead, *, names: Sequence[str] | None = None) -> None:
        """`head` is on the CPU; `names` are those of the numbers that `score` gets; None: the head's scalars alone."""
        self._head = head
        scalars = head.inputs.scalars
        self._columns_read = [(scalars if names is None else tuple(names)).index(name) for name in scalars]
        self._dtype = torch.float64 if head.dtype == torch.float64 else torch.float32
        weights = {name: self._of(weight[0]) for name, weight in head.weights.items()}
        self._added, self._blocks = head.architecture.added_to_token, blocks_of(weights)
        self._out = weights["out.weight"]
        self._out_bias = weights["out.bias"]
        with torch.inference_mode(False):  # memory made in inference mode could not be written to outside it
            self._stream = torch.empty(head.hidden_size, dtype=self._dtype)
        self._values = self._stream.numpy()
        self._spare, self._scalars = np.empty_like(self._values), np.empty(len(scalars), self._values.dtype)
        has_columns = bool(scalars) and "mix.weight" in weights
        self._columns = weights["mix.weight"].T.contiguous().numpy() if has_columns else None
        self._slopes: list[float] = weights["skip.weight"][0].tolist() if scalars else []
        self._mix_bias = None if head.mix_bias is None else self._of(head.mix_bias).numpy()
        self._table = None if head.table is None else self._as_arrays(head.table)

    def score(self, hidden: np.ndarray, numbers: Sequence[float] = (), token_id: int | None = None) -> float:
        """The logit f, from the draft's final hidden state at the head's timing, the values of `names`, and, only if
        the head reads its embedding, the token.
        """
        values = self._values
        row, logit = self._of_token(token_id) if self._head.inputs.embedding else (self._mix_bias, 0.0)
        if self._head.inputs.is_normalised:
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
        assert token_id is not None
        rows, logits = self._table or self._as_arrays(self._head.of_embedding(torch.tensor([token_id])))
        index = token_id if self._table else 0
        return None if rows is None else rows[index], logits.item(index)

    def _as_arrays(self, terms: Terms) -> tuple[np.ndarray | None, np.ndarray]:
        stream, logit = terms
        return None if stream is None else self._of(stream).numpy(), self._of(logit).numpy()

    def _of(self, weight: Tensor) -> Tensor:
        return weight.to(self._dtype).contiguous()

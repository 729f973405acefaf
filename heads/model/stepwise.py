"""A head for one token at a time: `heads.model.formula` as few torch calls on its weights.

A token's embedding e adds U_e e + c to the stream and v_e . e to the logit. Both are computed once for the whole
vocabulary, so a step reads a table row instead of computing two products. `StepwiseHead` works with tensors, on any
device and inside a compiled step; `heads.model.on_host` does the same with numpy.
tests/decode/loop/test_signals.py compares both with `AcceptanceHead.forward`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from heads.model.architectures import architecture_of, blocks_of
from heads.model.head import AcceptanceHead
from heads.model.inputs import normalised

_LARGEST_TABLE = 2**24
"""Numbers in a table (64 MiB). No larger one is built: two products cost little beside a draft of that size."""


class Vocabulary(NamedTuple):
    """The draft's input embeddings."""

    num_tokens: int
    embedding: Callable[[Int[Tensor, " tokens"]], Float[Tensor, "tokens hidden"]]
    """Token ids -> embeddings."""
    module: nn.Module | None = None
    """The embedding module; each head builds one table for it. None: each `StepwiseHead` builds its own."""


class EmbeddingTerms(NamedTuple):
    """What embeddings of tokens add."""

    stream: Float[Tensor, "tokens hidden"] | None
    """U_e e + c; None for a head without blocks."""
    logit: Float[Tensor, " tokens"]
    """v_e . e"""


_TABLES: WeakKeyDictionary[AcceptanceHead, WeakKeyDictionary[nn.Module, tuple[Any, EmbeddingTerms | None]]] = (
    WeakKeyDictionary()
)
"""Head -> embedding module -> (state of both when the table was computed, table)."""


class StepwiseHead:
    """One head's weights on its device."""

    def __init__(self, head: AcceptanceHead, vocabulary: Vocabulary | None = None) -> None:
        """Args:
        head: in evaluation mode, on the device of the draft's hidden states.
        vocabulary: the draft's embeddings; only for a head that reads them.
        """
        assert vocabulary is not None or not head.inputs.embedding, "this head reads the draft's embeddings"
        weights = {name: weight.detach() for name, weight in head.named_parameters()}
        self.inputs, self.dtype = head.inputs, head.out.weight.dtype
        self.architecture, self.blocks = architecture_of(head.architecture), blocks_of(weights)
        self.out, self.out_bias = weights["out.weight"], weights["out.bias"]
        self.mix_bias = weights.get("mix.bias")
        self.mix_scalars, self._mix_embedding = _split_columns(weights.get("mix.weight"), len(head.inputs.scalars))
        self.skip_scalars, self._skip_embedding = _split_columns(weights.get("skip.weight"), len(head.inputs.scalars))
        self._vocabulary = vocabulary
        self.table = self._cached_table(head)

    def __call__(
        self,
        hidden: Float[Tensor, " hidden"],
        scalars: Float[Tensor, " scalar"] | None = None,
        token: Int[Tensor, " 1"] | None = None,
    ) -> Float[Tensor, " 1"]:
        """The logit f.

        Args:
            hidden: the draft's final hidden state at the head's timing.
            scalars: the head's scalars in its order; only if it reads any.
            token: the token that is scored; only if the head reads its embedding.
        """
        stream, logit = hidden.to(self.dtype), self.out_bias
        if self.inputs.is_normalised:
            stream = normalised(stream)
        if self.inputs.embedding:
            assert token is not None
            added = self.of_embedding(token)
            stream, logit = stream if added.stream is None else stream + added.stream[0], logit + added.logit
        elif self.mix_bias is not None:
            stream = stream + self.mix_bias
        if self.inputs.scalars:
            assert scalars is not None, "the head reads scalars"
            scalars = scalars.to(self.dtype)
            stream = stream if self.mix_scalars is None else torch.addmv(stream, self.mix_scalars, scalars)
            logit = torch.addmv(logit, self.skip_scalars, scalars)  # type: ignore[arg-type]
        for block in self.blocks:
            stream = stream + self.architecture.added_to_token(block, stream)
        return torch.addmv(logit, self.out, stream)

    def of_embedding(self, tokens: Int[Tensor, " tokens"]) -> EmbeddingTerms:
        """What the embeddings of these tokens add; only for a head that reads them."""
        if self.table is None:
            return self._computed_terms(tokens)
        stream, logit = self.table
        return EmbeddingTerms(None if stream is None else stream.index_select(0, tokens), logit.index_select(0, tokens))

    def _cached_table(self, head: AcceptanceHead) -> EmbeddingTerms | None:
        """The table, rebuilt only if weights of the head or of the embeddings have changed."""
        module = None if self._vocabulary is None else self._vocabulary.module
        sources = [] if module is None else [*head.parameters(), *module.parameters(), *module.buffers()]
        # changes are invisible in inference tensors, and when a submodule of the embedding (an adapter) is switched
        if self._vocabulary is None or module is None or [*module.children()] or any(t.is_inference() for t in sources):
            return self._new_table()
        token = torch.zeros(1, dtype=torch.long, device=self.out.device)
        state = (
            self._vocabulary.embedding(token).dtype,
            [(StorageWeakRef(t.untyped_storage()), t._version, t.dtype) for t in sources],
        )
        tables = _TABLES.setdefault(head, WeakKeyDictionary())
        if module not in tables or tables[module][0] != state:
            tables[module] = state, self._new_table()
        return tables[module][1]

    def _new_table(self) -> EmbeddingTerms | None:
        """The terms of the whole vocabulary; None if they are too many or the head reads no embedding."""
        if (
            self._vocabulary is None
            or not self.inputs.embedding
            or self._vocabulary.num_tokens * self.out.shape[1] > _LARGEST_TABLE
        ):
            return None
        with torch.inference_mode(False), torch.no_grad():  # inference tensors could not be used outside inference mode
            return self._computed_terms(torch.arange(self._vocabulary.num_tokens, device=self.out.device))

    def _computed_terms(self, tokens: Int[Tensor, " tokens"]) -> EmbeddingTerms:
        assert self._vocabulary is not None
        assert self._skip_embedding is not None
        embeddings = self._vocabulary.embedding(tokens).detach().to(self.dtype)
        embeddings = normalised(embeddings) if self.inputs.is_normalised else embeddings
        mix, bias = self._mix_embedding, self.mix_bias
        stream = None if mix is None or bias is None else embeddings @ mix.T + bias
        return EmbeddingTerms(stream, embeddings @ self._skip_embedding[0])


def _split_columns(weight: Tensor | None, num_scalars: int) -> tuple[Tensor | None, Tensor | None]:
    """The columns that read scalars, and those that read the embedding."""
    return (None, None) if weight is None else (weight[:, :num_scalars], weight[:, num_scalars:])

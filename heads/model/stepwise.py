"""A head for one token at a time: `heads.model.formula` as bare calls on its weights.

What a token's embedding e adds is linear, U_e e + c to the stream and v_e . e to the logit, so it is worked out once
for the whole vocabulary: a step looks a row up in place of an embedding and two products. `StepwiseHead` computes with
tensors, on any device and inside a compiled step; `heads.model.on_host` does the same with numpy.
tests/decode/loop/test_signals.py holds both to `AcceptanceHead.forward`.
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
"""Numbers in a table (64 MiB). A larger one is not made: beside a draft of that size two products are nothing."""


class Vocabulary(NamedTuple):
    """The draft's input embeddings."""

    num_tokens: int
    embedding: Callable[[Int[Tensor, " tokens"]], Float[Tensor, "tokens hidden"]]
    """Rows of them."""
    module: nn.Module | None = None
    """The module that holds them; a head's table of one is built once. None: it is built for each `StepwiseHead`."""


class OfEmbedding(NamedTuple):
    """Terms that embeddings of tokens add."""

    stream: Float[Tensor, "tokens hidden"] | None
    """U_e e + c; None for a head without blocks."""
    logit: Float[Tensor, " tokens"]
    """The term v_e . e of the logit. e."""


_TABLES: WeakKeyDictionary[AcceptanceHead, WeakKeyDictionary[nn.Module, tuple[Any, OfEmbedding | None]]] = (
    WeakKeyDictionary()
)
"""The table of each head for each embedding module, and the state of both from which it was computed."""


class StepwiseHead:
    """One head's weights, read once, on its device."""

    def __init__(self, head: AcceptanceHead, vocabulary: Vocabulary | None = None) -> None:
        """Args:
        head: in evaluation; its device is where the draft's hidden states are.
        vocabulary: for a head that takes the embedding.
        """
        assert vocabulary is not None or not head.inputs.embedding, (
            "a head that takes the embedding needs those of the draft"
        )
        weights = {name: weight.detach() for name, weight in head.named_parameters()}
        self.inputs, self.dtype = head.inputs, head.out.weight.dtype
        self.architecture, self.blocks = architecture_of(head.architecture), blocks_of(weights)
        self.out, self.out_bias = weights["out.weight"], weights["out.bias"]
        self.mix_bias = weights.get("mix.bias")
        self.mix_scalars, self._mix_embedding = _apart(weights.get("mix.weight"), len(head.inputs.scalars))
        self.skip_scalars, self._skip_embedding = _apart(weights.get("skip.weight"), len(head.inputs.scalars))
        self._vocabulary = vocabulary
        self.table = self._kept_table(head)

    def __call__(
        self,
        hidden: Float[Tensor, " hidden"],
        scalars: Float[Tensor, " scalar"] | None = None,
        token: Int[Tensor, " 1"] | None = None,
    ) -> Float[Tensor, " 1"]:
        """The logit f.

        Args:
            hidden: the draft's final hidden state at the head's timing.
            scalars: the head's, in its order, if it takes any.
            token: the token that is scored, read if the head takes its embedding.
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
            assert scalars is not None, "the head takes scalars"
            scalars = scalars.to(self.dtype)
            stream = stream if self.mix_scalars is None else torch.addmv(stream, self.mix_scalars, scalars)
            logit = torch.addmv(logit, self.skip_scalars, scalars)  # type: ignore[arg-type]
        for block in self.blocks:
            stream = stream + self.architecture.added_to_token(block, stream)
        return torch.addmv(logit, self.out, stream)

    def of_embedding(self, tokens: Int[Tensor, " tokens"]) -> OfEmbedding:
        """Terms that the embeddings of these tokens add; only for a head that takes it."""
        if self.table is None:
            return self._worked_out(tokens)
        stream, logit = self.table
        return OfEmbedding(None if stream is None else stream.index_select(0, tokens), logit.index_select(0, tokens))

    def _kept_table(self, head: AcceptanceHead) -> OfEmbedding | None:
        """The table, built again only where weights of the head or of the embeddings have changed since."""
        module = None if self._vocabulary is None else self._vocabulary.module
        read = [] if module is None else [*head.parameters(), *module.parameters(), *module.buffers()]
        # parts of an embedding (an adapter) can be switched without a trace, and inference tensors count no changes
        if self._vocabulary is None or module is None or [*module.children()] or any(t.is_inference() for t in read):
            return self._made_table()
        token = torch.zeros(1, dtype=torch.long, device=self.out.device)
        state = (
            self._vocabulary.embedding(token).dtype,
            [(StorageWeakRef(t.untyped_storage()), t._version, t.dtype) for t in read],
        )
        tables = _TABLES.setdefault(head, WeakKeyDictionary())
        if module not in tables or tables[module][0] != state:
            tables[module] = state, self._made_table()
        return tables[module][1]

    def _made_table(self) -> OfEmbedding | None:
        """The same for the whole vocabulary; None where it would be too large, or the head takes no embedding."""
        if (
            self._vocabulary is None
            or not self.inputs.embedding
            or self._vocabulary.num_tokens * self.out.shape[1] > _LARGEST_TABLE
        ):
            return None
        with torch.inference_mode(False), torch.no_grad():  # one made in inference mode could not be used outside it
            return self._worked_out(torch.arange(self._vocabulary.num_tokens, device=self.out.device))

    def _worked_out(self, tokens: Int[Tensor, " tokens"]) -> OfEmbedding:
        assert self._vocabulary is not None
        assert self._skip_embedding is not None
        embeddings = self._vocabulary.embedding(tokens).detach().to(self.dtype)
        embeddings = normalised(embeddings) if self.inputs.is_normalised else embeddings
        mix, bias = self._mix_embedding, self.mix_bias
        stream = None if mix is None or bias is None else embeddings @ mix.T + bias
        return OfEmbedding(stream, embeddings @ self._skip_embedding[0])


def _apart(weight: Tensor | None, num_scalars: int) -> tuple[Tensor | None, Tensor | None]:
    """The columns that read scalars, and those that read the embedding."""
    return (None, None) if weight is None else (weight[:, :num_scalars], weight[:, num_scalars:])

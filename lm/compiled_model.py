"""A `CachedModel` whose one-token step is compiled: what a draft spends its time on, with Python taken out.

The cache is a `StaticCache`: its tensors have one shape and one address for good, and rolling back is writing a smaller length into it.
Feeding one token, or two (after full acceptance), runs the compiled step once or twice; longer feeds (the prompt) run eagerly on the same
cache. On a GPU the step is captured as a CUDA graph (`mode="reduce-overhead"`); on a CPU it is C++ made by the compiler.

Departures from `CachedModel`: attention reads the whole capacity, masked, so a capacity far beyond the sequence costs time; it grows by
doubling, and each growth compiles anew. Numbers may differ from eager ones in the last bits, which verification does not mind: q is
whatever the token was drawn from.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel, StaticCache

from lm.cached_model import CachedModel

_MAX_STEPS = 2
"""Feeds of at most so many tokens run the one-token step token by token."""


class CompiledModel(CachedModel):
    """One sequence through one causal model, one token at a time, compiled on first use (seconds to a minute)."""

    def __init__(self, model: PreTrainedModel, *, vocab_size: int | None = None, with_hidden: bool = False, capacity: int = 512) -> None:
        """Args:
        model: any transformers causal language model that supports a `StaticCache`.
        vocab_size: as for `CachedModel`.
        with_hidden: also keep the final hidden states.
        capacity: tokens that the cache starts with room for.
        """
        self._with_hidden = with_hidden
        self._capacity = capacity
        super().__init__(model, vocab_size=vocab_size)
        self._is_cuda = self.device.type == "cuda"
        self._compiled = torch.compile(_step, fullgraph=True, dynamic=False, mode="reduce-overhead" if self._is_cuda else None)

    def reset(self) -> None:
        """Forget the sequence; the cache's memory and the compiled step stay."""
        if not hasattr(self, "_cache") or self._cache.get_max_length() < self._capacity:
            self._cache = StaticCache(config=self.model.config, max_cache_len=self._capacity)
        self._set_length(0)

    def roll_back(self, length: int) -> None:
        """Keep the first `length` tokens; no effect if the cache is shorter."""
        if length < self._length:
            self._set_length(length)

    def _forward(self, token_ids: Sequence[int], num_rows: int) -> Float[Tensor, "rows vocab"]:
        """Compiled where one row is asked for after one or two tokens."""
        fed = token_ids[self._length :]
        assert 1 <= num_rows <= len(fed), f"{num_rows} rows asked of {len(fed)} fed tokens"
        if len(token_ids) > self._capacity:
            self._grow(len(token_ids))
            return self._forward(token_ids, num_rows)
        if num_rows == 1 and len(fed) <= _MAX_STEPS and self._length > 0:
            for token in fed:
                self._one.fill_(token)
                if self._is_cuda:
                    torch.compiler.cudagraph_mark_step_begin()
                logits, hidden = self._compiled(self.model, self._one, self._cache, self._with_hidden)
        else:
            ids = torch.tensor([fed], device=self.device)
            logits, hidden = _step(self.model, ids, self._cache, self._with_hidden, num_rows)
        self._length = len(token_ids)
        if self._is_cuda:  # a CUDA graph writes its next output over this one
            logits, hidden = logits.clone(), hidden if hidden is None else hidden.clone()
        self.hidden = hidden
        return logits[:, : self.vocab_size]

    def _grow(self, length: int) -> None:
        """Room for `length` tokens, empty: what was cached is fed again."""
        while self._capacity < length:
            self._capacity *= 2
        self.reset()

    def _set_length(self, length: int) -> None:
        self._length = length
        for layer in self._cache.layers:
            layer.cumulative_length.fill_(length)


def _step(
    model: PreTrainedModel, ids: Tensor, cache: StaticCache, with_hidden: bool, num_rows: int = 1
) -> tuple[Float[Tensor, "rows vocab"], Float[Tensor, "rows hidden"] | None]:
    """Logits, and final hidden states if asked for, of the last rows of one forward."""
    output = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=num_rows, output_hidden_states=with_hidden)
    return output.logits[0], output.hidden_states[-1][0, -num_rows:] if with_hidden else None

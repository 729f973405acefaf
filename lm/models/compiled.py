"""A `CachedModel` whose forwards of a few tokens are compiled: draft steps and verifications, with Python taken out.

The cache is a static one (`lm.caches.static`): one shape and one address for good, and rolling back is writing a
smaller length into it. A feed is padded on the right up to one of a few widths, each compiled once; what padding writes
lies beyond the length, where no query looks, and is overwritten by the next feed. Two tokens of which one row is asked
(a draft after full acceptance) are two steps of one; longer feeds than the last width (the prompt) run eagerly on the
same cache. On a GPU each width is captured as a CUDA graph; on a CPU it is C++ made by the compiler, and so is what
calls it.

What is compiled holds for the parameters that the model had then (`lm.models.captured`): their values may change, and a
model with other ones, of another dtype, or elsewhere is compiled anew after the next `reset`. Do not change its
structure while a `CompiledModel` is in use.

`forward_then` compiles what a caller makes of the logits together with the forward.

Departures from `CachedModel`: attention reads the whole capacity, masked, so a capacity far beyond the sequence costs
time; it grows by doubling, and each growth compiles anew. Numbers may differ from eager ones in the last bits, as those
of any two kernels.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from lm.caches.static import StaticBufferCache
from lm.models.cached import CachedModel
from lm.models.captured import GuardFreeGraph, Tail, Tensors, holder

_WIDTHS = (1, 4, 6, 8, 12, 16, 24)
"""Numbers of tokens that a compiled forward feeds; a verification of K drafted tokens feeds K + 1."""


class CompiledModel(CachedModel):
    """One sequence through one causal model; each width compiles on first use (seconds to a minute)."""

    remedy = "set decode.compile: false"

    def __init__(
        self, model: PreTrainedModel, *, vocab_size: int | None = None, with_hidden: bool = False, capacity: int = 512
    ) -> None:
        """Args:
        model: any transformers causal language model whose layers hold keys and values only.
        vocab_size: width that logits are cut to; None keeps all.
        with_hidden: also keep the final hidden states.
        capacity: tokens that the cache starts with room for.

        Raises:
            ValueError: a model whose cache cannot be rolled back, or that cannot be compiled.
        """
        self._capacity = capacity
        self._made_for: Hashable = None
        self._steps: dict[Hashable, GuardFreeGraph] = {}
        self._fed: dict[int, tuple[Int[Tensor, "1 width"], np.ndarray | None]] = {}
        """Ids of the forwards of each width, and the same memory for the host to write, where it is the CPU's."""
        self.makers: dict[Hashable, Any] = {}
        """Makers of tails, kept here by those who ask for them since each tail takes seconds to compile."""
        self._is_tried = False  # what the cache is tried with takes no compiling
        super().__init__(model, vocab_size=vocab_size, with_hidden=with_hidden)
        self._is_tried = True
        self._capacity, self._made_for = capacity, None
        self.reset()

    def _empty(self) -> None:
        """Forget the sequence; the cache's memory and the compiled forwards stay, unless that is too small or the model
        is another.
        """
        made_for = self.model.dtype, self._device, tuple(map(id, self.model.parameters()))
        if self._made_for != made_for or self._cache.capacity < self._capacity:
            self._steps, self._fed = {}, {}
            with torch.inference_mode():
                buffers = StaticBufferCache(self.model, self._capacity)
                self._cache: StaticBufferCache = buffers  # type: ignore[assignment]
        self._made_for = made_for
        self._set_length(0)

    def warm_up(self, num_fed: int) -> None:
        """Compile now what feeds of up to `num_fed` tokens will need; forgets the sequence."""
        last = next((place for place, width in enumerate(_WIDTHS) if width >= num_fed), len(_WIDTHS) - 1)
        for width in _WIDTHS[: last + 1]:
            self.reset()
            self.forward([0])
            self.forward([0] * (1 + width), width)
        self.reset()

    def reserve(self, length: int) -> None:
        """Make room for `length` tokens now, before tokens are fed that the host does not know."""
        if length > self._capacity:
            self._grow(length)

    def roll_back(self, length: int) -> None:
        """Keep the first `length` tokens; no effect if the cache is shorter."""
        if length < self._length:
            self._set_length(length)

    def forward_then(self, token_ids: Sequence[int], tail: Tail) -> Tensors:
        """What the tail makes of the last token's forward, both in one compiled step; `hidden` is not kept.

        Args:
            token_ids: the whole sequence, of which the cache holds the beginning.
            tail: a function of tensors that stay where they are. Keep it: a new one is compiled anew.
        """
        if not torch.is_inference_mode_enabled():
            with torch.inference_mode():
                return self.forward_then(token_ids, tail)
        self._check_side(len(token_ids) - 1, len(token_ids))
        self.reserve(len(token_ids))
        if len(token_ids) - self._length > 1:
            self._forward(token_ids[:-1], 1)
        self.hidden = None
        if self._length == 0:
            ids = torch.tensor([token_ids], device=self._device)
            outputs = self._step(ids, tail)
        else:
            outputs = self._stepped(token_ids[-1:], tail)
        self._advance(1, 1)
        return outputs

    def _forward(self, token_ids: Sequence[int], num_rows: int) -> Float[Tensor, "rows vocab"]:
        """Compiled unless the feed is longer than every width, begins a sequence, or would be padded beyond the context
        or the bound.
        """
        num_fed = len(token_ids) - self._length
        assert 1 <= num_rows <= num_fed, f"{num_rows} rows asked of {num_fed} fed tokens"
        if num_rows == 1 and num_fed == 2 and self._length > 0:
            self._forward(token_ids[:-1], 1)
            return self._forward(token_ids, 1)
        width = next((width for width in _WIDTHS if width >= num_fed), num_fed)
        # padding beyond the bound would change the frequencies of all
        limit = self._max_length if self._is_far else self.limit_of(0)
        is_compiled = width in _WIDTHS and 0 < self._length <= limit - width and self._is_tried
        width = width if is_compiled else num_fed
        if self._length + width > self._capacity:
            self._grow(self._length + width)
            return self._forward(token_ids, num_rows)
        fed = list(token_ids[self._length :])
        if is_compiled:
            logits, *hidden = self._stepped([*fed, *fed[:1] * (width - num_fed)])
        else:
            logits, *hidden = self._step(torch.tensor([fed], device=self._device))
        self._advance(num_fed, width)
        self.hidden = hidden[0] if hidden else None
        if width > num_rows:
            rows = slice(num_fed - num_rows, num_fed)
            logits, self.hidden = logits[rows], None if self.hidden is None else self.hidden[rows]
        return logits

    def _logits(self, ids: Int[Tensor, "1 fed"], num_rows: int) -> Float[Tensor, "rows vocab"]:
        """One token that only the device knows (`forward_drawn`)."""
        assert self._length < self._capacity, "reserve room before feeding tokens that the host does not know"
        logits, *hidden = self._stepped(ids)
        self._advance(1, 1)
        self.hidden = hidden[0] if hidden else None
        return logits

    def _stepped(self, fed: Sequence[int] | Int[Tensor, "1 1"], tail: Tail | None = None) -> Tensors:
        """What `_step` gives for these ids, compiled."""
        width = len(fed)
        ids, row = self._fed.get(width) or self._prepared(width)
        if row is not None and not isinstance(fed, Tensor):
            row[:] = fed
        else:
            ids.copy_(fed if isinstance(fed, Tensor) else torch.tensor([fed]))
        key = width, tail, holder(self._device)
        step = self._steps.get(key)
        if step is None:
            step = self._steps[key] = GuardFreeGraph(lambda: self._step(ids, tail), ids.device)
        return step()

    def _step(self, ids: Int[Tensor, "1 width"], tail: Tail | None = None) -> Tensors:
        """Logits of every row of one forward, final hidden states after them if they are kept; or what the tail makes
        of both.
        """
        output = self.model(
            input_ids=ids, past_key_values=self._cache, use_cache=True, output_hidden_states=self.with_hidden
        )
        logits = output.logits[0, :, : self.vocab_size]
        hidden = output.hidden_states[-1][0] if self.with_hidden else None
        if tail is not None:
            return tail(logits, hidden, ids[0])
        return (logits,) if hidden is None else (logits, hidden)

    def _prepared(self, width: int) -> tuple[Int[Tensor, "1 width"], np.ndarray | None]:
        ids = torch.zeros(1, width, dtype=torch.long, device=self._device)
        self._fed[width] = ids, ids.numpy()[0] if ids.is_cpu else None
        return self._fed[width]

    def _advance(self, num_fed: int, width: int) -> None:
        """The cache has taken `width` tokens of which the first `num_fed` count."""
        self._length += width
        self._cache.check_lengths(self._length)
        if width > num_fed:
            self._set_length(self._length - width + num_fed)

    def _grow(self, length: int) -> None:
        """Room for `length` tokens, empty: what was cached is fed again."""
        while self._capacity < length:
            self._capacity *= 2
        self.reset()

    def _set_length(self, length: int) -> None:
        self._length = length
        self._cache.set_length(length)

"""A `CachedModel` whose forwards of a few tokens are compiled: draft steps and verifications, with Python taken out.

The cache is a static one (`lm.caches.static`): one shape and one address for good, and rolling back is writing a smaller length into it.
A feed is padded on the right up to one of a few widths, each compiled once; what padding writes lies beyond the length, where no query
looks, and is overwritten by the next feed. Two tokens of which one row is asked (a draft after full acceptance) are two steps of one;
longer feeds than the last width (the prompt) run eagerly on the same cache. On a GPU each width is captured as a CUDA graph; on a CPU it
is C++ made by the compiler, and so is what calls it.

What is compiled holds for one model as it was then: of the hundreds of guards that would check it before every step, which costs a quarter
of a small model's, those on its modules and parameters are left out. Do not change the model's dtype, device or structure while a
`CompiledModel` of it is in use; new values in its weights are seen.

Departures from `CachedModel`: attention reads the whole capacity, masked, so a capacity far beyond the sequence costs time; it grows by
doubling, and each growth compiles anew. Numbers may differ from eager ones in the last bits, as those of any two kernels.
"""

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException
from transformers import PreTrainedModel

from lm.caches.static import StaticBufferCache
from lm.models.cached import CachedModel

_WIDTHS = (1, 4, 6, 8, 12, 16, 24)
"""Numbers of tokens that a compiled forward feeds; a verification of K drafted tokens feeds K + 1."""
_GUARDED = frozenset({"", "model", "ids", "cache", "cache.layers[0].keys", "with_hidden", "owner"})
_OWNERS = count()


class CompiledModel(CachedModel):
    """One sequence through one causal model; each width compiles on first use (seconds to a minute)."""

    remedy = "set decode.compile: false"

    def __init__(self, model: PreTrainedModel, *, vocab_size: int | None = None, with_hidden: bool = False, capacity: int = 512) -> None:
        """Args:
        model: any transformers causal language model whose layers hold keys and values only.
        vocab_size: as for `CachedModel`.
        with_hidden: also keep the final hidden states.
        capacity: tokens that the cache starts with room for.

        Raises:
            ValueError: a model whose cache cannot be rolled back, or that cannot be compiled.
        """
        self._capacity = capacity
        self._made_for: tuple[torch.dtype, torch.device] | None = None
        self._compiled: Callable[..., Any] = _step  # what the cache is tried with takes no compiling
        super().__init__(model, vocab_size=vocab_size, with_hidden=with_hidden)
        # every width of every model is one compilation of `_step`; the default allows eight in a process
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
        options: dict[str, Any] = {
            "guard_filter_fn": _needed,
            "triton.cudagraphs": self.device.type == "cuda",
            "cpp_wrapper": self.device.type != "cuda",
        }
        self._compiled = torch.compile(_step, fullgraph=True, dynamic=False, options=options)
        self._capacity, self._made_for = capacity, None
        self.reset()

    def _empty(self) -> None:
        """Forget the sequence; the cache's memory and the compiled forwards stay, unless they are too small or made for another dtype."""
        made_for = self.model.dtype, self._device
        if self._made_for != made_for:
            self._owner = next(_OWNERS)
        if self._made_for != made_for or self._cache.capacity < self._capacity:
            with torch.inference_mode():
                self._cache: StaticBufferCache = StaticBufferCache(self.model, self._capacity)  # type: ignore[assignment]
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

    def _forward(self, token_ids: Sequence[int], num_rows: int) -> Float[Tensor, "rows vocab"]:
        """Compiled unless the feed is longer than every width, begins a sequence, or would be padded beyond the context."""
        fed = list(token_ids[self._length :])
        assert 1 <= num_rows <= len(fed), f"{num_rows} rows asked of {len(fed)} fed tokens"
        if num_rows == 1 and len(fed) == 2 and self._length > 0:
            self._forward(token_ids[:-1], 1)
            return self._forward(token_ids, 1)
        width = next((width for width in _WIDTHS if width >= len(fed)), None)
        is_compiled = width is not None and self._length > 0 and self._length + width <= self._max_length
        width = width if is_compiled and width else len(fed)
        if self._length + width > self._capacity:
            self._grow(self._length + width)
            return self._forward(token_ids, num_rows)
        ids = torch.tensor([[*fed, *fed[:1] * (width - len(fed))]], device=self._device)
        logits, hidden = self._run(ids, is_compiled=is_compiled)
        rows = slice(len(fed) - num_rows, len(fed))
        self.hidden = None if hidden is None else hidden[rows]
        self._cache.check_lengths(self._length + width)
        if width > len(fed):
            self._set_length(len(token_ids))
        self._length = len(token_ids)
        return logits[rows, : self.vocab_size]

    def _logits(self, ids: Int[Tensor, "1 fed"], num_rows: int) -> Float[Tensor, "rows vocab"]:
        """One token that only the device knows (`forward_drawn`)."""
        assert self._length < self._capacity, "reserve room before feeding tokens that the host does not know"
        logits, self.hidden = self._run(ids, is_compiled=True)
        self._length += 1
        self._cache.check_lengths(self._length)
        return logits[:, : self.vocab_size]

    def _run(self, ids: Int[Tensor, "1 width"], *, is_compiled: bool) -> tuple[Tensor, Tensor | None]:
        """Logits and hidden states of every row."""
        arguments = (self.model, ids, self._cache, self.with_hidden, self._owner)
        if not is_compiled:
            return _step(*arguments)
        try:
            if not ids.is_cuda:
                return self._compiled(*arguments)
            torch.compiler.cudagraph_mark_step_begin()
            logits, hidden = self._compiled(*arguments)
        except TorchDynamoException as error:
            why = str(error).strip().splitlines()[0]
            raise ValueError(f"{type(self.model).__name__} cannot be compiled ({why}); {self.remedy}") from error
        return logits.clone(), hidden if hidden is None else hidden.clone()  # a CUDA graph writes its next output over this one

    def _grow(self, length: int) -> None:
        """Room for `length` tokens, empty: what was cached is fed again."""
        while self._capacity < length:
            self._capacity *= 2
        self.reset()

    def _set_length(self, length: int) -> None:
        self._length = length
        self._cache.set_length(length)


def _needed(guards: Sequence[Any]) -> list[bool]:
    """Which guards to keep: the arguments, the cache's capacity, and torch's own settings (threads, inference mode)."""
    return [guard.name in _GUARDED for guard in guards]


def _step(
    model: PreTrainedModel, ids: Tensor, cache: StaticBufferCache, with_hidden: bool, owner: int
) -> tuple[Float[Tensor, "rows vocab"], Float[Tensor, "rows hidden"] | None]:
    """Logits, and final hidden states if asked for, of every row of one forward.

    `owner` is read so that it is guarded: each `CompiledModel` has its own compilations, since what tells models apart is not looked at.
    """
    assert owner >= 0
    output = model(input_ids=ids, past_key_values=cache, use_cache=True, output_hidden_states=with_hidden)
    return output.logits[0], output.hidden_states[-1][0] if with_hidden else None

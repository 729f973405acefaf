"""Whether a model's cache can be trusted: tried once per model, with a few tokens, before the first sequence.

transformers has models whose forward takes a cache and ignores it (RWKV), or another cache than the common one (xLSTM, Reformer). Their
output would be wrong without a word. So a prefix, tokens after it, and other tokens after a roll-back are fed through the cache, and the
logits are held against those of a forward without one. Only a difference far beyond rounding refuses a model.
"""

from collections.abc import Sequence
from inspect import signature
from typing import Any, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

_PASSED: WeakKeyDictionary[PreTrainedModel, dict[type, bool]] = WeakKeyDictionary()
"""For each kind of `CachedModel` that a model passed with: must tokens be fed one at a time?"""
_FEEDS = ((3, 3, 1), (3, 4, 1), (3, 6, 2), (5, 8, 3))
"""(length to roll back to, length to feed up to, rows to look at), one after the other."""
_TOKENS = (1, 2, 3, 1, 3, 2, 2, 1)


@runtime_checkable
class _Cached(Protocol):
    """What of a `CachedModel` is tried."""

    model: PreTrainedModel
    vocab_size: int | None
    is_stepwise: bool
    remedy: str

    _cache: Any

    @property
    def device(self) -> torch.device: ...
    def forward(self, token_ids: Sequence[int], num_rows: int = 1) -> Tensor: ...
    def roll_back(self, length: int) -> None: ...
    def reset(self) -> None: ...


def check_cache(cached: _Cached) -> None:
    """Raise ValueError unless forwards through the cache give what forwards without one do; a model that passed is not tried again.

    Some recurrent layers go on from their state with one token only: where several fail and one at a time does not, `is_stepwise` is set.
    """
    model, passed = cached.model, _PASSED.setdefault(cached.model, {})
    if type(cached) not in passed:
        if model.config.is_encoder_decoder:
            raise _refusal(cached, "it is an encoder-decoder")
        error = _tried(cached)
        if not any(map(_is_written, cached._cache.layers)):
            raise _refusal(cached, "its forward ignores the cache")
        # half precision may choose another expert of a mixture; a cache that is wrong changes logits by their whole spread
        most = 1e-2 if model.dtype in (torch.float32, torch.float64) else 0.5
        if error > most:
            cached.is_stepwise = True
            stepwise_error = _tried(cached)
            if stepwise_error > most:
                raise _refusal(cached, f"its logits through a cache differ from those without one by {error:.2g} of their spread")
        cached.reset()
        passed[type(cached)] = cached.is_stepwise
    cached.is_stepwise = passed[type(cached)]


def _tried(cached: _Cached) -> float:
    try:
        return _largest_error(cached)
    except torch.OutOfMemoryError:
        raise
    except (AssertionError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise _refusal(cached, f"its forward fails with this cache ({type(error).__name__}: {error})") from error


@torch.inference_mode()
def _largest_error(cached: _Cached) -> float:
    """The largest difference between logits with a cache and without, as a share of the standard deviation over the vocabulary."""
    num_ids = cached.model.config.get_text_config().vocab_size
    has_positions = "position_ids" in signature(type(cached.model).forward).parameters
    error = 0.0
    cached.reset()
    tokens: list[int] = []
    for start, end, num_rows in _FEEDS:
        tokens = [*tokens[:start], *((token + start) % num_ids for token in _TOKENS[len(tokens[:start]) : end])]
        cached.roll_back(start)
        ours = cached.forward(tokens, num_rows)
        ids = torch.tensor([tokens], device=cached.device)
        positions = {"position_ids": torch.arange(end, device=cached.device)[None]} if has_positions else {}
        expected = cached.model(input_ids=ids, use_cache=False, **positions).logits[0, -num_rows:, : cached.vocab_size].to(ours.device)
        spread = max(float(expected.float().std()), torch.finfo(torch.float32).tiny)
        error = max(error, float((ours - expected).abs().max()) / spread)
    return error


def _is_written(layer: Any) -> bool:
    """Has a forward left anything in this layer of a cache?"""
    states = getattr(layer, "has_previous_state", {})
    # by its name: the transformers that vLLM runs with has no such class
    return any(states.values()) or (getattr(layer, "is_initialized", False) and type(layer).__name__ != "DummyLayer")


def _refusal(cached: _Cached, why: str) -> ValueError:
    return ValueError(f"{type(cached.model).__name__} cannot be decoded by a {type(cached).__name__}: {why}; {cached.remedy}")

"""Whether a model's cache can be trusted: tried once per model, with one text, before the first sequence.

transformers has models whose forward takes a cache and ignores it (RWKV), or another cache than the common one (xLSTM,
Reformer), and models whose forward of several tokens is not the forwards of each of them (Mamba, Zamba2, a choice among
keys that tie). Their output would be wrong without a word. So a text is fed through the cache as decoding feeds it (a
prompt, single tokens, drafts of 20, roll-backs), and the logits of every row are held against those of one forward
without a cache.

An error is the largest difference of a row's logits, as a share of their standard deviation over the vocabulary. In
float32 and float64 no row may show more than rounding: a float64 model's float32 parts leave 5e-5, and Zamba2's two
forwards, which clamp their time steps differently, part by 5e-4 to 4e-2. In half precision, where many a row chooses
another expert of a mixture, the median row of each feed must show less than a wrong cache leaves (0.3 and more); a
model that keeps states, which recover from a wrong feed, may have no row that does. A second text may pass where the
first does not: SmolLM2-135M in bfloat16 leaves 0.22 to 1.2 on its reserved tokens and 0.17 on words.

A text of 150 tokens does not show everything: where a config says that keys are chosen in a way that ties, the model is
refused by it.
"""

from collections.abc import Iterator, Sequence
from inspect import signature
from itertools import pairwise
from typing import Any, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from lm.frequencies import frequencies_of
from lm.probe import FULL_PRECISION, Refusal, refusal_of, refusing, row_errors

_REMEDY = "choose a model whose whole state is in a cache that transformers can add tokens to"
_FAILURE = "its forward fails with this cache"
_PASSED: WeakKeyDictionary[PreTrainedModel, dict[type, bool]] = WeakKeyDictionary()
"""For each kind of `CachedModel` that a model passed with: must tokens be fed one at a time?"""
_LENGTH = 150
"""Tokens of the text, where the model's context has room for them."""
_FEEDS = (
    (0, 30),
    (30, 31),
    (31, 32),
    (32, 53),
    (40, 41),
    (41, 43),
    (43, 64),
    (60, 81),
    (81, 102),
    (81, 82),
    (82, 103),
    (103, 104),
)
"""(length to roll back to, length to feed up to), one after the other; what is rolled back was wrong. The rest of the
text comes last: at once, or one by one into a model that keeps states, whose steps and longer feeds are two different
computations.
"""
_FIRST_WORD = 300
"""Ids below may be control tokens or single bytes, which come first in many vocabularies."""
_STEPWISE_LENGTH = 64
"""Tokens of the text that are fed again, one at a time, where longer feeds are wrong."""
_MOST_ROUNDING = 2e-4
_MOST_TF32_ROUNDING = 2e-2
_MOST_IN_HALF_PRECISION = 0.2
"""The most error that the median row of a feed may have."""
_MANY_ROWS = 5
"""Rows of the shortest feed that has a median; all shorter feeds share one."""
_WRONG = 0.5
"""A cache that is wrong changes logits by their whole spread."""
_MANY_HEADS = 16
"""An indexer of h heads scores a key exactly 0 with a probability of 2^-h: from so many on, no two keys of a row
tie.
"""


@runtime_checkable
class _Cached(Protocol):
    """The part of a `CachedModel` that is tried."""

    model: PreTrainedModel
    vocab_size: int | None
    is_stepwise: bool

    _cache: Any

    @property
    def device(self) -> torch.device: ...
    @property
    def max_length(self) -> float: ...
    def forward(self, token_ids: Sequence[int], num_rows: int = 1) -> Tensor: ...
    def roll_back(self, length: int) -> None: ...
    def reset(self) -> None: ...


def check_cache(cached: _Cached) -> None:
    """Raise ValueError unless forwards through the cache give what forwards without one do; a model that passed is not
    tried again.

    Where feeds of several tokens fail, and a prompt followed by single tokens gives what transformers' own cache gives,
    `is_stepwise` is set.
    """
    model, passed = cached.model, _PASSED.setdefault(cached.model, {})
    if type(cached) not in passed:
        if model.config.is_encoder_decoder:
            raise _refusal(cached)("it is an encoder-decoder")
        _check_choice_of_keys(cached)
        passed[type(cached)] = _must_be_stepwise(cached)
        cached.reset()
    cached.is_stepwise = passed[type(cached)]


def _check_choice_of_keys(cached: _Cached) -> None:
    """Raise ValueError for attention to a few keys that tie: which of them it sees differs from one forward to
    another.
    """
    config = cached.model.config.get_text_config()
    num_kept, num_indexed = (getattr(config, name, None) for name in ("keep_window_size", "index_topk"))
    # Doge scores keys by their values, which hold no position
    if num_kept is not None and num_kept < cached.max_length:
        subject = f"it keeps {num_kept} keys of texts up to {cached.max_length:.0f} tokens"
        raise _refusal(cached)(f"{subject}, and keys of equal tokens tie")
    num_heads = getattr(config, "index_n_heads", _MANY_HEADS)
    # DeepSeek's indexer, which has a ReLU
    if num_indexed is not None and num_indexed < cached.max_length and num_heads < _MANY_HEADS:
        subject = (
            f"its indexer of {num_heads} heads keeps {num_indexed} keys of texts up to {cached.max_length:.0f} tokens"
        )
        raise _refusal(cached)(f"{subject}, and scores of 0 tie")


def _must_be_stepwise(cached: _Cached) -> bool:
    """Must tokens be fed one at a time? Raises ValueError where the logits are wrong even so."""
    error, most = _tried(cached, 0), _most(cached)
    if not any(map(is_written, cached._cache.layers)):
        raise _refusal(cached)("its forward ignores the cache")
    # a choice of experts that ties up to rounding is in one text, not in two; reserved tokens, which no training has
    # met and rounding changes most, are in the first alone
    if error > most and (cached.model.dtype == torch.float32 or _is_half_without_states(cached)):
        error = min(error, _tried(cached, 1))
    if error <= most:
        return False
    cached.is_stepwise = True
    of_steps, of_generation = _tried_stepwise(cached)
    if of_steps > most or of_generation > _WRONG:
        difference = "its logits through a cache differ from those without one"
        raise _refusal(cached)(f"{difference} by {error:.2g} of their spread")
    return True


def _tried(cached: _Cached, seed: int) -> float:
    """The error of feeds of all lengths, with the text of this seed."""
    with refusing(_refusal(cached), _FAILURE), torch.inference_mode():
        tokens = _text(cached, _LENGTH, seed)
        return _largest(cached, list(_errors(cached, tokens, _logits(cached, tokens, 0, use_cache=False))))


def _tried_stepwise(cached: _Cached) -> tuple[float, float]:
    """(the error of single tokens against transformers' own cache, which `generate` feeds like this; the error of that
    cache against none)
    """
    with refusing(_refusal(cached), _FAILURE), torch.inference_mode():
        tokens = _text(cached, _STEPWISE_LENGTH, 0)
        expected = _generated(cached, tokens)
        error = _largest(cached, list(_errors(cached, tokens, expected)))
        without_cache = _logits(cached, tokens, 0, use_cache=False)
        return error, float(row_errors(expected, without_cache).nan_to_num(0.0).max())


def _most(cached: _Cached) -> float:
    """The most error that passes."""
    if cached.model.dtype not in FULL_PRECISION:
        return _WRONG if _has_states(cached) else _MOST_IN_HALF_PRECISION
    is_tf32 = (
        cached.model.dtype == torch.float32
        and cached.device.type == "cuda"
        and torch.get_float32_matmul_precision() != "highest"
    )
    return _MOST_TF32_ROUNDING if is_tf32 else _MOST_ROUNDING


def _largest(cached: _Cached, errors: Sequence[Tensor]) -> float:
    """The error of some feeds that is held against the limit: that of the worst row or, in half precision and without
    states, the median row of the worst feed.
    """
    if not _is_half_without_states(cached):
        return max((float(error.max()) for error in errors), default=0.0)
    short = [error for error in errors if len(error) < _MANY_ROWS]
    groups = [*([torch.cat(short)] if short else []), *(error for error in errors if len(error) >= _MANY_ROWS)]
    return max((float(group.median()) for group in groups), default=0.0)


def _errors(
    cached: _Cached, tokens: Sequence[int], expected: Float[Tensor, "position vocab"]
) -> Iterator[Float[Tensor, " row"]]:
    """The error of each row that follows right tokens only, feed by feed; rows of the prompt say nothing of the cache,
    and are left out.
    """
    num_ids = cached.model.config.get_text_config().vocab_size
    cached.reset()
    feeds = _feeds(len(tokens), has_states=_has_states(cached))
    for (start, end), (num_kept, _) in pairwise([*feeds, (len(tokens), len(tokens))]):
        cached.roll_back(start)
        num_right = min(num_kept, end)  # the tokens after these are wrong, and rolled back by the next feed
        wrong = [(token + 1) % num_ids for token in tokens[num_right:end]]
        num_rows = 1 if start == 0 else end - start
        cached_logits = cached.forward([*tokens[:num_right], *wrong], num_rows)
        first = end - num_rows
        if start > 0 and num_right > first:
            # what is not finite is not compared: it is refused where it is decoded
            yield row_errors(cached_logits[: num_right - first], expected[first:num_right]).nan_to_num(0.0)


def _has_states(cached: _Cached) -> bool:
    """Does its cache hold recurrent or convolutional states?"""
    return any(hasattr(layer, "has_previous_state") for layer in cached._cache.layers)


def _is_half_without_states(cached: _Cached) -> bool:
    """Are its rows too noisy to be held to each other one by one?"""
    return cached.model.dtype not in FULL_PRECISION and not _has_states(cached)


def _feeds(length: int, *, has_states: bool) -> list[tuple[int, int]]:
    """How a text is fed: as `_FEEDS`, which is for `_LENGTH` tokens, in proportion, and then the rest."""
    scaled = [(start * length // _LENGTH, end * length // _LENGTH) for start, end in _FEEDS]
    plan = [(start, end) for start, end in scaled if start < end] or [(0, 1)]
    stride = 1 if has_states else length
    return plan + [(start, min(start + stride, length)) for start in range(plan[-1][1], length, stride)]


def _text(cached: _Cached, length: int, seed: int) -> list[int]:
    """Tokens for the whole context, at most `length`, of a few ids: the lowest, or the first that are seldom reserved.
    A high one may stand for an image.

    They all have the same rotary frequencies: beyond the bound, forwards with a cache and without are not meant to be
    equal.
    """
    num_ids, frequencies = cached.model.config.get_text_config().vocab_size, frequencies_of(cached.model)
    room = cached.max_length if frequencies is None else min(cached.max_length, frequencies.bound)
    generator = torch.Generator().manual_seed(seed)
    first = _FIRST_WORD * min(seed, 1)
    return (torch.randint(first + 1, first + 10, (int(min(length, room)),), generator=generator) % num_ids).tolist()


def _generated(cached: _Cached, tokens: Sequence[int]) -> Float[Tensor, "position vocab"]:
    """The logits that `generate` sees: of a prompt, and then of one token at a time."""
    parameters = signature(type(cached.model).forward).parameters
    cache = DynamicCache(config=cached.model.config)
    caches = {name: cache for name in ("past_key_values", "cache_params") if name in parameters}
    num_prompt = _feeds(len(tokens), has_states=True)[0][1]
    ends = range(num_prompt, len(tokens) + 1)
    feeds = pairwise((0, *ends))
    return torch.cat([_logits(cached, tokens[start:end], start, use_cache=True, **caches) for start, end in feeds])


def _logits(cached: _Cached, tokens: Sequence[int], start: int, **settings: Any) -> Float[Tensor, "position vocab"]:
    """Logits of a plain forward of tokens from position `start` on; a model that takes positions is given them."""
    ids = torch.tensor([tokens], device=cached.device)
    positions = torch.arange(start, start + len(tokens), device=cached.device)[None]
    placed = {"position_ids": positions} if "position_ids" in signature(type(cached.model).forward).parameters else {}
    return cached.model(input_ids=ids, **settings, **placed).logits[0, :, : cached.vocab_size]


def is_written(layer: Any) -> bool:
    """Has a forward left anything in this layer of a cache?"""
    states = getattr(layer, "has_previous_state", {})
    # by its name: the transformers that vLLM runs with has no such class
    return any(states.values()) or (getattr(layer, "is_initialized", False) and type(layer).__name__ != "DummyLayer")


def _refusal(cached: _Cached) -> Refusal:
    return refusal_of(cached.model, f"be decoded by a {type(cached).__name__}", _REMEDY)

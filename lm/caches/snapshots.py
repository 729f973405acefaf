"""Rolling back layers that cannot forget a token: recurrent states, convolutions, and whatever else transformers keeps
in a layer.

Such a layer's state after n tokens holds nothing of its state after n - 1. So a copy is taken before every forward, and
rolling back is going back to the last copy that is early enough: it may be earlier than asked, and then the tokens in
between are fed again. A draft, which feeds one token at a time, has a copy at every length; a target has one at the
start of each verification.
"""

from typing import Any

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from lm.caches.buffers import BufferLayer

_MOST = 48
"""Copies kept: more than any draft has tokens. The first two, of nothing and of the prompt, stay: going further back
than the others is going back to the prompt, which is then fed as it was.
"""


class Snapshots:
    """Earlier states of the layers of one cache, without the layers that roll back by counting."""

    def __init__(self, cache: DynamicCache) -> None:
        self._cache = cache
        self._copies: list[tuple[int, list[dict[str, Any]]]] = []
        """(length, state of each layer), the shortest first."""

    def take(self, length: int) -> None:
        """Remember the cache as it is, with `length` tokens in it."""
        if len(self._copies) == _MOST:
            del self._copies[2]
        self._copies.append((length, [_state_of(layer) for layer in self._layers]))

    def restore(self, length: int) -> int | None:
        """Go back to the last copy of at most `length` tokens: how many it has, or None if there is no such copy."""
        while self._copies:
            num_held, states = self._copies.pop()
            if num_held <= length:
                for layer, state in zip(self._layers, states, strict=True):
                    vars(layer).update({name: _restored(layer, name, value) for name, value in state.items()})
                return num_held
        return None

    @property
    def _layers(self) -> list[Any]:
        return [layer for layer in self._cache.layers if not isinstance(layer, BufferLayer)]


def _state_of(layer: Any) -> dict[str, Any]:
    """A copy of what a layer holds. Of keys and values that only grow it has a slice instead: what the layer will hold
    still begins with these positions.
    """
    growing = ("keys", "values") if isinstance(layer, DynamicLayer) and not layer.is_sliding else ()
    return {
        name: slice(value.shape[-2])
        if name in growing and isinstance(value, Tensor) and value.dim() == 4
        else _copied(value)
        for name, value in vars(layer).items()
    }


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


def _restored(layer: Any, name: str, value: Any) -> Any:
    return getattr(layer, name)[:, :, value] if isinstance(value, slice) else value

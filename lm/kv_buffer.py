"""A KV cache for any model, of layers that roll back exactly (`lm.caches`)."""

from typing import Any

from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from lm.caches.buffers import BufferLayer, WindowLayer


def make_cache(model: PreTrainedModel, capacity: int) -> DynamicCache:
    """An empty cache for `model`; attention layers start with room for `capacity` positions, layers of other kinds are
    transformers'.
    """
    cache = DynamicCache(config=model.config)
    cache.layers = [_layer(layer, capacity) for layer in cache.layers]
    return cache


def keep(cache: DynamicCache, rows: Tensor) -> None:
    """Drop every sequence of the batch but `rows`, which may be on any device."""
    # every kind of layer has this method, and it takes any number of rows
    cache.reorder_cache(rows.long())  # type: ignore[arg-type]


def takes_turns(cache: DynamicCache) -> bool:
    """Whether a sequence of the batch may take the place of another (`seat`) and positions may be forgotten: attention
    layers can.
    """
    return all(isinstance(layer, BufferLayer) for layer in cache.layers)


def seat(cache: DynamicCache, other: DynamicCache, rows: Tensor, num_rows: int) -> None:
    """Write the sequences of another cache over `rows`, in every layer: see `BufferLayer.seat`."""
    for layer, new in zip(cache.layers, other.layers, strict=True):
        layer.seat(new, rows, num_rows)  # type: ignore[union-attr]  # `takes_turns`


def forget(cache: DynamicCache, count: int) -> None:
    """Forget the first positions of every sequence, in every layer."""
    for layer in cache.layers:
        layer.forget(count)  # type: ignore[union-attr]  # `takes_turns`


def _layer(layer: Any, capacity: int) -> Any:
    if type(layer) is DynamicLayer:
        return BufferLayer(capacity)
    return WindowLayer(capacity, layer.sliding_window) if type(layer) is DynamicSlidingWindowLayer else layer

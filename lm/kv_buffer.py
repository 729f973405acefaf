"""A KV cache for any model, of layers that roll back exactly (`lm.caches`)."""

from typing import Any

from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from lm.caches.buffers import BufferLayer, WindowLayer


def make_cache(model: PreTrainedModel, capacity: int) -> DynamicCache:
    """An empty cache for `model`; attention layers start with room for `capacity` positions, layers of other kinds are transformers'."""
    cache = DynamicCache(config=model.config)
    cache.layers = [_layer(each, capacity) for each in cache.layers]
    return cache


def keep(cache: DynamicCache, rows: Tensor) -> None:
    """Drop every sequence of the batch but `rows`, which may be on any device."""
    cache.reorder_cache(rows.long())  # type: ignore[arg-type]  # which every kind of layer has, and which takes any number of rows


def _layer(layer: Any, capacity: int) -> Any:
    if type(layer) is DynamicLayer:
        return BufferLayer(capacity)
    return WindowLayer(capacity, layer.sliding_window) if type(layer) is DynamicSlidingWindowLayer else layer

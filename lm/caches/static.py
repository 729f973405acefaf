"""The cache of a compiled forward: tensors of one shape at one address, rolled back by writing a smaller length."""

import torch
from transformers import PreTrainedModel, StaticCache
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer

from lm.probe import refusal_of


class StaticBufferCache(StaticCache):
    """A `StaticCache` that keeps every position in every layer, also in those with a window: their masks hide what has
    left it.

    transformers' own sliding layers drop what leaves the window, and count in a Python number, which a compiled forward
    does not read.
    """

    def __init__(self, model: PreTrainedModel, capacity: int) -> None:
        """Args:
        model: a causal language model.
        capacity: positions that every layer has room for.

        Raises:
            ValueError: a layer holds more than keys and values (recurrent, convolutional, indexed, compressed).
        """
        refusal = refusal_of(model, "be compiled", "set decode.compile: false")
        try:
            super().__init__(config=model.config, max_cache_len=capacity)
        except KeyError as error:
            raise refusal(f"transformers has no static cache for {error} layers") from error
        self.layers = [
            StaticLayer(capacity) if type(layer) is StaticSlidingWindowLayer else layer for layer in self.layers
        ]
        self.capacity = capacity
        # lengths begin on the CPU, and there numpy's calls cost a tenth of torch's; a layer elsewhere has moved its own
        self._counts = [
            (place, layer, layer.cumulative_length.numpy())
            for place, layer in enumerate(self.layers)
            if type(layer) is StaticLayer
        ]
        # layers that hold nothing by their name: the transformers that vLLM runs with has no such class
        others = {type(layer).__name__ for layer in self.layers} - {StaticLayer.__name__, "DummyLayer"}
        if others:
            raise refusal(f"padded feeds would spoil the {', '.join(sorted(others))}s of its cache")

    @torch.inference_mode()
    def set_length(self, length: int) -> None:
        """Keep the first `length` positions of every layer."""
        for _, layer, count in self._counts:
            if layer.cumulative_length.is_cpu:
                count.fill(length)
            else:
                layer.cumulative_length.fill_(length)

    def check_lengths(self, length: int) -> None:
        """Raise AssertionError unless every layer that was written to holds `length` positions; asked on the CPU, where
        it is cheap.
        """
        for place, layer, count in self._counts:
            if count.item() != length and layer.cumulative_length.is_cpu and layer.is_initialized:
                raise AssertionError(
                    f"layer {place} (StaticLayer) of the cache holds {count.item()} tokens and the model has {length}"
                )

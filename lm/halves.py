"""A causal model as its two halves: the body, which ends in the final norm, and the output embeddings.

transformers wraps both in a forward that builds two output objects and asks for losses and flags; with a small draft that is a tenth of the
step. Called one after the other the halves give the same logits, and the final hidden state that heads read lies between them. Some
models do more after the head (soft caps, scales): whether the halves are the whole is tried once per model, bit by bit, and a model of
which they are not is called as a whole.
"""

from collections.abc import Callable
from inspect import signature
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lm.kv_buffer import make_cache


class Halves(NamedTuple):
    """What a forward calls, one after the other."""

    body: Callable[..., Any]
    """Token ids, positions and a cache to an output with `last_hidden_state`."""
    head: Callable[[Tensor], Tensor]
    """Final hidden states to logits."""


_FOUND: WeakKeyDictionary[PreTrainedModel, Halves | None] = WeakKeyDictionary()


def halves_of(model: PreTrainedModel) -> Halves | None:
    """The halves of `model`, or None where they are not the whole of it: something follows the head, or hooks watch the whole."""
    if model._forward_hooks or model._forward_pre_hooks or hasattr(model, "_hf_hook"):
        return None
    if model not in _FOUND:
        _FOUND[model] = _tried(model)
    return _FOUND[model]


def head_of(model: PreTrainedModel) -> nn.Module:
    """The module that maps the final hidden state to logits.

    Raises:
        ValueError: the model has none.
    """
    head = model.get_output_embeddings()
    if head is None:
        raise ValueError(f"{type(model).__name__} has no output embeddings, so no final hidden state; load it with AutoModelForCausalLM")
    return head


@torch.inference_mode()
def _tried(model: PreTrainedModel) -> Halves | None:
    body, head = model.base_model, model.get_output_embeddings()
    if body is model or head is None or "position_ids" not in signature(body.forward).parameters:
        return None
    whole, apart = (make_cache(model, 4) for _ in range(2))
    device = next(model.get_input_embeddings().parameters()).device
    for first, end in ((0, 2), (2, 3)):
        ids = torch.arange(first, end, device=device)[None] % 2
        expected = model(input_ids=ids, past_key_values=whole, use_cache=True).logits
        positions = torch.arange(first, end, device=device)[None]
        states = body(input_ids=ids, past_key_values=apart, use_cache=True, position_ids=positions).last_hidden_state
        if states.device != expected.device or not torch.equal(head(states), expected):
            return None
    return Halves(body, head)

"""A causal model as its two halves: the body, which ends in the final norm, and the output embeddings.

transformers wraps both in a forward that builds two output objects and asks for losses, flags and outputs to record;
with a small draft that is a tenth of the step. Called one after the other, and without what is wrapped around them, the
halves give the same logits, and the final hidden state that heads read lies between them. Some models do more after the
head (soft caps, scales): whether the halves are the whole is tried once per model, bit by bit, and a model of which
they are not is called as a whole. A model that has been changed since (a new head, a hook, another forward) is tried
again, or called as a whole.
"""

from collections.abc import Callable
from functools import partial
from inspect import signature, unwrap
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lm.forwards import body_of, device_of
from lm.kv_buffer import make_cache


class Halves(NamedTuple):
    """Body and head of a model, which a forward calls one after the other."""

    body: Callable[..., Any]
    """Token ids, positions and a cache to an output with `last_hidden_state`."""
    head: Callable[[Tensor], Tensor]
    """Final hidden states to logits."""


_TRIED: WeakKeyDictionary[PreTrainedModel, tuple[tuple[nn.Module, nn.Module, bool], Halves | None]] = (
    WeakKeyDictionary()
)
"""What each model was when it was tried: (body, head, whether its body is watched); and the result of the trial."""


def halves_of(model: PreTrainedModel) -> Halves | None:
    """The halves of `model` as it is now, or None where they are not all of it: something follows the head, or hooks
    watch the model.
    """
    if _is_watched(model) or hasattr(model, "_hf_hook"):
        return None
    head = model.get_output_embeddings()
    try:
        body = body_of(model)
    except ValueError:
        return None
    if head is None:
        return None
    state = body, head, _is_watched(body)
    tried = _TRIED.get(model)
    if tried is None or tried[0] != state:
        tried = _TRIED[model] = state, _tried(model, body, head)
    return tried[1]


def head_of(model: PreTrainedModel) -> nn.Module:
    """The module that maps the final hidden state to logits.

    Raises:
        ValueError: the model has none.
    """
    head = model.get_output_embeddings()
    if head is None:
        raise ValueError(
            f"{type(model).__name__} has no output embeddings, so no final hidden state; load it with "
            "AutoModelForCausalLM"
        )
    return head


def _is_watched(module: nn.Module) -> bool:
    """Would calling the bare forward of its class miss something: hooks, or a forward that was put into this object
    (torch.compile, accelerate)?
    """
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or "forward" in vars(module)
        or module._compiled_call_impl is not None
    )


def _tried(model: PreTrainedModel, body: nn.Module, head: nn.Module) -> Halves | None:
    """The barest halves that are the whole of the model."""
    if "position_ids" not in signature(body.forward).parameters:
        return None
    bare = Halves(partial(unwrap(type(body).forward), body), head)
    wrapped = Halves(body, head)
    return next(
        (halves for halves in ([wrapped] if _is_watched(body) else [bare, wrapped]) if _is_whole(halves, model)), None
    )


@torch.inference_mode()
def _is_whole(halves: Halves, model: PreTrainedModel) -> bool:
    """Do both give the same bits, for a prompt and for a token after it?"""
    whole, apart = (make_cache(model, 4) for _ in range(2))
    device = device_of(model)
    for first, end in ((0, 2), (2, 3)):
        ids = torch.arange(first, end, device=device)[None] % 2
        positions = torch.arange(first, end, device=device)[None]
        try:
            expected = model(input_ids=ids, past_key_values=whole, use_cache=True).logits
            states = halves.body(
                input_ids=ids, past_key_values=apart, use_cache=True, position_ids=positions
            ).last_hidden_state
            if states.device != expected.device or not torch.equal(halves.head(states), expected):
                return False
        except torch.OutOfMemoryError:
            raise
        # it needs what was wrapped around it, another cache, or layers between both halves
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
            return False
    return True

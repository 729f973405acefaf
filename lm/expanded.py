"""Function-preserving expansion: a model made slower by layers that add nothing (Net2Net, arXiv 1511.05641; depth by
identity blocks).

Each new layer is a copy of one of the model's layers whose output projections, of attention and of the MLP, are zero,
biases included. In a pre-norm block what is added to the residual stream is then exactly zero, and so it is behind a
further norm without a bias, whose value at zero is zero. Logits, final hidden states and every token stay equal to the
bit, while a forward takes the time, the memory and the cache of a model with so many layers: other hardware's ratio of
times, on a clock.

Which parameters end a branch is known by name; whether the model is still the same function is tried, and a family of
which it is not (norms with a bias behind a branch, scales of a whole layer) is refused.
"""

from copy import deepcopy

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from lm.forwards import body_of, device_of
from lm.kv_buffer import make_cache
from lm.probe import refusal_of, refusing

_OUTPUTS = frozenset(
    {"o_proj", "out_proj", "c_proj", "dense", "wo", "down_proj", "down_proj_bias", "dense_4h_to_h", "fc2", "w2"}
)
"""Names that families have for the projections that end a branch; those of all experts may be one parameter."""
_TOKENS = (1, 2, 0, 1, 1)


def expand(model: PreTrainedModel, num_layers: int) -> None:
    """Append `num_layers` layers that change nothing but the time.

    Raises:
        ValueError: a negative number, or a model that would not be the same function with them; the model is then of no
            further use.
    """
    if num_layers < 0:
        raise ValueError(f"extra_layers is {num_layers}; it must be at least 0")
    if num_layers == 0:
        return
    refusal = refusal_of(model, "be given extra layers", "leave out extra_layers")
    with refusing(refusal, "its forward fails without them"):
        expected = _outputs(model)
    layers, config = layers_of(model), model.config.get_text_config()
    if layers is None:
        raise refusal(f"it has no list of {config.num_hidden_layers} layers")
    num_own = len(layers)
    for place in range(num_own, num_own + num_layers):
        layers.append(_silent_copy(layers[place % num_own], config, place))
    _lengthen(config, num_own, num_layers)
    calls = list[nn.Module]()
    hook = layers[-1].register_forward_hook(lambda layer, *_: calls.append(layer))
    with refusing(refusal, "its forward fails with them"):
        outputs = _outputs(model)
    hook.remove()
    if not calls:
        raise refusal("it does not call them")
    if not all(torch.equal(*both) for both in zip(expected, outputs, strict=True)):
        raise refusal("its output changes, although their output projections are zero")


@torch.inference_mode()
def _outputs(model: PreTrainedModel) -> tuple[Tensor, ...]:
    """Outputs that must not change: hidden states and logits of some tokens, and logits of one more through a cache."""
    ids, cache = torch.tensor([_TOKENS], device=device_of(model)), make_cache(model, 8)
    hidden = body_of(model)(input_ids=ids).last_hidden_state
    logits = model(input_ids=ids, past_key_values=cache, use_cache=True).logits
    return hidden, logits, model(input_ids=ids[:, -1:], past_key_values=cache, use_cache=True).logits


def layers_of(model: PreTrainedModel) -> nn.ModuleList | None:
    """The list of the model's layers: the outermost that is as long as the config says, if there is one."""
    length = model.config.get_text_config().num_hidden_layers
    found = (
        module for module in body_of(model).modules() if isinstance(module, nn.ModuleList) and len(module) == length
    )
    return next(found, None)


@torch.no_grad()
def _silent_copy(layer: nn.Module, config: PretrainedConfig, place: int) -> nn.Module:
    """A copy at another place whose branches end in zeros; the config is not copied, it goes on speaking for every
    layer.
    """
    copy: nn.Module = deepcopy(layer, {id(config): config})
    for name, parameter in copy.named_parameters():
        if not _OUTPUTS.isdisjoint(name.split(".")):
            parameter.zero_()
    for module in copy.modules():
        if hasattr(module, "layer_idx"):
            module.layer_idx = place  # type: ignore[assignment]  # a plain number, where a module may have tensors
    return copy


def _lengthen(config: PretrainedConfig, num_own: int, num_layers: int) -> None:
    """Enter the new layers in the config, each as the layer that it copies: caches are made from it."""
    for name, value in list(vars(config).items()):
        if "layer" in name and isinstance(value, list) and len(value) == num_own:
            setattr(config, name, [*value, *(value[place % num_own] for place in range(num_layers))])
    config.num_hidden_layers = num_own + num_layers

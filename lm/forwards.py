"""Parts of a causal model, and teacher-forced forwards in bounded memory.

The [positions, vocabulary] matrix never exists as a whole: a forward yields hidden states only, and callers apply
the output layer to so few positions at a time that their float32 logits fit a given number of megabytes.

transformers' forward around body and LM head takes a tenth of a small draft's step. `body_and_lm_head` gives both
to be called directly, where that gives the same logits.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import signature, unwrap
from threading import get_ident
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from lm.cache import make_cache
from lm.rope import refuse_crossing
from lm.sampling import REMEDY, non_finite

States = Float[Tensor, "token hidden"]
_MIN_FILLED = 0.8  # minimum length of a group's shortest sequence, as a share of its longest
_MIN_TOKENS = 512  # a forward over fewer tokens costs more than padding does


BodyAndHead = tuple[Callable[..., Any], Callable[[Tensor], Tensor]]
"""From ids, positions and a cache to an output with `last_hidden_state`, after the final norm; and to logits."""
# body and LM head of a model when they were tested, and the result
_TESTED: WeakKeyDictionary[PreTrainedModel, tuple[tuple[nn.Module, nn.Module], BodyAndHead | None]] = (
    WeakKeyDictionary()
)


def body_and_lm_head(model: PreTrainedModel) -> BodyAndHead | None:
    """Body and LM head; None if they are not the whole model: something follows the head (soft caps, scales), or
    hooks watch the model. That is tested once, bit by bit, and again after the model has changed.
    """
    head = model.get_output_embeddings()
    try:
        body = body_of(model)
    except ValueError:
        return None
    if head is None or hasattr(model, "_hf_hook") or _has_hooks(model) or _has_hooks(body):
        return None
    if (tested := _TESTED.get(model)) is None or tested[0] != (body, head):
        parts = partial(unwrap(type(body).forward), body), head
        is_whole = "position_ids" in signature(body.forward).parameters and _is_whole(parts, model)
        tested = _TESTED[model] = (body, head), parts if is_whole else None
    return tested[1]


def _has_hooks(module: nn.Module) -> bool:
    """True if the class's bare forward misses hooks, or a forward set on this object (torch.compile, accelerate)."""
    has_other_forward = "forward" in vars(module) or module._compiled_call_impl is not None
    return bool(module._forward_hooks or module._forward_pre_hooks or has_other_forward)


@torch.inference_mode()
def _is_whole(parts: BodyAndHead, model: PreTrainedModel) -> bool:
    """True if both give the same bits, for a prompt and for a token after it."""
    body, head = parts
    caches = [make_cache(model, 4) for _ in range(2)]
    for first, end in ((0, 2), (2, 3)):
        positions = torch.arange(first, end, device=device_of(model))[None]
        settings = {"input_ids": positions % 2, "use_cache": True}
        try:
            expected = model(past_key_values=caches[0], **settings).logits
            states = body(past_key_values=caches[1], position_ids=positions, **settings).last_hidden_state
            if states.device != expected.device or not torch.equal(head(states), expected):
                return False
        except torch.OutOfMemoryError:
            raise
        # the body needs a wrapper or another cache, or there are layers between body and head
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
            return False
    return True


def lm_head_of(model: PreTrainedModel) -> nn.Module:
    """The module that maps the final hidden state to logits; ValueError if the model has none."""
    head = model.get_output_embeddings()
    if head is None:
        raise _no_states(model, "output embeddings, so no final hidden state")
    return head


def body_of(model: PreTrainedModel) -> nn.Module:
    """The layers below the LM head, which map token ids to final hidden states; ValueError if the model has none."""
    if model.base_model is not model:
        return model.base_model
    # Llama4ForCausalLM names a part of its wrapper as its base model, and is then its own
    body = next((part for part in model.children() if isinstance(part, PreTrainedModel)), None)
    if body is None:
        raise _no_states(model, "layers apart from its output layer, so no final hidden states")
    return body


def _no_states(model: PreTrainedModel, lacks: str) -> ValueError:
    return ValueError(f"{type(model).__name__} has no {lacks}; load it with AutoModelForCausalLM")


@contextmanager
def recorded(modules: Sequence[nn.Module], *, inputs: bool = False) -> Iterator[dict[int, States]]:
    """Outputs of these modules, or their inputs, by index in the list, while one sequence runs through the model."""
    values: dict[int, Tensor] = {}
    thread = get_ident()

    def record(index: int, _: nn.Module, given: tuple[Tensor, ...], output: Any) -> None:
        if get_ident() == thread:  # another thread may run the same model
            value = given if inputs else getattr(output, "last_hidden_state", output)
            values[index] = (value[0] if isinstance(value, tuple) else value)[0]

    # only for this forward: a hook that stayed would keep the values as long as the model lives
    hooks = [module.register_forward_hook(partial(record, index)) for index, module in enumerate(modules)]
    try:
        yield values
    finally:
        for hook in hooks:
            hook.remove()


def device_of(model: PreTrainedModel) -> torch.device:
    """The device that takes token ids, that of the input embeddings."""
    return next(model.get_input_embeddings().parameters()).device


def output_device_of(model: PreTrainedModel) -> torch.device:
    """The device that takes final hidden states, that of the LM head; of a model without one, that of its ids."""
    head = model.get_output_embeddings()
    return device_of(model) if head is None else next(head.parameters()).device


def num_logits_of(model: PreTrainedModel) -> int:
    """Number of ids that a model has logits for, padding included."""
    return int(model.config.get_text_config().vocab_size)


def eos_ids_of(config: object) -> frozenset[int]:
    """The end-of-sequence ids of a config or a tokenizer: several (a list, a tuple, a tensor), one, or none."""
    ids = getattr(config, "eos_token_id", None)
    return frozenset(() if ids is None else torch.as_tensor(ids).flatten().tolist())


def refuse_training(model: nn.Module) -> None:
    """Raise ValueError if any part of the model is in train mode, unless it computes the same there."""
    if any(module.training and not isinstance(module, nn.Linear | nn.Embedding) for module in model.modules()):
        name = " ".join(filter(None, (type(model).__name__, getattr(model, "name_or_path", ""))))
        raise ValueError(f"{name} is in train mode, in which dropout changes its logits; call .eval() on it first")


@torch.inference_mode()
def hidden_states(
    model: PreTrainedModel, rows: Sequence[Sequence[int]], starts: Sequence[int], *, layer: int | None = None
) -> States:
    """Final hidden states (after the final norm, as the LM head reads them) of one batch, without padding: those of
    rows[0][starts[0]:], then those of rows[1][starts[1]:], and so on; with `layer` those after that many layers.

    Sequences on either side of a RoPE switch have their own forward; one that crosses it raises ValueError (`lm.rope`).
    """
    remedy = "lower data.max_prompt_tokens or the limit of new tokens, so that prompt and answer together stay below"
    sides: dict[bool, list[int]] = {}
    for index, (row, start) in enumerate(zip(rows, starts, strict=True)):
        subject = f"a sequence of {len(row)} tokens, of which {len(row) - start} are looked at, is read at once"
        is_long = refuse_crossing(model, start + 1, len(row), subject=subject, remedy=remedy)
        sides.setdefault(is_long, []).append(index)
    states: dict[int, Tensor] = {}
    for side in sides.values():
        width = max(len(rows[index]) for index in side)
        # A causal model cannot see padding on the right, so no mask is needed. But attention multiplies hidden
        # states that it does not see by 0, and 0 * NaN is NaN: a row is padded with an id of its own, not of
        # another row.
        padded = [[*rows[index], *[rows[index][0]] * (width - len(rows[index]))] for index in side]
        ids = torch.tensor(padded, device=device_of(model))
        outputs = body_of(model)(input_ids=ids, use_cache=False, output_hidden_states=layer is not None)
        hidden = outputs.last_hidden_state if layer is None else outputs.hidden_states[layer]
        states |= {index: row[starts[index] : len(rows[index])] for index, row in zip(side, hidden, strict=True)}
    return torch.cat([states[index] for index in range(len(rows))])


@torch.inference_mode()
def logits_of(model: PreTrainedModel, hidden: States, vocab_size: int) -> Float[Tensor, "token vocab"]:
    """Logits of the tokenizer's ids from final hidden states; ValueError for layers between both (Electra)."""
    head = model.get_output_embeddings()
    if (width := getattr(head, "in_features", hidden.shape[-1])) != hidden.shape[-1]:
        raise ValueError(
            f"{type(model).__name__} has further layers between its hidden states of {hidden.shape[-1]} numbers and "
            f"its output layer, which takes {width}; choose a model of another family"
        )
    logits = head(hidden)[..., :vocab_size]
    # Gemma 2 and its relatives squash their logits after the LM head
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    return logits if cap is None else torch.tanh(logits / cap) * cap


def alike(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Groups of at most `size` sequences that share a forward, longest first, so that running out of memory happens at
    once. Once it holds `_MIN_TOKENS`, a group ends before a sequence that would be padded by more than a fifth.

    Worked example: lengths (3, 5, 4) in groups of 2 give [1, 2] and [0].
    """
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        longest = lengths[groups[-1][0]] if groups else 0
        is_full = not groups or len(groups[-1]) == size
        if is_full or (lengths[index] < _MIN_FILLED * longest and len(groups[-1]) * longest >= _MIN_TOKENS):
            groups.append([])
        groups[-1].append(index)
    return groups


def chunk_rows(vocab_size: int, chunk_mb: int) -> int:
    """Number of positions whose float32 logits fit `chunk_mb`; at least one."""
    return max(1, chunk_mb * 2**20 // (4 * vocab_size))


def chunks(num_tokens: int, size: int) -> Iterator[slice]:
    """Slices of at most `size` positions that cover `num_tokens`."""
    return (slice(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size))


@torch.inference_mode()
def check_outputs(model: PreTrainedModel, vocab_size: int, name: str) -> None:
    """Raise ValueError unless the body takes the cache of responses and `logits_of` gives the model's own logits,
    which are finite after some of a few ids; single ones may be broken (untrained). `name`: the model's role.
    """
    kind = type(model).__name__
    if "past_key_values" not in signature(body_of(model).forward).parameters:
        raise ValueError(
            f"{kind} takes no past_key_values, so responses of several tokens would be wrong; choose a model with "
            "attention"
        )
    ids = [[token] for token in sorted({index * (vocab_size - 1) // 7 for index in range(8)})]
    logits = logits_of(model, hidden_states(model, ids, [0] * len(ids)), vocab_size)
    if non_finite(logits).all():
        raise ValueError(f"the {name} yields NaN or infinite logits for each of {len(ids)} tested ids; {REMEDY}")
    expected = model(input_ids=torch.tensor(ids, device=device_of(model))).logits[:, 0, :vocab_size].to(logits.device)
    if not torch.allclose(logits.float(), expected.float(), rtol=1e-2, atol=1e-2, equal_nan=True):
        raise ValueError(
            f"{kind} changes its logits after the output layer in an unknown way, and probabilities would be wrong; "
            "choose models of another family"
        )

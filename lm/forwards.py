"""Teacher-forced forwards: final hidden states at chosen positions, and logits from them in bounded chunks.

The [positions, vocabulary] matrix never exists as a whole: a forward yields hidden states only (`base_model`), and
callers apply the output layer to so few positions at a time that float32 logits fit a given number of megabytes, with a
vocabulary of 152k as with one of 4k.
"""

from collections.abc import Iterator, Sequence
from inspect import signature
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from configs.schema import ModelSource
from lm.finite import REMEDY, non_finite
from lm.frequencies import frequencies_of, refuse_crossing

_MIN_FILLED = 0.8
"""Least length of a group's shortest sequence, as a share of its longest."""
SHORTER = "lower data.max_prompt_tokens or the limit of new tokens, so that prompt and answer together stay below"
"""The remedy for texts that cross a model's change of frequencies."""
_ENOUGH_TOKENS = 512
"""A forward over fewer tokens costs more than padding does."""
_NUM_PROBES = 8
"""Ids that a model is tried with before it is used."""


def device_of(model: PreTrainedModel) -> torch.device:
    """The device that takes token ids: that of the input embeddings, also in a model that is spread over several
    devices.
    """
    return next(model.get_input_embeddings().parameters()).device


def body_of(model: PreTrainedModel) -> Any:
    """The layers below the output layer: token ids to final hidden states.

    Raises:
        ValueError: the model has none of its own.
    """
    if model.base_model is not model:
        return model.base_model
    # Llama4ForCausalLM names a part of its wrapper as its base model, and is then its own
    body = next((part for part in model.children() if isinstance(part, PreTrainedModel)), None)
    if body is None:
        raise ValueError(
            f"{type(model).__name__} has no layers apart from its output layer, so no final hidden states; load it "
            "with AutoModelForCausalLM"
        )
    return body


def num_logits_of(model: PreTrainedModel) -> int:
    """How many ids a model has logits for, padding included."""
    return int(model.config.get_text_config().vocab_size)


def output_device_of(model: PreTrainedModel) -> torch.device:
    """The device that takes final hidden states: that of the output layer."""
    return torch.device(str(model.get_output_embeddings().weight.device))


@torch.inference_mode()
def hidden_states(
    model: PreTrainedModel, rows: Sequence[Sequence[int]], starts: Sequence[int]
) -> Float[Tensor, "token hidden"]:
    """Final hidden states (after the final norm, as the output layer receives them) of one batch, from `starts` on and
    without padding.

    Args:
        model: a causal language model.
        rows: token ids of each sequence; those on either side of a change of frequencies have a forward each
            (`lm.frequencies`).
        starts: the first position of each sequence whose state is wanted; the result has those of rows[0][starts[0]:],
            then those of rows[1][starts[1]:], and so on.

    Raises:
        ValueError: a sequence with wanted states on both sides of a change of frequencies.
    """
    frequencies = frequencies_of(model)
    if frequencies is None:
        return torch.cat(_hidden_states(model, rows, starts))
    parts: dict[int, Tensor] = {}
    for is_far in (False, True):
        places = [place for place, row in enumerate(rows) if (len(row) > frequencies.bound) == is_far]
        for place in places:
            length = len(rows[place])
            subject = f"a sequence of {length} tokens, of which {length - starts[place]} are looked at, is read at once"
            refuse_crossing(model, starts[place] + 1, length, subject=subject, remedy=SHORTER)
        if places:
            states = _hidden_states(model, [rows[place] for place in places], [starts[place] for place in places])
            parts |= dict(zip(places, states, strict=True))
    return torch.cat([parts[place] for place in range(len(rows))])


def _hidden_states(
    model: PreTrainedModel, rows: Sequence[Sequence[int]], starts: Sequence[int]
) -> list[Float[Tensor, "token hidden"]]:
    """Final hidden states of each sequence, in one forward."""
    width = max(map(len, rows))
    # Padding stands on the right, where a causal model cannot see it: no mask is needed, and any id of finite states
    # will do. Attention multiplies the hidden states of what it does not see by 0, and 0 * NaN is NaN: so a row is
    # padded with an id that it has, not with one of another row.
    ids = torch.tensor([list(row) + [row[0]] * (width - len(row)) for row in rows], device=device_of(model))
    hidden = body_of(model)(input_ids=ids, use_cache=False).last_hidden_state
    return [hidden[index, start : len(row)] for index, (row, start) in enumerate(zip(rows, starts, strict=True))]


@torch.inference_mode()
def logits_of(
    model: PreTrainedModel, hidden: Float[Tensor, "token hidden"], vocab_size: int
) -> Float[Tensor, "token vocab"]:
    """Logits of the tokenizer's ids from final hidden states.

    Raises:
        ValueError: further layers stand between both (Electra).
    """
    head = model.get_output_embeddings()
    if (width := getattr(head, "in_features", hidden.shape[-1])) != hidden.shape[-1]:
        raise ValueError(
            f"{type(model).__name__} has further layers between its hidden states of {hidden.shape[-1]} numbers and "
            f"its output layer, which takes {width}; choose a model of another family"
        )
    logits = head(hidden)[..., :vocab_size]
    # Gemma 2 and its kin squash their logits after the output layer.
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    return logits if cap is None else torch.tanh(logits / cap) * cap


def alike(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Groups of at most `size` sequences that share a forward, longest first, so that a lack of memory shows at once.

    A group ends before a sequence that would be padded by more than a fifth, once it holds `_ENOUGH_TOKENS`: fewer do
    not fill a processor.

    Worked example: lengths (3, 5, 4) in groups of 2 give [1, 2] and [0].
    """
    groups: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lambda place: (-lengths[place], place)):
        longest = lengths[groups[-1][0]] if groups else 0
        is_full = not groups or len(groups[-1]) == size
        if is_full or (lengths[place] < _MIN_FILLED * longest and len(groups[-1]) * longest >= _ENOUGH_TOKENS):
            groups.append([])
        groups[-1].append(place)
    return groups


def chunk_rows(vocab_size: int, chunk_mb: int) -> int:
    """The number of positions whose float32 logits fit `chunk_mb`; at least one."""
    return max(1, chunk_mb * 2**20 // (4 * vocab_size))


def chunks(num_tokens: int, size: int) -> Iterator[slice]:
    """Slices of at most `size` positions that cover `num_tokens`."""
    return (slice(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size))


def refuse_offloaded(model: PreTrainedModel, source: ModelSource) -> None:
    """Raise ValueError where accelerate has offloaded the output layer or the embeddings, whose weights are read
    directly.
    """
    layers = {"output layer": model.get_output_embeddings(), "input embeddings": model.get_input_embeddings()}
    for part, layer in layers.items():
        weight = getattr(layer, "weight", None)
        if weight is not None and weight.device.type == "meta":
            raise ValueError(
                f"the weight of the {part} of {source.path} found no room and was offloaded (device_map "
                f"{source.device_map!r}; it is on meta), and every position needs it; give it a device of its own in "
                "device_map, free memory, or choose a smaller dtype"
            )


def check_numbers(model: PreTrainedModel, vocab_size: int, name: str) -> None:
    """Raise ValueError if the model yields numbers for none of some ids; single ids may be broken (untrained,
    overflowing).
    """
    ids = sorted({place * (vocab_size - 1) // (_NUM_PROBES - 1) for place in range(_NUM_PROBES)})
    if non_finite(logits_of(model, hidden_states(model, [[token] for token in ids], [0] * len(ids)), vocab_size)).all():
        raise ValueError(
            f"the {name} yields NaN or infinite logits for each of {len(ids)} ids that it was tried with; {REMEDY}"
        )


def check_output_layer(model: PreTrainedModel, vocab_size: int) -> None:
    """Raise ValueError unless `logits_of` gives what the model itself gives (some families scale their logits after the
    output layer), and the body takes the cache that responses are made with.
    """
    if "past_key_values" not in signature(body_of(model).forward).parameters:
        raise ValueError(
            f"{type(model).__name__} takes no past_key_values, so responses of several tokens would be wrong; choose "
            "a model with attention"
        )
    probe = [[0, min(1, vocab_size - 1), 0]]
    hidden = hidden_states(model, probe, [0])
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor(probe, device=hidden.device)).logits[0, :, :vocab_size]
    logits = logits_of(model, hidden, vocab_size).to(expected.device)
    if not torch.allclose(logits.float(), expected.float(), rtol=1e-2, atol=1e-2, equal_nan=True):
        raise ValueError(
            f"{type(model).__name__} changes its logits after the output layer in a way that is not known here, and "
            "probabilities would be wrong; choose models of another family"
        )

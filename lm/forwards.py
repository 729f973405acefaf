"""Teacher-forced forwards: final hidden states at chosen positions, and logits from them in bounded chunks.

The [positions, vocabulary] matrix is never whole: a forward yields hidden states only (`base_model`), and the output layer is applied to a
few thousand positions at a time, so that float32 logits stay under `chunk_mb` for a vocabulary of 152k as for one of 4k. Rows are padded on
the right, where a causal model cannot see the padding, so no mask is needed.
"""

from collections.abc import Iterator, Sequence
from inspect import signature

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel


def device_of(model: PreTrainedModel) -> torch.device:
    """Where token ids go in: the device of the input embeddings, also of a model that is spread over several."""
    return torch.device(str(model.get_input_embeddings().weight.device))


def output_device_of(model: PreTrainedModel) -> torch.device:
    """Where final hidden states come out: the device of the output layer."""
    return torch.device(str(model.get_output_embeddings().weight.device))


@torch.inference_mode()
def hidden_states(model: PreTrainedModel, rows: Sequence[Sequence[int]], starts: Sequence[int]) -> Float[Tensor, "token hidden"]:
    """Final hidden states (after the final norm, as the output layer receives them) of one batch, padding and prompts cut away.

    Args:
        rows: token ids of each sequence.
        starts: the first position that is wanted of each; result rows are rows[0][starts[0]:], rows[1][starts[1]:], … one after the other.
    """
    width = max(map(len, rows))
    ids = torch.tensor([list(row) + [0] * (width - len(row)) for row in rows], device=device_of(model))
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    return torch.cat([hidden[index, start : len(row)] for index, (row, start) in enumerate(zip(rows, starts, strict=True))])


@torch.inference_mode()
def logits_of(model: PreTrainedModel, hidden: Float[Tensor, "token hidden"], vocab_size: int) -> Float[Tensor, "token vocab"]:
    """What the model's output layer makes of final hidden states, cut to the tokenizer's ids."""
    logits = model.get_output_embeddings()(hidden)[..., :vocab_size]
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    return logits if cap is None else torch.tanh(logits / cap) * cap


def chunk_rows(vocab_size: int, chunk_mb: int) -> int:
    """Positions whose float32 logits fit `chunk_mb`; at least one."""
    return max(1, chunk_mb * 2**20 // (4 * vocab_size))


def chunks(num_tokens: int, size: int) -> Iterator[slice]:
    """Slices of at most `size` that cover num_tokens."""
    return (slice(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size))


def check_output_layer(model: PreTrainedModel, vocab_size: int) -> None:
    """Raise ValueError unless `logits_of` gives what the model itself gives (some families scale their logits after the output layer), and
    the body takes the cache that responses are made with.
    """
    if "past_key_values" not in signature(model.base_model.forward).parameters:
        raise ValueError(
            f"{type(model).__name__} takes no past_key_values, so responses of several tokens would be wrong; choose a model with attention"
        )
    probe = [[0, min(1, vocab_size - 1), 0]]
    hidden = hidden_states(model, probe, [0])
    with torch.inference_mode():
        whole = model(input_ids=torch.tensor(probe, device=hidden.device)).logits[0, :, :vocab_size]
    ours = logits_of(model, hidden, vocab_size).to(whole.device)
    if not torch.allclose(ours.float(), whole.float(), rtol=1e-2, atol=1e-2, equal_nan=True):
        raise ValueError(
            f"{type(model).__name__} changes its logits after the output layer in a way that is not known here; labels would be wrong, so "
            "this family is refused"
        )

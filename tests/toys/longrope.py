"""Tiny random models whose rotary frequencies change at 16 tokens (`lm.rope`), and what plain `generate` says."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.conformance.families import Family, build

BOUND = 16
KINDS = ("phi3", "llama")
"""Plain generate reads a text of the first again at the bound."""
_ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0, 6.0, 8.0, 16.0]}
_SMALL: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
_EXTRA: dict[str, dict[str, Any]] = {"phi3": {"original_max_position_embeddings": BOUND}, "llama": {}}


@cache
def model_of(kind: str, seed: int = 0, noise: float = 0.0) -> PreTrainedModel:
    """A model in float64; `noise` on the weights makes a draft of the model with the same seed."""
    rope = _ROPE | {"original_max_position_embeddings": BOUND}
    model = build(Family(kind, "full", _SMALL | _EXTRA[kind] | {"rope_parameters": rope}), seed)
    generator = torch.Generator().manual_seed(seed + 1)
    for parameter in model.parameters():
        parameter.data += noise * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


def text_of(length: int, seed: int = 0) -> list[int]:
    """Random tokens, none of them special."""
    return torch.randint(3, 40, (length,), generator=torch.Generator().manual_seed(100 * seed + length)).tolist()


def said_by_generate(model: PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """Plain generate's logits after the prompt, and after each of `tokens`, which it is made to say."""
    said = [*tokens, 0]
    forced = lambda _, ids: [said[len(ids) - len(prompt)]]  # noqa: E731
    how: dict[str, Any] = {"max_new_tokens": len(said), "do_sample": False}
    how |= {"output_logits": True, "return_dict_in_generate": True}
    return torch.cat(model.generate(torch.tensor([list(prompt)]), prefix_allowed_tokens_fn=forced, **how).logits)

"""Which tokens end a text."""

import torch
from transformers import GenerationConfig, PretrainedConfig


def eos_ids_of(config: GenerationConfig | PretrainedConfig | None) -> frozenset[int]:
    """The end-of-sequence ids of a generation config, or of a model's; there may be several (a list, a tuple, a
    tensor), one, or none.
    """
    ids = getattr(config, "eos_token_id", None)
    return frozenset(() if ids is None else torch.as_tensor(ids).flatten().tolist())

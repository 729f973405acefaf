"""The check that a model's logits are numbers."""

import torch
from jaxtyping import Bool
from torch import Tensor

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
REMEDY = "load it as float32 or bfloat16, or check its weights"


class NonFiniteError(ValueError):
    """A model yields logits that are no numbers."""


def non_finite(values: Tensor) -> Bool[Tensor, "..."]:
    """True for rows of logits [..., vocab] with a NaN, a +inf, or nothing but -inf; some -inf are impossible tokens."""
    return ~values.amax(-1).isfinite()  # NaN if any entry is NaN, so one number per row tells all three cases


def refuse_non_finite(values: Tensor, whose: str, where: str) -> None:
    """Raise NonFiniteError, a ValueError, if any row of logits [..., vocab] is `non_finite`.

    Args:
        values: the logits.
        whose: the model, for the message.
        where: what the model was doing, for the message.
    """
    if non_finite(values).any():
        kind = "NaN" if values.amax(-1).isnan().any() else "infinite"
        raise NonFiniteError(f"{whose} yields {kind} logits {where}; {REMEDY}")

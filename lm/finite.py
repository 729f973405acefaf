"""The check that a model's logits are numbers."""

from torch import Tensor


def refuse_non_finite(values: Tensor, whose: str, where: str) -> None:
    """Raise ValueError if any row of logits [..., vocab] has a NaN, a +inf, or nothing but -inf; some -inf mark impossible tokens.

    Args:
        values: the logits.
        whose: the model, for the message.
        where: what it was doing, for the message.
    """
    highest = values.amax(-1)  # NaN if any entry is NaN, so one number per row tells all three cases
    if not highest.isfinite().all():
        kind = "NaN" if highest.isnan().any() else "infinite"
        raise ValueError(f"{whose} yields {kind} logits {where}; load it as float32 or bfloat16, or check its weights")

"""The check that a model's numbers are numbers."""

from torch import Tensor


def refuse_non_finite(values: Tensor, whose: str, where: str) -> None:
    """Raise ValueError if any row of logits [..., vocab] holds a NaN or +inf, or nothing but -inf (-inf alone marks an impossible
    token).
    """
    highest = values.amax(-1)
    if not highest.isfinite().all():
        kind = "NaN" if highest.isnan().any() else "infinite"
        raise ValueError(f"{whose} yields {kind} logits {where}; load it as float32 or bfloat16, or check its weights")

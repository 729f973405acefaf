"""Matrices of feature drafts in 8 bits, each row with a scale of its own: a draft step on a CPU is mostly the reading
of its matrices, which then are half as many bytes as in bfloat16.

W8A16, symmetric, rounded to nearest: w_ij ≈ s_i q_ij with s_i = max_j |w_ij| / 127, in the dtype of the weights, and
q_ij a whole number from -127 to 127. Activations keep their dtype. torchao's `Int8WeightOnlyConfig` (0.18) gives the
same numbers, but on a CPU is slower than bfloat16 (5.5 ms where that takes 3.0); here torch's own kernel is called
where it is the faster: in bfloat16, for the few rows of one sequence's draft. Elsewhere the product is the same and
8 bits save memory alone.
"""

import torch
from jaxtyping import Float, Int8
from torch import Tensor, nn
from torch.nn import functional

_LEVELS = 127
_FEW = 16
"""Rows of input up to which torch's kernel is faster than a product with the matrix put back (9 million weights out of
memory, one core with AMX: one row takes 1.4 ms, four take 1.8, eight 3.0, put back 5.4; in bfloat16 2.8 to 3.0)."""
_LANES = 16
"""torch's kernel reads so many columns at once, and checks for no end: other widths must not reach it."""


class EightBitLinear(nn.Module):
    """The linear layer that it is made from, its matrix in 8 bits, its bias as it was."""

    weight: Int8[Tensor, "output input"]

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        exact, tiny = linear.weight.detach(), torch.finfo(torch.float32).tiny
        scale = exact.abs().amax(1) / _LEVELS
        rounded = (exact.float() / scale.float().clamp_min(tiny)[:, None]).round().clamp(-_LEVELS, _LEVELS)
        self.register_buffer("weight", rounded.to(torch.int8))
        # a parameter, so that the layer has the dtype and the device that others have
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.bias = linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, inputs: Float[Tensor, "*node input"]) -> Float[Tensor, "*node output"]:
        rows = inputs.reshape(-1, inputs.shape[-1])
        is_fast = inputs.device.type == "cpu" and inputs.dtype == torch.bfloat16 and len(rows) <= _FEW
        if is_fast and self.in_features % _LANES == 0:
            product = torch._weight_int8pack_mm(rows.contiguous(), self.weight, self.scale)
        else:
            product = functional.linear(rows, self.weight.to(inputs.dtype)) * self.scale
        outputs = product.unflatten(0, inputs.shape[:-1]) if inputs.ndim > 1 else product[0]
        return outputs if self.bias is None else outputs + self.bias


def to_eight_bits(draft: nn.Module) -> None:
    """Put every linear layer of a draft that has been bound to its target in 8 bits, in place; what it borrows stays
    as it is, as do embeddings and norms.
    """
    for module in list(draft.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, EightBitLinear(child))

"""8-bit matrices for feature drafts: a draft step on a CPU mostly reads matrices, which are then half the size of
bfloat16's.

W8A16, symmetric, rounded to nearest, with a scale per row: w_ij ≈ s_i q_ij with s_i = max_j |w_ij| / 127 and q_ij
a whole number from -127 to 127. torchao's `Int8WeightOnlyConfig` (0.18) gives the same numbers, but is slower
than bfloat16 on a CPU (5.5 ms against 3.0). torch's own kernel is called where it is faster: for the few rows of
a draft, in bfloat16 on a CPU. Elsewhere 8 bits only save memory.
"""

import torch
from jaxtyping import Float, Int8
from torch import Tensor, nn
from torch.nn import functional

_LEVELS = 127
# Rows up to which torch's kernel is faster than a product with the restored matrix (9 million weights, one core
# with AMX: one row 1.4 ms, four 1.8, eight 3.0, restored 5.4; bfloat16 2.8 to 3.0).
_MAX_ROWS = 16
# torch's kernel reads so many columns at once and does not check for the end: other widths must not reach it
_LANES = 16


class EightBitLinear(nn.Module):
    """A linear layer with its matrix in 8 bits, and its bias unchanged."""

    weight: Int8[Tensor, "output input"]

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        exact = linear.weight.detach()
        tiny = torch.finfo(torch.float32).tiny
        scale = exact.abs().amax(1) / _LEVELS
        rounded = (exact.float() / scale.float().clamp_min(tiny)[:, None]).round().clamp(-_LEVELS, _LEVELS)
        self.register_buffer("weight", rounded.to(torch.int8))
        # a parameter, so that the layer has a dtype and a device
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.bias = linear.bias
        self.in_features = linear.in_features

    def forward(self, inputs: Float[Tensor, "*node input"]) -> Float[Tensor, "*node output"]:
        rows = inputs.reshape(-1, inputs.shape[-1])
        is_fast = inputs.device.type == "cpu" and inputs.dtype == torch.bfloat16 and len(rows) <= _MAX_ROWS
        if is_fast and self.in_features % _LANES == 0:
            product = torch._weight_int8pack_mm(rows.contiguous(), self.weight, self.scale)
        else:
            product = functional.linear(rows, self.weight.to(inputs.dtype)) * self.scale
        outputs = product.unflatten(0, inputs.shape[:-1]) if inputs.ndim > 1 else product[0]
        return outputs if self.bias is None else outputs + self.bias


def to_eight_bits(draft: nn.Module) -> None:
    """Replace every linear layer of a bound draft in place; embeddings, norms and what it borrows stay."""
    for name, module in list(draft.named_modules()):
        if isinstance(module, nn.Linear):
            draft.set_submodule(name, EightBitLinear(module))

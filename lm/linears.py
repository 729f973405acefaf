"""Linear layers whose matrices are kept in another form, because a step on a CPU mostly reads matrices.

`EightBitLinear`, for feature drafts: W8A16, symmetric, rounded to nearest, with a scale per row: w_ij ≈ s_i q_ij with
s_i = max_j |w_ij| / 127 and q_ij a whole number from -127 to 127, half the size of bfloat16's. torchao's
`Int8WeightOnlyConfig` (0.18) gives the same numbers, but is slower than bfloat16 on a CPU (5.5 ms against 3.0). torch's
own kernel is called where it is faster: for the few rows of a draft, in bfloat16 on a CPU. Elsewhere 8 bits only save
memory.

`PackedLinear`, for CPUs that lack bfloat16 arithmetic (AVX2): float32 in the order in which oneDNN multiplies.
There torch leaves float32 products to MKL, for which four rows take 3.5 times as long as one (Qwen2.5-Coder 1.5B,
two cores), so that verifying costs more than drafting saves. oneDNN takes 1.2 times as long, but only if it need
not sort the matrix first. torch's compiler packs matrices by the same operators.
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
_PACKED_FOR = 4  # rows for which oneDNN chooses the order; any number may be multiplied


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


class PackedLinear(nn.Module):
    """A linear layer in float32 on a CPU, with its matrix in oneDNN's order and its bias unchanged."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _PACKED_FOR)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = linear.bias

    def forward(self, inputs: Float[Tensor, "*node input"]) -> Float[Tensor, "*node output"]:
        outputs: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, self.weight, self.bias, "none", [], "")
        return outputs


def replace_linears(model: nn.Module, kind: type[nn.Module]) -> None:
    """Replace every linear layer of a model by a class of this module; what it borrows stays."""
    names = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    for name in names:  # one after another, which needs memory for one matrix more
        model.set_submodule(name, kind(model.get_submodule(name)).eval())


def pack(model: nn.Module, path: str) -> None:
    """Pack every linear layer; ValueError for a model that is not in float32 on a CPU."""
    some = next(model.parameters())
    is_quantised = hasattr(model, "hf_quantizer") or not any(type(module) is nn.Linear for module in model.modules())
    if some.dtype != torch.float32 or some.device.type != "cpu" or is_quantised:
        raise ValueError(
            f"packed is set for {path}, which is in {some.dtype} on {some.device}, and is for float32 on a CPU; "
            "set dtype: float32 and device_map: cpu without quantization, or leave packed out"
        )
    replace_linears(model, PackedLinear)

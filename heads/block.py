"""One residual block of many heads, h + SiLU(h W^T + b), with its gradients written out.

    z = h W^T + b        forward: one batched product
    g_z = g SiLU'(z)     backward: g_h = g + g_z W, g_W = g_z^T h, g_b = sum of g_z over tokens

Autograd would do the same with more passes over memory, and these heads are so narrow that the passes cost as much as the products. Here
the addition of g rides on the product (`baddbmm`), the addition of h on SiLU's output buffer, and only z is kept beside h.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812


def residual_block(
    stream: Float[Tensor, "heads tokens hidden"], weight: Float[Tensor, "heads hidden hidden"], bias: Float[Tensor, "heads hidden"]
) -> Float[Tensor, "heads tokens hidden"]:
    """stream + SiLU(stream W^T + b), per head."""
    if torch.is_autocast_enabled(stream.device.type):
        return stream + F.silu(torch.baddbmm(bias[:, None], stream, weight.mT))
    return _ResidualBlock.apply(stream, weight, bias)


class _ResidualBlock(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stream: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        z = torch.baddbmm(bias[:, None], stream, weight.mT)
        ctx.save_for_backward(stream, weight, z)
        return F.silu(z).add_(stream)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        stream, weight, z = ctx.saved_tensors
        grad_z = torch.ops.aten.silu_backward(grad, z)
        grad_stream = torch.baddbmm(grad, grad_z, weight) if ctx.needs_input_grad[0] else None
        return grad_stream, grad_z.mT @ stream, grad_z.sum(1)

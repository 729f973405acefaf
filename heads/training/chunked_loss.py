"""Loss and gradients of a stack over chunks of tokens.

These heads are narrow: what lies between their matrix products (bias, SiLU, additions, the loss) is a few passes over
[heads, tokens, hidden], and over a whole batch each pass goes to main memory and back and costs as much as a product.
So tokens are taken in chunks whose activations stay in a core's cache; autograd runs over each chunk at once, and only
the sums of the parameters' gradients outlive it. Memory does not grow with the batch.
`tests/heads/training/test_sweep.py` holds loss and gradients to those of the whole batch.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from heads.model.architectures import Architecture
from heads.model.formula import Dropout, stack_forward
from heads.training.loss import Targets, weighted_bce

CHUNK_BYTES = 512 * 1024
"""Bytes of one [heads, chunk, hidden] float32 tensor; a block keeps a few of them."""
_GPU_CHUNK_BYTES = 64 * 1024 * 1024
"""The same on a GPU, which wants few large kernels where a core wants what its cache holds."""
LEAST_CHUNK = 256
"""Tokens. The weights of a wide block outgrow the cache and are read anew for each chunk: one of 32 takes 1.7 times as
long at width 384, 1.4 at 1,024 and at 4,096; beyond 256 little changes."""


def stack_loss(
    weights: Mapping[str, Tensor],
    hidden: Float[Tensor, "tokens hidden"],
    *,
    inputs: Float[Tensor, "tokens input"] | None,
    targets: Targets,
    dropout: Dropout | None,
    architecture: Architecture,
) -> Float[Tensor, " heads"]:
    """The loss of each head of a stack, differentiable in its weights alone.

    Args:
        weights: by name, as `heads.model.formula` takes them.
        inputs: scalars (standardised) and embedding side by side, or None.
        dropout: its masks are drawn chunk by chunk.
    """
    names, count = tuple(weights), len(weights["out.bias"])
    size = _chunk_size(count, hidden)

    def loss_of(values: Sequence[Tensor], start: int) -> Float[Tensor, " heads"]:
        part = slice(start, start + size)
        stream = hidden[part].expand(count, -1, -1)
        x = None if inputs is None else inputs[part].expand(count, -1, -1)
        logit = stack_forward(dict(zip(names, values, strict=True)), stream, x, dropout, architecture=architecture)
        return weighted_bce(logit, targets.at(part))

    return _ChunkedLoss.apply(loss_of, range(0, len(hidden), size), *weights.values())


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss_of: Callable[[Sequence[Tensor], int], Tensor], starts: range, *given: Tensor) -> Tensor:
        values = [value.detach().requires_grad_() for value in given]
        grads = [torch.zeros_like(value) for value in given]
        loss = given[0].new_zeros(len(given[0]))
        for start in starts:
            with torch.enable_grad():
                of_chunk = loss_of(values, start)
                of_values = torch.autograd.grad(of_chunk.sum(), values)
            for total, grad in zip(grads, of_values, strict=True):
                total.add_(grad)
            loss += of_chunk.detach()
        ctx.save_for_backward(*grads)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *(g * grad.view(-1, *[1] * (g.dim() - 1)) for g in ctx.saved_tensors))


def _chunk_size(count: int, hidden: Tensor) -> int:
    """Number of tokens in a chunk."""
    num_bytes = CHUNK_BYTES if hidden.device.type == "cpu" else _GPU_CHUNK_BYTES
    return max(LEAST_CHUNK, num_bytes // (4 * count * hidden.shape[1]))

"""Loss and gradients of a stack over chunks of tokens.

Heads are narrow, so the elementwise passes over [heads, tokens, hidden] between their matrix products are limited by
memory bandwidth: over a whole batch each costs as much as a product. Chunks keep the activations in a core's cache.
Autograd runs on each chunk, and only the sums of the gradients are kept, so memory does not grow with the batch.
`tests/heads/training/test_sweep.py` compares loss and gradients with those of the whole batch.
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
"""Bytes of one [heads, chunk, hidden] float32 tensor; a block needs a few of them."""
_GPU_CHUNK_BYTES = 64 * 1024 * 1024
"""The same on a GPU, where few large kernels are faster."""
LEAST_CHUNK = 256
"""Minimum tokens per chunk. Weights of wide blocks exceed the cache and are read once per chunk: chunks of 32 tokens
take 1.7 times as long at width 384, and 1.4 times at 1,024 and 4,096; larger chunks than 256 hardly help."""


def stack_loss(
    weights: Mapping[str, Tensor],
    hidden: Float[Tensor, "tokens hidden"],
    *,
    inputs: Float[Tensor, "tokens input"] | None,
    targets: Targets,
    dropout: Dropout | None,
    architecture: Architecture,
) -> Float[Tensor, " heads"]:
    """The loss of each head of a stack, differentiable only in the weights.

    Args:
        weights: by name, as in `heads.model.formula`.
        inputs: standardised scalars and embedding side by side, or None.
        dropout: generates new masks for each chunk.
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
    def forward(
        ctx: Any, loss_of: Callable[[Sequence[Tensor], int], Tensor], starts: range, *weights: Tensor
    ) -> Tensor:
        values = [weight.detach().requires_grad_() for weight in weights]
        grads = [torch.zeros_like(weight) for weight in weights]
        loss = weights[0].new_zeros(len(weights[0]))
        for start in starts:
            with torch.enable_grad():
                chunk_loss = loss_of(values, start)
                chunk_grads = torch.autograd.grad(chunk_loss.sum(), values)
            for total, grad in zip(grads, chunk_grads, strict=True):
                total.add_(grad)
            loss += chunk_loss.detach()
        ctx.save_for_backward(*grads)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *(g * grad.view(-1, *[1] * (g.dim() - 1)) for g in ctx.saved_tensors))


def _chunk_size(count: int, hidden: Tensor) -> int:
    num_bytes = CHUNK_BYTES if hidden.device.type == "cpu" else _GPU_CHUNK_BYTES
    return max(LEAST_CHUNK, num_bytes // (4 * count * hidden.shape[1]))

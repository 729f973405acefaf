"""The loss of law 4.7 (SpecDec++, arXiv 2405.19715, section 3.3), for many heads at once.

    L = sum_i [w_acc P_i softplus(-f_i) + w_rej (1 - P_i) softplus(f_i)] / sum_i [w_acc P_i + w_rej (1 - P_i)]

Its population optimum is f* = logit(P) - ln(w_rej / w_acc). The denominator is averaged over processes, so that two
processes with half a batch each take the same step as one with the whole batch.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812

CHUNK_BYTES = 2 * 1024 * 1024
"""Bytes of one [heads, chunk, hidden] float32 tensor; a block needs a few of them. Steps
of the embedded sweep take 0.83 times as long with 2 or 8 MiB as with 0.5 MiB (1 MiB of cache per core)."""
_GPU_CHUNK_BYTES = 64 * 1024 * 1024
"""The same on a GPU, where few large kernels are faster."""
LEAST_CHUNK = 256
"""Minimum tokens per chunk. Weights of wide blocks exceed the cache and are read once per chunk: chunks of 32 tokens
take 1.4 to 1.7 times as long at widths of 384 to 4,096; larger chunks than 256 hardly help."""


class Targets(NamedTuple):
    """The loss's arguments besides the logits."""

    accepted: Float[Tensor, " tokens"]
    """P in [0, 1], shared by all heads."""
    reject_weight: Float[Tensor, " heads"]
    mass: Float[Tensor, " heads"]
    """The denominator, averaged over processes."""

    @classmethod
    def of(cls, label: Float[Tensor, " tokens"], reject_weight: Float[Tensor, " heads"]) -> "Targets":
        """Targets of a batch, with its own denominator."""
        return cls(label, reject_weight, mass=label.sum() + reject_weight * (1 - label).sum())

    def weighted(self) -> Float[Tensor, "heads tokens"]:
        """P + w_rej (1 - P) of each head."""
        return self.accepted + self.reject_weight[:, None] * (1 - self.accepted)

    def at(self, part: slice) -> "Targets":
        """Targets of some tokens, with the denominator of all."""
        return self._replace(accepted=self.accepted[part])


def weighted_bce(logit: Float[Tensor, "heads tokens"], targets: Targets) -> Float[Tensor, " heads"]:
    """L of each head, as a softplus(f) - b f, since softplus(-f) = softplus(f) - f."""
    logit = logit.float()
    total = targets.weighted()
    mass = targets.mass.clamp_min(torch.finfo(torch.float32).tiny)
    return (total * F.softplus(logit) - targets.accepted * logit).sum(-1) / mass


def chunks_of(hidden: Float[Tensor, "tokens hidden"], *, num_heads: int) -> list[slice]:
    """Chunks of the tokens of a batch.

    Heads are narrow, so the elementwise passes between their matrix products are limited by memory bandwidth: over a
    whole batch each costs as much as a product. Chunks keep the activations in a core's cache.
    """
    num_bytes = CHUNK_BYTES if hidden.device.type == "cpu" else _GPU_CHUNK_BYTES
    size = max(LEAST_CHUNK, num_bytes // (4 * num_heads * hidden.shape[1]))
    return [slice(start, start + size) for start in range(0, len(hidden), size)]


@contextmanager
def tf32_products(device: torch.device) -> Iterator[None]:
    """Multiply float32 matrices of a GPU in TF32, with 10 bits of mantissa instead of 23, while the block runs, if the
    GPU has it. The precision that a program has chosen itself (torch.set_float32_matmul_precision) stays.
    """
    before = torch.get_float32_matmul_precision()
    if device.type == "cuda" and before == "highest":
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class ChunkedLoss(torch.autograd.Function):
    """`ChunkedLoss.apply(loss_of, chunks, *weights)`: the sum of loss_of(weights, chunk) over all chunks, [heads].

    Autograd runs on each chunk, and only the sums of the gradients are kept, so memory does not grow with the batch.
    """

    @staticmethod
    def forward(
        ctx: Any, loss_of: Callable[[Sequence[Tensor], slice], Tensor], chunks: Sequence[slice], *weights: Tensor
    ) -> Tensor:
        values = [weight.detach().requires_grad_() for weight in weights]
        loss = weights[0].new_zeros(len(weights[0]))
        for chunk in chunks:
            with torch.enable_grad():
                chunk_loss = loss_of(values, chunk)
                chunk_loss.sum().backward()
            loss += chunk_loss.detach()
        ctx.save_for_backward(*(value.grad if value.grad is not None else torch.zeros_like(value) for value in values))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *(g * grad.view(-1, *[1] * (g.dim() - 1)) for g in ctx.saved_tensors))

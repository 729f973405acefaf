"""Loss and gradients of a stack in one pass over chunks of tokens.

These heads are narrow: what lies between their matrix products (bias, SiLU, additions, the loss) is a few passes over
[heads, tokens, hidden], and over a whole batch each pass goes to main memory and back and costs as much as a product.
So tokens are taken in chunks whose activations stay in a core's cache, in buffers that are used again and again;
forward, loss and backward of a chunk follow each other, and only the sums of the parameters' gradients outlive it.
Memory does not grow with the batch.

    forward   z_d = h_{d-1} W_d^T + b_d,  h_d = h_{d-1} + SiLU(z_d),  f = w . h_D + b [+ v . x]
    loss      as `heads.training.loss`; df = [(w_acc P + w_rej (1 - P)) sigmoid(f) - w_acc P] / mass
    backward  g = df w;  for d = D … 1: g_z = g SiLU'(z_d), g_W += g_z^T h_{d-1}, g_b += sum g_z, g += g_z W_d
    dropout   h_0 and every SiLU(z_d) times a mask, and so their gradients

The forward is that of `heads.model.formula`, written again because the backward reads every z_d and h_d out of its
buffer. `tests/heads/training/test_sweep.py` holds loss and gradients to autograd's of that formula.
"""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812

from heads.model.architectures import blocks_of
from heads.model.formula import Dropout
from heads.training.loss import Targets

CHUNK_BYTES = 512 * 1024
"""Bytes of one [heads, chunk, hidden] float32 buffer; a block keeps two of them."""
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
    dropout: Dropout | None = None,
) -> Float[Tensor, " heads"]:
    """The loss of each head of a stack, differentiable in its weights alone.

    Args:
        weights: by name, as `heads.model.formula` takes them.
        inputs: scalars (standardised) and embedding side by side, or None.
        dropout: its masks are drawn chunk by chunk.
    """
    return _StackLoss.apply(hidden, inputs, targets, dropout, tuple(weights), *weights.values())


class _StackLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, inputs: Tensor | None, targets: Targets, *others: Any) -> Tensor:
        dropout, names, *values = others
        # torch differentiates in arguments that are tensors, not in a dict of them
        weights = dict(zip(names, values, strict=True))
        grads = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        chunk_pass = _ChunkPass(weights, grads, dropout)
        count = len(weights["out.bias"])
        loss = hidden.new_zeros(count)
        size = _chunk_size(count, hidden)
        for start in range(0, len(hidden), size):
            part = slice(start, start + size)
            loss += chunk_pass(hidden[part], None if inputs is None else inputs[part], targets.at(part))
        ctx.save_for_backward(*grads.values())
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, None, None, None, *(g * grad.view(-1, *[1] * (g.dim() - 1)) for g in ctx.saved_tensors))


class _ChunkPass:
    """Forward, loss and backward of one chunk; gradients are added to `grads`, buffers are kept from chunk to chunk."""

    def __init__(self, weights: Mapping[str, Tensor], grads: Mapping[str, Tensor], dropout: Dropout | None) -> None:
        self.weights, self.grads, self.dropout = weights, grads, dropout
        self.count, self.depth = len(weights["out.bias"]), len(blocks_of(weights))
        self.has_mix = "mix.weight" in weights
        self._buffers: dict[tuple[str, int], Tensor] = {}

    def __call__(self, hidden: Tensor, inputs: Tensor | None, targets: Targets) -> Tensor:
        weights, grads = self.weights, self.grads
        x = None if inputs is None else inputs.expand(self.count, *inputs.shape)
        entry = self._entry(hidden, x)
        masks = [self.dropout.mask(entry)] if self.dropout and self.depth else []
        streams, zs = [entry * masks[0] if masks else entry], []
        for d in range(self.depth):
            z = torch.bmm(streams[-1], weights[f"blocks.{d}.weight"].mT, out=self._buffer(f"z{d}", hidden))
            z.add_(weights[f"blocks.{d}.bias"][:, None])
            zs.append(z)
            added = torch.ops.aten.silu.out(z, out=self._buffer(f"h{d}", hidden))
            if self.dropout:
                masks.append(self.dropout.mask(added))
                added.mul_(masks[-1])
            streams.append(added.add_(streams[-1]))
        logit = torch.bmm(weights["out.weight"], streams[-1].mT).squeeze(1) + weights["out.bias"]
        if x is not None:
            logit += torch.bmm(weights["skip.weight"], x.mT).squeeze(1)
        loss, slope = _loss_and_slope(logit, targets)
        grads["out.weight"].baddbmm_(slope[:, None], streams[-1])
        grads["out.bias"].add_(slope.sum(1, keepdim=True))
        grad = torch.mul(slope[..., None], weights["out.weight"], out=self._buffer("grad", hidden))
        for d in reversed(range(self.depth)):
            # z_d has served: its buffer takes its gradient
            grad_added = grad * masks[d + 1] if masks else grad
            grad_z = torch.ops.aten.silu_backward.grad_input(grad_added, zs[d], grad_input=zs[d])
            grads[f"blocks.{d}.weight"].baddbmm_(grad_z.mT, streams[d])
            grads[f"blocks.{d}.bias"].add_(grad_z.sum(1))
            if d or self.has_mix:  # nobody asks for the gradient of the hidden state itself
                grad.baddbmm_(grad_z, weights[f"blocks.{d}.weight"])
        if x is not None:
            grads["skip.weight"].baddbmm_(slope[:, None], x)
            if self.has_mix:
                if masks:
                    grad.mul_(masks[0])
                grads["mix.weight"].baddbmm_(grad.mT, x)
                grads["mix.bias"].add_(grad.sum(1))
        return loss

    def _entry(self, hidden: Tensor, x: Tensor | None) -> Tensor:
        """h_0, the stream before the first block."""
        if x is None or not self.has_mix:
            return hidden.expand(self.count, *hidden.shape)
        weight, bias = self.weights["mix.weight"], self.weights["mix.bias"]
        return torch.baddbmm(bias[:, None], x, weight.mT, out=self._buffer("mixed", hidden)).add_(hidden)

    def _buffer(self, name: str, hidden: Tensor) -> Tensor:
        """[heads, chunk, hidden], the same memory for the same name."""
        key = (name, len(hidden))
        if key not in self._buffers:
            self._buffers[key] = hidden.new_empty(self.count, *hidden.shape)
        return self._buffers[key]


def _chunk_size(count: int, hidden: Tensor) -> int:
    """Number of tokens in a chunk."""
    num_bytes = CHUNK_BYTES if hidden.device.type == "cpu" else _GPU_CHUNK_BYTES
    return max(LEAST_CHUNK, num_bytes // (4 * count * hidden.shape[1]))


def _loss_and_slope(logit: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
    """(part of the loss, d loss / d logit) of a chunk."""
    total, accept = targets.of_logits
    mass = targets.mass[:, None].clamp_min(torch.finfo(torch.float32).tiny)
    loss = ((total * F.softplus(logit) - accept * logit) / mass).sum(1)
    return loss, (total * logit.sigmoid() - accept) / mass

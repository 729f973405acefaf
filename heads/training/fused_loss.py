"""Loss and gradients of a stack in one pass over chunks of tokens.

These heads are narrow: what lies between their matrix products (bias, SiLU, additions, the loss) is a few passes over [heads, tokens,
hidden], and over a whole batch each pass goes to main memory and back and costs as much as a product. So tokens are taken in chunks whose
activations stay in a core's cache, in buffers that are used again and again; forward, loss and backward of a chunk follow each other, and
only the sums of the parameters' gradients outlive it. Memory does not grow with the batch.

    forward   z_d = h_{d-1} W_d^T + b_d,  h_d = h_{d-1} + SiLU(z_d),  f = w . h_D + b [+ v . x]
    loss      as `heads.training.loss`; df = [(w_acc P + w_rej (1 - P)) sigmoid(f) - w_acc P] / mass
    backward  g = df w;  for d = D … 1: g_z = g SiLU'(z_d), g_W += g_z^T h_{d-1}, g_b += sum g_z, g += g_z W_d

`tests/heads/training/test_sweep.py` holds it to autograd's gradients of the same formula.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812

from heads.training.loss import Targets

CHUNK_BYTES = 512 * 1024
"""Of one [heads, chunk, hidden] float32 buffer; a block keeps two of them."""


def stack_loss(
    hidden: Float[Tensor, "tokens hidden"], inputs: Float[Tensor, "tokens input"] | None, targets: Targets, weights: dict[str, Any]
) -> Float[Tensor, " heads"]:
    """The loss of each head of a stack, differentiable in its weights alone.

    Args:
        inputs: scalars (standardised) and embedding side by side, or None.
        weights: `blocks` [(weight, bias), …], `out` (weight, bias), and `mix`, `skip` likewise where there are inputs.
    """
    names = [name for name in ("mix", "skip") if name in weights]
    flat = [tensor for pair in (*weights["blocks"], weights["out"], *(weights[name] for name in names)) for tensor in pair]
    return _StackLoss.apply(hidden, inputs, targets, (len(weights["blocks"]), names), *flat)


class _StackLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, inputs: Tensor | None, targets: Targets, form: tuple[int, list[str]], *flat: Tensor) -> Tensor:
        pairs = [(flat[i], flat[i + 1]) for i in range(0, len(flat), 2)]
        depth, names = form
        blocks, out, more = pairs[:depth], pairs[depth], dict(zip(names, pairs[depth + 1 :], strict=True))
        grads = [torch.zeros_like(tensor) for tensor in flat]
        pass_ = _Pass(blocks, out, more, [(grads[i], grads[i + 1]) for i in range(0, len(grads), 2)])
        loss = hidden.new_zeros(len(out[0]))
        size = max(32, CHUNK_BYTES // (4 * len(out[0]) * hidden.shape[1]))
        for start in range(0, len(hidden), size):
            part = slice(start, start + size)
            loss += pass_(hidden[part], None if inputs is None else inputs[part], targets._replace(label=targets.label[part]))
        ctx.save_for_backward(*grads)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, None, None, *(g * grad.view(-1, *[1] * (g.dim() - 1)) for g in ctx.saved_tensors))


class _Pass:
    """Forward, loss and backward of one chunk; buffers are kept from chunk to chunk."""

    def __init__(
        self, blocks: Sequence[tuple[Tensor, Tensor]], out: tuple[Tensor, Tensor], more: dict[str, tuple[Tensor, Tensor]], grads: list[Any]
    ) -> None:
        self.blocks, self.out, self.more, self.grads = blocks, out, more, grads
        self._buffers: dict[tuple[str, int], Tensor] = {}

    def __call__(self, hidden: Tensor, inputs: Tensor | None, targets: Targets) -> Tensor:
        count, depth = len(self.out[0]), len(self.blocks)
        x = hidden.new_empty(0) if inputs is None else inputs.expand(count, *inputs.shape)
        streams, zs = [hidden.expand(count, *hidden.shape)], []
        if "mix" in self.more:
            weight, bias = self.more["mix"]
            streams[0] = torch.baddbmm(bias[:, None], x, weight.mT, out=self._buffer("mixed", hidden)).add_(hidden)
        for d, (weight, bias) in enumerate(self.blocks):
            z = torch.bmm(streams[-1], weight.mT, out=self._buffer(f"z{d}", hidden)).add_(bias[:, None])
            h = torch.ops.aten.silu.out(z, out=self._buffer(f"h{d}", hidden)).add_(streams[-1])
            zs.append(z)
            streams.append(h)
        logit = torch.bmm(self.out[0], streams[-1].mT).squeeze(1) + self.out[1]
        if "skip" in self.more:
            logit += torch.bmm(self.more["skip"][0], x.mT).squeeze(1) + self.more["skip"][1]
        loss, slope = _loss_and_slope(logit, targets)
        self._output_grads(slope, streams[-1], x)
        grad = torch.mul(slope[..., None], self.out[0], out=self._buffer("grad", hidden))
        for d in reversed(range(depth)):
            grad_z = torch.ops.aten.silu_backward.grad_input(grad, zs[d], grad_input=zs[d])
            self.grads[d][0].baddbmm_(grad_z.mT, streams[d])
            self.grads[d][1].add_(grad_z.sum(1))
            if d or "mix" in self.more:
                grad.baddbmm_(grad_z, self.blocks[d][0])
        if "mix" in self.more:
            place = depth + 1 + list(self.more).index("mix")
            self.grads[place][0].baddbmm_(grad.mT, x)
            self.grads[place][1].add_(grad.sum(1))
        return loss

    def _output_grads(self, slope: Tensor, stream: Tensor, x: Tensor) -> None:
        depth = len(self.blocks)
        places = [(depth, stream)] + ([(depth + 1 + list(self.more).index("skip"), x)] if "skip" in self.more else [])
        for place, read in places:
            self.grads[place][0].baddbmm_(slope[:, None], read)
            self.grads[place][1].add_(slope.sum(1, keepdim=True))

    def _buffer(self, name: str, hidden: Tensor) -> Tensor:
        """[heads, chunk, hidden], the same memory for the same name."""
        key = (name, len(hidden))
        if key not in self._buffers:
            self._buffers[key] = hidden.new_empty(len(self.out[0]), *hidden.shape)
        return self._buffers[key]


def _loss_and_slope(logit: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
    """(part of the loss, d loss / d logit) of a chunk."""
    accept = targets.accept_weight[:, None] * targets.label
    total = accept + targets.reject_weight[:, None] * (1 - targets.label)
    mass = targets.mass[:, None].clamp_min(torch.finfo(torch.float32).tiny)
    loss = ((total * F.softplus(logit) - accept * logit) / mass).sum(1)
    return loss, (total * logit.sigmoid() - accept) / mass

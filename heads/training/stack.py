"""Heads of one shape, stacked: their matrix products run as one batched product per block.

    stream [heads, tokens, hidden], W [heads, hidden, hidden]:   stream <- stream + SiLU(stream W^T + b)

Adam acts on each number by itself and no head's loss sees another head's weights, so a stack trains exactly as its heads would alone, from
the same initial values, up to the rounding of the products (`tests/heads/training/test_sweep.py`: 1e-6). Initial values are drawn per head
from (seed, name of the head), so they do not depend on which other heads are in the grid.

Scalars are standardised here, by the mean and deviation of the training data, to put them on the scale of the hidden state; `head` folds
the standardisation into the exported weights, so that an exported head takes them in nats.
"""

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from heads.grid import HeadSpec, Shape
from heads.model.head import NUM_SCALARS, AcceptanceHead
from heads.model.provenance import Provenance
from heads.training.fused_loss import stack_loss
from heads.training.loss import Targets, weighted_bce


class HeadStack(nn.Module):
    """All reject weights of one shape. Parameters are those of `AcceptanceHead`, with a leading axis and `_` for `.` in their names."""

    scalar_mean: Tensor
    scalar_scale: Tensor
    mix_weight: Tensor
    mix_bias: Tensor
    skip_weight: Tensor
    out_weight: Tensor
    out_bias: Tensor

    def __init__(self, shape: Shape, reject_weights: Sequence[float], *, hidden_size: int, seed: int) -> None:
        super().__init__()
        self.shape, self.hidden_size = shape, hidden_size
        self.specs = [HeadSpec(shape, weight) for weight in reject_weights]
        heads = [_seeded_head(spec, hidden_size, seed) for spec in self.specs]
        for name in heads[0].state_dict():
            stacked = torch.stack([head.state_dict()[name] for head in heads])
            self.register_parameter(name.replace(".", "_"), nn.Parameter(stacked))
        self.register_buffer("scalar_mean", torch.zeros(NUM_SCALARS))
        self.register_buffer("scalar_scale", torch.ones(NUM_SCALARS))

    def forward(
        self,
        hidden: Float[Tensor, "tokens hidden"],
        scalars: Float[Tensor, "tokens scalar"] | None = None,
        embedding: Float[Tensor, "tokens hidden"] | None = None,
    ) -> Float[Tensor, "heads tokens"]:
        """The logit of every head for every token; inputs that the shape does not take are left aside.

        Args:
            hidden: at the shape's timing, float32.
            scalars: (log q(y), H(q)) in nats.
            embedding: of the token.
        """
        stream = hidden.expand(len(self.specs), *hidden.shape)
        inputs = self._inputs(scalars, embedding)
        if inputs is not None and self.shape.depth:
            stream = torch.baddbmm(stream + self.mix_bias[:, None], inputs, self.mix_weight.mT)
        for block in range(self.shape.depth):
            weight, bias = getattr(self, f"blocks_{block}_weight"), getattr(self, f"blocks_{block}_bias")
            stream = stream + F.silu(torch.baddbmm(bias[:, None], stream, weight.mT))
        logit = torch.baddbmm(self.out_bias[:, None], stream, self.out_weight.mT)
        if inputs is not None:
            logit = torch.baddbmm(logit, inputs, self.skip_weight.mT)
        return logit.squeeze(-1)

    def loss(
        self,
        hidden: Float[Tensor, "tokens hidden"],
        scalars: Float[Tensor, "tokens scalar"] | None,
        embedding: Float[Tensor, "tokens hidden"] | None,
        targets: Targets,
    ) -> Float[Tensor, " heads"]:
        """The loss of every head over a batch: `weighted_bce` of `forward`, faster (`heads.training.fused_loss`) unless under autocast."""
        if torch.is_autocast_enabled(hidden.device.type):
            return weighted_bce(self(hidden, scalars, embedding), targets)
        inputs = self._inputs(scalars, embedding)
        blocks = [(getattr(self, f"blocks_{d}_weight"), getattr(self, f"blocks_{d}_bias")) for d in range(self.shape.depth)]
        weights: dict[str, Any] = {"blocks": blocks, "out": (self.out_weight, self.out_bias)}
        if inputs is not None:
            no_bias = torch.zeros_like(self.out_bias)  # the output has one already
            weights |= {"skip": (self.skip_weight, no_bias)} | ({"mix": (self.mix_weight, self.mix_bias)} if blocks else {})
        return stack_loss(hidden, None if inputs is None else inputs[0], targets, weights)

    @torch.no_grad()
    def head(self, index: int, provenance: Provenance | None = None) -> AcceptanceHead:
        """One head of the stack, on its own, with the standardisation of scalars folded into its weights."""
        shape = self.shape
        head = AcceptanceHead(self.hidden_size, shape.depth, shape.timing, shape.scalars, shape.embedding, provenance=provenance)
        own = {name: getattr(self, name.replace(".", "_"))[index].detach().clone() for name in head.state_dict()}
        if shape.scalars:
            self._fold_standardisation(own)
        head.load_state_dict(own, strict=True)
        return head.eval()

    def _fold_standardisation(self, own: dict[str, Tensor]) -> None:
        """Rewrite weights on (s - mean) / scale as weights on s; what is constant goes into the bias of the same sum."""
        for weight, bias in (("mix.weight", "mix.bias"), ("skip.weight", "out.bias")):
            if weight in own:
                own[weight][:, :NUM_SCALARS] /= self.scalar_scale
                own[bias] -= own[weight][:, :NUM_SCALARS] @ self.scalar_mean

    def _inputs(self, scalars: Tensor | None, embedding: Tensor | None) -> Tensor | None:
        """[heads, tokens, inputs] (an expanded view), or None."""
        parts = []
        if self.shape.scalars:
            assert scalars is not None, f"{self.shape} needs scalars"
            parts.append((scalars - self.scalar_mean) / self.scalar_scale)
        if self.shape.embedding:
            assert embedding is not None, f"{self.shape} needs embeddings"
            parts.append(embedding)
        if not parts:
            return None
        inputs = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        return inputs.expand(len(self.specs), *inputs.shape)


def _seeded_head(spec: HeadSpec, hidden_size: int, seed: int) -> AcceptanceHead:
    """A head whose initial values depend on (seed, shape) alone: heads that differ in the reject weight only start alike."""
    shape = spec.shape
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(zlib.crc32(f"{seed}/{shape}".encode()))
        return AcceptanceHead(hidden_size, shape.depth, shape.timing, shape.scalars, shape.embedding)

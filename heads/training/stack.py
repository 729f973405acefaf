"""Heads of one shape, stacked: their matrix products run as one batched product per block.

Adam is elementwise and the losses are independent, so stacked heads train exactly as they would alone, up to rounding.
Initial values depend only on (seed, name of the shape), not on the other heads of the grid.

Scalars are standardised with the mean and standard deviation of the training data. `head` folds this into the exported
weights, so an exported head reads scalars in nats.
"""

import zlib
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from heads.grid import HeadSpec
from heads.model.formula import ARCHITECTURES, Dropout, stack_forward
from heads.model.head import AcceptanceHead, HeadShape, Provenance
from heads.training.loss import ChunkedLoss, Targets, chunks_of, weighted_bce


class HeadStack(nn.Module):
    """All heads of one shape, one per reject weight: parameters of `AcceptanceHead` with a leading axis of heads."""

    scalar_mean: Tensor
    scalar_scale: Tensor

    def __init__(self, shape: HeadShape, reject_weights: Sequence[float], *, hidden_size: int, seed: int) -> None:
        super().__init__()
        self.shape, self.hidden_size = shape, hidden_size
        self.specs = [HeadSpec(shape, weight) for weight in reject_weights]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(zlib.crc32(f"{seed}/{shape}".encode()))
            initial = shape.head(hidden_size).state_dict()
        # torch does not allow a dot in a parameter's name
        self._names = {name: name.replace(".", "_") for name in initial}
        for name, parameter_name in self._names.items():
            self.register_parameter(parameter_name, nn.Parameter(torch.stack([initial[name]] * len(self.specs))))
        # checkpoints have both buffers, of two numbers, even if the heads read no scalars
        num_scalars = len(shape.inputs.scalars) or 2
        self.register_buffer("scalar_mean", torch.zeros(num_scalars))
        self.register_buffer("scalar_scale", torch.ones(num_scalars))

    @property
    def weights(self) -> dict[str, Tensor]:
        """Parameters by their names in `AcceptanceHead.state_dict()`, as in `heads.model.formula`."""
        return {name: self.get_parameter(parameter_name) for name, parameter_name in self._names.items()}

    def forward(
        self,
        hidden: Float[Tensor, "tokens hidden"],
        scalars: Float[Tensor, "tokens scalar"] | None = None,
        embedding: Float[Tensor, "tokens hidden"] | None = None,
        dropout: Dropout | None = None,
    ) -> Float[Tensor, "heads tokens"]:
        """The logit of every head for every token; inputs as in `AcceptanceHead.forward`, float32, scalars in nats."""
        return self._logits(self.weights, self.shape.inputs.taken(hidden), self._inputs(scalars, embedding), dropout)

    def loss(
        self,
        hidden: Float[Tensor, "tokens hidden"],
        scalars: Float[Tensor, "tokens scalar"] | None = None,
        embedding: Float[Tensor, "tokens hidden"] | None = None,
        *,
        targets: Targets,
        dropout: Dropout | None = None,
    ) -> Float[Tensor, " heads"]:
        """The loss of every head over a batch, in chunks except under autocast, whose scaler would come too late."""
        if torch.is_autocast_enabled(hidden.device.type):
            return weighted_bce(self(hidden, scalars, embedding, dropout), targets)
        stream, inputs, weights = self.shape.inputs.taken(hidden), self._inputs(scalars, embedding), self.weights

        def loss_of(values: Sequence[Tensor], chunk: slice) -> Float[Tensor, " heads"]:
            x = None if inputs is None else inputs[chunk]
            logit = self._logits(dict(zip(weights, values, strict=True)), stream[chunk], x, dropout)
            return weighted_bce(logit, targets.at(chunk))

        chunks = chunks_of(stream, num_heads=len(self.specs))
        return ChunkedLoss.apply(loss_of, chunks, *weights.values())  # type: ignore[no-any-return]

    def _logits(
        self, weights: Mapping[str, Tensor], stream: Tensor, inputs: Tensor | None, dropout: Dropout | None
    ) -> Float[Tensor, "heads tokens"]:
        count = len(self.specs)
        x = None if inputs is None else inputs.expand(count, -1, -1)
        architecture = ARCHITECTURES[self.shape.architecture]
        return stack_forward(weights, stream.expand(count, -1, -1), x, dropout, architecture=architecture)

    def dropout(self, rate: float, *step: int) -> Dropout | None:
        """Masks of one step, which depend only on the shape and `step`, so that a resumed run has the same ones."""
        seed = zlib.crc32(f"{self.shape}/{step}".encode())
        return Dropout(rate, torch.Generator(self.scalar_mean.device).manual_seed(seed)) if rate else None

    @torch.no_grad()
    def head(self, index: int, provenance: Provenance | None = None) -> AcceptanceHead:
        """One head of the stack, with the standardisation of scalars folded into its weights."""
        head = self.shape.head(self.hidden_size, provenance)
        weights = {name: weight[index].detach().clone() for name, weight in self.weights.items()}
        count = len(self.shape.inputs.scalars)  # they come first among the inputs
        for weight, bias in (("mix.weight", "mix.bias"), ("skip.weight", "out.bias")) if count else ():
            if weight in weights:
                weights[weight][:, :count] /= self.scalar_scale
                weights[bias] -= weights[weight][:, :count] @ self.scalar_mean
        head.load_state_dict(weights, strict=True)
        return head.eval()

    def _inputs(self, scalars: Tensor | None, embedding: Tensor | None) -> Float[Tensor, "tokens input"] | None:
        standardised = None if scalars is None else (scalars - self.scalar_mean) / self.scalar_scale
        return self.shape.inputs.concatenated(standardised, embedding)

"""Heads of one shape, stacked: their matrix products run as one batched product per block.

Adam acts on each number by itself and no head's loss sees another head's weights, so a stack trains exactly as its
heads would alone, from the same initial values, up to the rounding of the products
(`tests/heads/training/test_sweep.py`: 1e-6). Initial values are drawn per head from (seed, name of the shape), so they
do not depend on which other heads are in the grid.

Scalars are standardised here, by the mean and deviation of the training data, to put them on the scale of the hidden
state; `head` folds the standardisation into the exported weights, so that an exported head takes them in nats.
"""

import zlib
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from heads.grid import HeadShape, HeadSpec
from heads.model.architectures import ARCHITECTURES
from heads.model.formula import Dropout, stack_forward
from heads.model.head import AcceptanceHead
from heads.model.inputs import STANDARD
from heads.model.provenance import Provenance
from heads.training.chunked_loss import stack_loss
from heads.training.loss import Targets, weighted_bce


class HeadStack(nn.Module):
    """All reject weights of one shape. Parameters are those of `AcceptanceHead`, with a leading axis and `_` for `.` in
    their names.
    """

    scalar_mean: Tensor
    scalar_scale: Tensor

    def __init__(self, shape: HeadShape, reject_weights: Sequence[float], *, hidden_size: int, seed: int) -> None:
        super().__init__()
        self.shape, self.hidden_size = shape, hidden_size
        self.specs = [HeadSpec(shape, weight) for weight in reject_weights]
        heads = [_seeded_head(spec, hidden_size, seed) for spec in self.specs]
        # torch takes no dot in a parameter's name
        self._names = {name: name.replace(".", "_") for name in heads[0].state_dict()}
        for name, parameter_name in self._names.items():
            self.register_parameter(
                parameter_name, nn.Parameter(torch.stack([head.state_dict()[name] for head in heads]))
            )
        # checkpoints have both buffers, also of heads that take no scalars
        num_scalars = len(shape.inputs.scalars or STANDARD)
        self.register_buffer("scalar_mean", torch.zeros(num_scalars))
        self.register_buffer("scalar_scale", torch.ones(num_scalars))

    @property
    def weights(self) -> dict[str, Tensor]:
        """Parameters by their names in `AcceptanceHead.state_dict()`, as `heads.model.formula` takes them."""
        return {name: self.get_parameter(parameter_name) for name, parameter_name in self._names.items()}

    def forward(
        self,
        hidden: Float[Tensor, "tokens hidden"],
        scalars: Float[Tensor, "tokens scalar"] | None = None,
        embedding: Float[Tensor, "tokens hidden"] | None = None,
        dropout: Dropout | None = None,
    ) -> Float[Tensor, "heads tokens"]:
        """The logit of every head for every token.

        Args:
            hidden: at the shape's timing, float32.
            scalars: those that the shape takes, in nats.
            embedding: of the token, if the shape takes it.
            dropout: in training; all heads share its masks.
        """
        inputs, count, taken = self._inputs(scalars, embedding), len(self.specs), self.shape.inputs.taken(hidden)
        x = None if inputs is None else inputs.expand(count, *inputs.shape)
        architecture = ARCHITECTURES[self.shape.architecture]
        return stack_forward(self.weights, taken.expand(count, *taken.shape), x, dropout, architecture=architecture)

    def loss(
        self,
        hidden: Float[Tensor, "tokens hidden"],
        scalars: Float[Tensor, "tokens scalar"] | None = None,
        embedding: Float[Tensor, "tokens hidden"] | None = None,
        *,
        targets: Targets,
        dropout: Dropout | None = None,
    ) -> Float[Tensor, " heads"]:
        """The loss of every head over a batch: `weighted_bce` of `forward`, by chunks of tokens unless under autocast,
        whose scaled gradients must not be computed before they are scaled.
        """
        if torch.is_autocast_enabled(hidden.device.type):
            return weighted_bce(self(hidden, scalars, embedding, dropout), targets)
        return stack_loss(
            self.weights,
            self.shape.inputs.taken(hidden),
            inputs=self._inputs(scalars, embedding),
            targets=targets,
            dropout=dropout,
            architecture=ARCHITECTURES[self.shape.architecture],
        )

    def dropout(self, rate: float, *step: int) -> Dropout | None:
        """Masks of one step: what it drops depends on the shape and these numbers alone, so that a resumed run drops
        the same.
        """
        seed = zlib.crc32(f"{self.shape}/{step}".encode())
        return Dropout(rate, torch.Generator(self.scalar_mean.device).manual_seed(seed)) if rate else None

    @torch.no_grad()
    def head(self, index: int, provenance: Provenance | None = None) -> AcceptanceHead:
        """One head of the stack, on its own, with the standardisation of scalars folded into its weights."""
        head = self.shape.head(self.hidden_size, provenance)
        weights = {name: weight[index].detach().clone() for name, weight in self.weights.items()}
        if self.shape.inputs.scalars:
            self._fold_standardisation(weights)
        head.load_state_dict(weights, strict=True)
        return head.eval()

    def _fold_standardisation(self, weights: dict[str, Tensor]) -> None:
        """Rewrite weights on (s - mean) / scale as weights on s; what is constant goes into the bias of the same
        sum.
        """
        of_scalars = slice(len(self.shape.inputs.scalars))  # they come first among the inputs
        for weight, bias in (("mix.weight", "mix.bias"), ("skip.weight", "out.bias")):
            if weight in weights:
                weights[weight][:, of_scalars] /= self.scalar_scale
                weights[bias] -= weights[weight][:, of_scalars] @ self.scalar_mean

    def _inputs(self, scalars: Tensor | None, embedding: Tensor | None) -> Float[Tensor, "tokens input"] | None:
        standardised = None if scalars is None else (scalars - self.scalar_mean) / self.scalar_scale
        return self.shape.inputs.concatenated(standardised, embedding)


def _seeded_head(spec: HeadSpec, hidden_size: int, seed: int) -> AcceptanceHead:
    """A head whose initial values depend on (seed, shape) alone: heads that differ in the reject weight only start
    alike.
    """
    shape = spec.shape
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(zlib.crc32(f"{seed}/{shape}".encode()))
        return shape.head(hidden_size)

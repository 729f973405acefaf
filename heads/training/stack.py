"""Heads of one shape, stacked: their matrix products run as one batched product per block.

Adam is elementwise and the losses are independent, so stacked heads train exactly as they would alone, up to rounding.
Initial values depend only on (seed, name of the shape), not on the other heads of the grid.

Hidden states, scalars and embeddings are standardised per column with means and standard deviations of the training
data; only SpecDec++'s own heads read them as they are. `head` folds this into the exported weights
(`heads.model.formula.folded`), so an exported head reads what it always read.
"""

import zlib
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from heads.batches.features import Batch, of_timing
from heads.grid import HeadSpec
from heads.model.formula import ARCHITECTURES, Architecture, Dropout, Scaling, folded, stack_forward
from heads.model.head import AcceptanceHead, HeadShape, Provenance
from heads.model.inputs import SIGNALS
from heads.training.loss import ChunkedLoss, Targets, chunks_of, weighted_bce


class HeadStack(nn.Module):
    """All heads of one shape, one per reject weight: parameters of `AcceptanceHead` with a leading axis of heads."""

    reject_weights: Tensor

    def __init__(
        self, shape: HeadShape, reject_weights: Sequence[float], dropout: float = 0.0, *, hidden_size: int, seed: int
    ) -> None:
        super().__init__()
        self.shape = shape
        self.hidden_size = hidden_size
        self.specs = [HeadSpec(shape, weight, dropout) for weight in reject_weights]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(zlib.crc32(f"{seed}/{shape}".encode()))
            initial = shape.head(hidden_size).state_dict()
        # torch does not allow a dot in a parameter's name
        self._names = {name: name.replace(".", "_") for name in initial}
        for name, parameter_name in self._names.items():
            self.register_parameter(parameter_name, nn.Parameter(torch.stack([initial[name]] * len(self.specs))))
        self.register_buffer("reject_weights", torch.tensor(reject_weights, dtype=torch.float32), persistent=False)
        num_inputs = shape.inputs.width(hidden_size)
        self.hidden_scaling = Scaling(torch.zeros(hidden_size), torch.ones(hidden_size))
        self.input_scaling = Scaling(torch.zeros(num_inputs), torch.ones(num_inputs))

    def standardise(self, hidden: Scaling, inputs: Scaling) -> None:
        """Set means and deviations: of the hidden state, unless it passes blocks that cannot be folded, and of the
        other inputs. Parameters keep their values, and so read other columns than before.
        """
        if not self.shape.depth or self.architecture.folded:
            self.hidden_scaling.load_state_dict(hidden.state_dict())
        self.input_scaling.load_state_dict(inputs.state_dict())

    @property
    def architecture(self) -> Architecture:
        return ARCHITECTURES[self.shape.architecture]

    @property
    def shift(self) -> Float[Tensor, " heads"]:
        """ln(w_rej / w_acc) of every head, float64."""
        return self.reject_weights.log().double()

    def targets(self, batch: Batch) -> Targets:
        """The targets of the tokens that these heads score."""
        label = of_timing(batch, self.shape.timing).acceptance_prob
        return Targets.of(label, self.reject_weights)

    @property
    def weights(self) -> dict[str, Tensor]:
        """Parameters by their names in `AcceptanceHead.state_dict()`, as in `heads.model.formula`."""
        return {name: self.get_parameter(parameter_name) for name, parameter_name in self._names.items()}

    def forward(
        self,
        hidden: Float[Tensor, "tokens hidden"],
        inputs: Float[Tensor, "tokens input"] | None = None,
        dropout: Dropout | None = None,
    ) -> Float[Tensor, "heads tokens"]:
        """The logit of every head for every token, from what `Inputs.read` returns, float32."""
        stream, x = self.columns(hidden, inputs)
        return self._logits(self._centred(), stream, x, dropout)

    def loss(
        self,
        hidden: Float[Tensor, "tokens hidden"],
        inputs: Float[Tensor, "tokens input"] | None = None,
        *,
        targets: Targets,
        dropout: Dropout | None = None,
    ) -> Float[Tensor, " heads"]:
        """The loss of every head over a batch, in chunks except under autocast, whose scaler would come too late."""
        if torch.is_autocast_enabled(hidden.device.type):
            return weighted_bce(self(hidden, inputs, dropout), targets)
        stream, x = self.columns(hidden, inputs)
        weights = self._centred()

        def loss_of(values: Sequence[Tensor], chunk: slice) -> Float[Tensor, " heads"]:
            part = None if x is None else x[chunk]
            logit = self._logits(dict(zip(weights, values, strict=True)), stream[chunk], part, dropout)
            return weighted_bce(logit, targets.at(chunk))

        chunks = chunks_of(stream, num_heads=len(self.specs))
        return ChunkedLoss.apply(loss_of, chunks, *weights.values())  # type: ignore[no-any-return]

    def columns(
        self, hidden: Tensor, inputs: Tensor | None
    ) -> tuple[Float[Tensor, "tokens hidden"], Float[Tensor, "tokens input"] | None]:
        """The hidden state less its mean, and the other inputs standardised."""
        x = None if inputs is None else (inputs - self.input_scaling.mean) / self.input_scaling.deviation
        return hidden - self.hidden_scaling.mean, x

    @property
    def is_solved(self) -> bool:
        """Whether the heads get their optimum (`heads.training.linear`) instead of steps of Adam."""
        return self.shape.depth == 0 and not self.shape.is_specdec

    def design(self, hidden: Tensor, inputs: Tensor | None) -> Float[Tensor, "tokens column"]:
        """The columns of a linear head: hidden state and other inputs, standardised, and 1; float64."""
        stream, x = self.columns(hidden, inputs)
        others = stream[:, :0] if x is None else x
        columns = torch.cat([stream / self.hidden_scaling.deviation, others, torch.ones_like(stream[:, :1])], -1)
        return columns.double()

    def linear_weights(self) -> Float[Tensor, "heads column"]:
        """w, v and b of law 4.7 for the columns of `design`, float64."""
        return torch.cat([weight.flatten(1) for weight in self._linear()], -1).detach().double()

    @torch.no_grad()
    def set_linear_weights(self, values: Float[Tensor, "heads column"]) -> None:
        """Set w, v and b."""
        parts = self._linear()
        for weight, value in zip(parts, values.split([part[0].numel() for part in parts], -1), strict=True):
            weight.copy_(value.view_as(weight))

    @torch.no_grad()
    def start_at_signal(self, slope: float, offset: float) -> None:
        """Give every head the calibrated logit slope x signal + offset of its timing's signal; 0 if it does not read
        the signal.
        """
        for weight in self._linear():
            weight.zero_()
        bias = -self.shift
        signal = SIGNALS[self.shape.timing]
        if signal in self.shape.inputs.scalars:
            column = self.shape.inputs.scalars.index(signal)
            self.weights["skip.weight"][..., column] = slope * self.input_scaling.deviation[column]
            bias = (offset + bias).to(self.reject_weights) + slope * self.input_scaling.mean[column]
        self.weights["out.bias"].copy_(bias[:, None])

    def _linear(self) -> list[Tensor]:
        names = ("out.weight", "skip.weight", "out.bias")
        return [self.weights[name] for name in names if name in self._names]

    def _centred(self) -> dict[str, Tensor]:
        """The weights that read `columns`."""
        return folded(
            self.weights,
            self.hidden_scaling.centred(),
            self.input_scaling.identity(),
            architecture=self.architecture,
        )

    def _logits(
        self, weights: Mapping[str, Tensor], stream: Tensor, inputs: Tensor | None, dropout: Dropout | None
    ) -> Float[Tensor, "heads tokens"]:
        count = len(self.specs)
        x = None if inputs is None else inputs.expand(count, -1, -1)
        return stack_forward(weights, stream.expand(count, -1, -1), x, dropout, architecture=self.architecture)

    def dropout(self, *step: int) -> Dropout | None:
        """Masks of one step, which depend only on the shape and `step`, so that a resumed run has the same ones."""
        rate = self.specs[0].dropout
        seed = zlib.crc32(f"{self.shape}/{step}".encode())
        return Dropout(rate, torch.Generator(self.reject_weights.device).manual_seed(seed)) if rate else None

    @torch.no_grad()
    def head(self, index: int, provenance: Provenance | None = None) -> AcceptanceHead:
        """One head of the stack, with the standardisation folded into its weights."""
        head = self.shape.head(self.hidden_size, provenance)
        weights = {name: weight[index] for name, weight in self.weights.items()}
        exported = folded(weights, self.hidden_scaling, self.input_scaling, architecture=self.architecture)
        head.load_state_dict(exported)
        return head.eval()

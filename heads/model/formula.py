"""Law 4.7: the logit of an acceptance-prediction head (SpecDec++, arXiv 2405.19715, section 3.2), for several heads of
one shape at once.

    h_0 = hidden [+ U x + c]                     x: the inputs beside the hidden state (`heads.model.inputs`)
    h_d = h_{d-1} + SiLU(W_d h_{d-1} + b_d)      d = 1 … D; other blocks: `ARCHITECTURES`
    f   = w . h_D [+ v . x] + b                  one logit; D = 0 is linear (no U)

Hidden state and embedding may be normalised (`Inputs.is_normalised`). Weights have their names in
`AcceptanceHead.state_dict()` and a leading axis of heads:

    mix.{weight, bias} = U, c    blocks.{d - 1}.{weight, bias} = W_d, b_d    out.{weight, bias} = w, b
    skip.weight = v

Training, export, decoding and replay read the blocks from `ARCHITECTURES`, so a new architecture needs only an entry
there (docs/extending.md). `heads.model.step.HostHead` repeats the formula in numpy; a test compares the two.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

PAPERS = "resnet"
"""SpecDec++'s block (arXiv 2405.19715, section 3.2): SiLU(W h + b)."""

Weights = Mapping[str, Tensor]
"""Parameters of one block by name; with a leading axis of heads where several heads are stacked."""


class Scaling(nn.Module):
    """Mean m and deviation s of each column that weights read, and the gain t of what blocks add to the stream."""

    mean: Float[Tensor, " column"]
    deviation: Float[Tensor, " column"]

    def __init__(self, mean: Float[Tensor, " column"], deviation: Float[Tensor, " column"]) -> None:
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("deviation", deviation)

    def at(self, part: slice) -> "Scaling":
        """The scaling of some columns."""
        return Scaling(self.mean[part], self.deviation[part])

    @property
    def gain(self) -> Float[Tensor, " column"]:
        """t = max(s, 1): what blocks add is as large as the stream's own deviation, and SiLU remains curved."""
        return self.deviation.clamp_min(1.0)

    def centred(self) -> "Scaling":
        """The scaling of columns that have mean 0 already."""
        return Scaling(torch.zeros_like(self.mean), self.deviation)

    def identity(self) -> "Scaling":
        """The scaling of columns that are standardised already."""
        return Scaling(torch.zeros_like(self.mean), torch.ones_like(self.deviation))

    def folded(
        self, weight: Float[Tensor, "*heads out column"], bias: Float[Tensor, "*heads out"]
    ) -> tuple[Float[Tensor, "*heads out column"], Float[Tensor, "*heads out"]]:
        """(A / s, b - (A / s) m), which give for x what (A, b) give for (x - m) / s. No product of matrices, because
        autocast would round it.
        """
        scaled = weight / self.deviation
        return scaled, bias - (scaled * self.mean).sum(-1)


class Architecture(NamedTuple):
    """What one residual block of a head computes."""

    block: Callable[[int], nn.Module]
    """Width -> module with the initial parameters of a block."""
    added: Callable[[Weights, Float[Tensor, "heads tokens hidden"]], Float[Tensor, "heads tokens hidden"]]
    """(weights, stream) -> what the block adds to the stream."""
    step: Callable[[Weights, Float[Tensor, " hidden"]], Float[Tensor, " hidden"]] | None = None
    """The same for one head and one token, in new memory and with few torch calls; None: use `added`."""
    folded: Callable[[Weights, Scaling], Weights] | None = None
    """The parameters that read the stream h_d and add t times as much, from those that read (h_d - m) / s (`folded`).
    None: heads with these blocks are trained on hidden states as they are."""

    def added_to_token(self, weights: Weights, stream: Float[Tensor, " hidden"]) -> Float[Tensor, " hidden"]:
        """What a block of one head adds to the stream of one token."""
        if self.step is not None:
            return self.step(weights, stream)
        return self.added({name: weight[None] for name, weight in weights.items()}, stream[None, None])[0, 0]


def _folded_linear(weights: Weights, scaling: Scaling) -> Weights:
    """SiLU(t (A (h - m) / s + b)) as SiLU(W h + b')."""
    gain = scaling.gain
    weight, bias = scaling.folded(gain[:, None] * weights["weight"], gain * weights["bias"])
    return {"weight": weight, "bias": bias}


ARCHITECTURES = {
    PAPERS: Architecture(
        block=lambda width: nn.Linear(width, width),
        added=lambda w, stream: functional.silu(torch.baddbmm(w["bias"][:, None], stream, w["weight"].mT)),
        step=lambda w, stream: functional.silu(torch.addmv(w["bias"], w["weight"], stream), inplace=True),
        folded=_folded_linear,
    )
}
"""Name -> architecture."""


def architecture_of(name: str) -> Architecture:
    """`ARCHITECTURES[name]`; ValueError if there is none."""
    if name not in ARCHITECTURES:
        raise ValueError(f"architecture is {name!r}; use one of {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]


def blocks_of(weights: Weights) -> list[dict[str, Tensor]]:
    """Parameters of each block in order, from a head's parameters (blocks.0.weight, blocks.0.bias, …)."""
    blocks: dict[int, dict[str, Tensor]] = {}
    for name, weight in weights.items():
        if name.startswith("blocks."):
            _, index, own_name = name.split(".", 2)
            blocks.setdefault(int(index), {})[own_name] = weight
    return [blocks[index] for index in sorted(blocks)]


class Dropout(NamedTuple):
    """Dropout in training, on h_0 and on what each block adds."""

    rate: float
    generator: torch.Generator

    def mask(self, like: Float[Tensor, "heads tokens hidden"]) -> Float[Tensor, "tokens hidden"]:
        """0 or 1 / (1 - rate), the same for all heads."""
        keep_prob = 1.0 - self.rate
        return torch.empty_like(like[0]).bernoulli_(keep_prob, generator=self.generator).div_(keep_prob)


def stack_forward(
    weights: Weights,
    hidden: Float[Tensor, "heads tokens hidden"],
    inputs: Float[Tensor, "heads tokens input"] | None,
    dropout: Dropout | None = None,
    *,
    architecture: Architecture = ARCHITECTURES[PAPERS],
) -> Float[Tensor, "heads tokens"]:
    """The logit f of every head for every token. Heads without blocks have no dropout."""
    blocks = blocks_of(weights)
    stream = hidden
    if "mix.weight" in weights:
        shifted = stream + weights["mix.bias"][:, None]
        stream = torch.baddbmm(shifted, inputs, weights["mix.weight"].mT)  # type: ignore[arg-type]
    if dropout and blocks:
        stream = stream * dropout.mask(stream)
    for block in blocks:
        added = architecture.added(block, stream)
        stream = stream + (added * dropout.mask(added) if dropout else added)
    logit = torch.baddbmm(weights["out.bias"][:, None], stream, weights["out.weight"].mT)
    if "skip.weight" in weights:
        logit = torch.baddbmm(logit, inputs, weights["skip.weight"].mT)  # type: ignore[arg-type]
    return logit.squeeze(-1)


def folded(weights: Weights, hidden: Scaling, inputs: Scaling, *, architecture: Architecture) -> dict[str, Tensor]:
    """The head's parameters, from those that are trained on standardised columns.

    A, b, U, c, w, v and b_f are trained in this form of law 4.7, with means m, deviations s and gains t = max(s, 1):

        h_0 = hidden + t (U (x - m_x) / s_x + c)
        h_d = h_{d-1} + SiLU(t (A_d (h_{d-1} - m) / s + b_d))
        f   = w . (h_D - m) / s + v . (x - m_x) / s_x + b_f

    so weights read columns of mean 0 and deviation 1 at every scale of `hidden`, and what is added to the stream has
    the stream's scale. Only weights change: W_d = t A_d / s, b_d' = t b_d - W_d m, and so on. The stream itself cannot
    be divided by s, because the formula reads `hidden` with weight 1.
    """
    result = dict(weights)
    if "mix.weight" in weights:
        gain = hidden.gain
        mix = inputs.folded(gain[:, None] * weights["mix.weight"], gain * weights["mix.bias"])
        result["mix.weight"], result["mix.bias"] = mix
    for index, block in enumerate(blocks_of(weights)):
        of_block = architecture.folded(block, hidden) if architecture.folded else block
        result |= {f"blocks.{index}.{name}": weight for name, weight in of_block.items()}
    result["out.weight"], bias = hidden.folded(weights["out.weight"], weights["out.bias"])
    if "skip.weight" in weights:
        result["skip.weight"], bias = inputs.folded(weights["skip.weight"], bias)
    result["out.bias"] = bias
    return result

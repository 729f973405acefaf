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


class Architecture(NamedTuple):
    """What one residual block of a head computes."""

    block: Callable[[int], nn.Module]
    """Width -> module with the initial parameters of a block."""
    added: Callable[[Weights, Float[Tensor, "heads tokens hidden"]], Float[Tensor, "heads tokens hidden"]]
    """(weights, stream) -> what the block adds to the stream."""
    step: Callable[[Weights, Float[Tensor, " hidden"]], Float[Tensor, " hidden"]] | None = None
    """The same for one head and one token, in new memory and with few torch calls; None: use `added`."""

    def added_to_token(self, weights: Weights, stream: Float[Tensor, " hidden"]) -> Float[Tensor, " hidden"]:
        """What a block of one head adds to the stream of one token."""
        if self.step is not None:
            return self.step(weights, stream)
        return self.added({name: weight[None] for name, weight in weights.items()}, stream[None, None])[0, 0]


ARCHITECTURES = {
    PAPERS: Architecture(
        block=lambda width: nn.Linear(width, width),
        added=lambda w, stream: functional.silu(torch.baddbmm(w["bias"][:, None], stream, w["weight"].mT)),
        step=lambda w, stream: functional.silu(torch.addmv(w["bias"], w["weight"], stream), inplace=True),
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
    blocks, stream = blocks_of(weights), hidden
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

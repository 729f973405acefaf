"""Law 4.7: the logit of an acceptance-prediction head (SpecDec++, arXiv 2405.19715, section 3.2), for several heads of
one shape at once.

    h_0 = hidden [+ U x + c]                     x: the inputs beside the hidden state (`heads.model.inputs`)
    h_d = h_{d-1} + SiLU(W_d h_{d-1} + b_d)      d = 1 … D; other blocks: `heads.model.architectures`
    f   = w . h_D [+ v . x] + b                  one logit; D = 0 is linear (no U)

Hidden state and embedding may be normalised (`Inputs.is_normalised`). Weights have their names in
`AcceptanceHead.state_dict()` and a leading axis of heads:

    mix.{weight, bias} = U, c    blocks.{d - 1}.{weight, bias} = W_d, b_d    out.{weight, bias} = w, b
    skip.weight = v

`heads.model.stepwise` repeats the formula for one token at a time, for speed; a test compares the two.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from heads.model.architectures import ARCHITECTURES, PAPERS, Architecture, blocks_of


class Dropout(NamedTuple):
    """Dropout in training, on h_0 and on what each block adds."""

    rate: float
    generator: torch.Generator

    def mask(self, like: Float[Tensor, "heads tokens hidden"]) -> Float[Tensor, "tokens hidden"]:
        """0 or 1 / (1 - rate), the same for all heads."""
        keep_prob = 1.0 - self.rate
        return torch.empty_like(like[0]).bernoulli_(keep_prob, generator=self.generator).div_(keep_prob)


def stack_forward(
    weights: Mapping[str, Tensor],
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

"""Law 4.7: the logit of an acceptance-prediction head (SpecDec++, arXiv 2405.19715, section 3.2), for several heads of
one shape at once.

    h_0 = hidden [+ U x + c]                     x: the inputs beside the hidden state (`heads.model.inputs`)
    h_d = h_{d-1} + SiLU(W_d h_{d-1} + b_d)      d = 1 … D, every block with weights of its own; of another
                                                 architecture, what its block adds (`heads.model.architectures`)
    f   = w . h_D [+ v . x] + b                  one logit; D = 0 is linear (no U)

Hidden state and embedding may come normalised (`Inputs.is_normalised`), and training may drop numbers of the stream
(`Dropout`).

Weights go by their names in `AcceptanceHead.state_dict()`, with a leading axis of heads:

    mix.{weight, bias} = U, c    blocks.{d - 1}.{weight, bias} = W_d, b_d    out.{weight, bias} = w, b
    skip.weight = v

The formula stands here for every batch of tokens. `heads.model.stepwise` writes it out again for speed, one token at a
time, and a test holds it to this one.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from heads.model.architectures import ARCHITECTURES, PAPERS, Architecture, blocks_of


class Dropout(NamedTuple):
    """Dropout in training: h_0 and what each block adds lose a share of their numbers, and the others grow to make up
    for it.
    """

    rate: float
    generator: torch.Generator

    def mask(self, like: Float[Tensor, "heads tokens hidden"]) -> Float[Tensor, "tokens hidden"]:
        """0 or 1 / (1 - rate), one for all heads: what each multiplies by."""
        kept = 1.0 - self.rate
        return torch.empty_like(like[0]).bernoulli_(kept, generator=self.generator).div_(kept)


def stack_forward(
    weights: Mapping[str, Tensor],
    hidden: Float[Tensor, "heads tokens hidden"],
    inputs: Float[Tensor, "heads tokens input"] | None,
    dropout: Dropout | None = None,
    *,
    architecture: Architecture = ARCHITECTURES[PAPERS],
) -> Float[Tensor, "heads tokens"]:
    """The logit f of every head for every token; a head without blocks has no dropout."""
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

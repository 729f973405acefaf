"""Architectures: what one residual block of a head computes.

A head is a residual stream h of the draft's width, h_d = h_{d-1} + block_d(h_{d-1}), followed by one linear layer
(`heads.model.formula`). Training, export, decoding and replay read the blocks from `ARCHITECTURES`, so
a new architecture needs only an entry there (docs/extending.md).
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
    """One kind of block."""

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


def _papers_added(weights: Weights, stream: Tensor) -> Tensor:
    return functional.silu(torch.baddbmm(weights["bias"][:, None], stream, weights["weight"].mT))


def _papers_step(weights: Weights, stream: Tensor) -> Tensor:
    return functional.silu(torch.addmv(weights["bias"], weights["weight"], stream), True)


ARCHITECTURES = {PAPERS: Architecture(lambda width: nn.Linear(width, width), _papers_added, _papers_step)}
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

"""Architectures: what one residual block of a head computes.

A head is a stream h of the draft's width that blocks add to, h_d = h_{d-1} + block_d(h_{d-1}), read out by one linear
layer (`heads.model.formula`). What a block is made of and what it adds is an entry of `ARCHITECTURES`, nothing else:
training, export, the loop on every device, compiled steps, batches and replay take blocks from this table, and a config
asks for them by name (docs/extending.md).
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
"""Parameters of one block by their names in its module; of several heads, with a leading axis of heads each."""


class Architecture(NamedTuple):
    """One kind of block."""

    block: Callable[[int], nn.Module]
    """Makes the parameters of a block for streams of a width, with their initial values."""
    added: Callable[[Weights, Float[Tensor, "heads tokens hidden"]], Float[Tensor, "heads tokens hidden"]]
    """What a block of each of several heads adds to that head's stream."""
    step: Callable[[Weights, Float[Tensor, " hidden"]], Float[Tensor, " hidden"]] | None = None
    """The same, in memory of its own, for one head and one token in as few calls as can be; None: `added`."""

    def added_to_token(self, weights: Weights, stream: Float[Tensor, " hidden"]) -> Float[Tensor, " hidden"]:
        """What a block of one head adds to one token's stream."""
        if self.step is not None:
            return self.step(weights, stream)
        return self.added({name: weight[None] for name, weight in weights.items()}, stream[None, None])[0, 0]


def _papers_added(weights: Weights, stream: Tensor) -> Tensor:
    return functional.silu(torch.baddbmm(weights["bias"][:, None], stream, weights["weight"].mT))


def _papers_step(weights: Weights, stream: Tensor) -> Tensor:
    return functional.silu(torch.addmv(weights["bias"], weights["weight"], stream), True)


ARCHITECTURES = {PAPERS: Architecture(lambda width: nn.Linear(width, width), _papers_added, _papers_step)}
"""Every kind of block that a head can be made of, by name."""


def architecture_of(name: str) -> Architecture:
    """The architecture of this name.

    Raises:
        ValueError: there is none.
    """
    if name not in ARCHITECTURES:
        raise ValueError(f"architecture is {name!r}; one of {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]


def blocks_of(weights: Weights) -> list[dict[str, Tensor]]:
    """The parameters of each block, first to last, among those of a head (blocks.0.weight, blocks.0.bias, …)."""
    blocks: dict[int, dict[str, Tensor]] = {}
    for name, weight in weights.items():
        if name.startswith("blocks."):
            _, index, own_name = name.split(".", 2)
            blocks.setdefault(int(index), {})[own_name] = weight
    return [blocks[index] for index in sorted(blocks)]

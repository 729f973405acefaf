"""The grid of a sweep: which heads there are, what they are called, and which of them share their matrix products."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

from configs.schema import HeadsConfig
from heads.model.architectures import PAPERS
from heads.model.head import AcceptanceHead, Timing, check_shape, kind_of
from heads.model.inputs import STANDARD, Inputs
from heads.model.provenance import Provenance


@dataclass(frozen=True, order=True)
class HeadShape:
    """Inputs, depth and architecture, which heads must have in common to be stacked."""

    timing: Timing
    inputs: Inputs
    depth: int
    architecture: str = PAPERS

    def head(self, hidden_size: int, provenance: Provenance | None = None) -> AcceptanceHead:
        """A head of this shape with random weights."""
        return AcceptanceHead(
            hidden_size,
            self.depth,
            self.timing,
            *self.inputs,
            architecture=self.architecture,
            provenance=provenance,
        )

    @property
    def kind(self) -> str:
        """fed, drawn, prefix or candidate, +s with scalars, +e with the token's embedding, + the architecture where it
        is not the paper's.
        """
        return kind_of(self.timing, self.inputs, self.architecture)

    def __str__(self) -> str:
        return f"{self.kind}-d{self.depth}"


@dataclass(frozen=True, order=True)
class HeadSpec:
    """One head of the grid."""

    shape: HeadShape
    reject_weight: float

    def __str__(self) -> str:
        """Name of the head, for example fed+s-d3-w6: a fed-time head with scalars, three blocks, reject weight 6."""
        return f"{self.shape}-w{self.reject_weight:g}"


def grid(config: HeadsConfig) -> dict[HeadShape, tuple[float, ...]]:
    """Every head of the sweep: for each shape the reject weights that are stacked in it, in the order of the config.

    Raises:
        ValueError: an empty axis, an impossible depth, timing, scalar or weight, the same value twice, nothing that a
            prefix head may read.
    """
    for name in ("timings", "scalars", "embeddings", "normalised", "depths", "architectures", "reject_weights"):
        values = [tuple(value) if isinstance(value, list) else value for value in getattr(config, name)]
        if not values:
            raise ValueError(f"heads.{name} is empty, so the sweep has no head; name at least one value")
        if len(set(values)) != len(values):
            raise ValueError(f"heads.{name} is {values}; name every value once")
    for weight in (*config.reject_weights, config.accept_weight):
        if not 0 < weight < float("inf"):
            raise ValueError(f"a loss weight is {weight}; it must be a positive number")
    papers: list[tuple[Timing, Inputs, str]] = [("fed", Inputs(), PAPERS)] if config.specdec else []
    product_of = product(config.timings, config.scalars, config.embeddings, config.normalised)
    combined = [
        (timing, Inputs.of(scalars, embedding, timing, normed)) for timing, scalars, embedding, normed in product_of
    ]
    of_drawn_tokens = [(timing, inputs) for timing, inputs in combined if timing != "prefix" or not inputs.reads_token]
    if missing := set(config.timings) - {timing for timing, _ in of_drawn_tokens}:
        raise ValueError(
            f"heads.timings has {missing.pop()}, and every combination of heads.scalars {list(config.scalars)} and "
            "heads.embeddings "
            f"{list(config.embeddings)} reads the token, which is not drawn yet then; add false to both"
        )
    named = [(*inputs, architecture) for inputs, architecture in product(of_drawn_tokens, config.architectures)]
    # without blocks every architecture is the same linear head
    shapes = [
        HeadShape(timing, inputs, depth, architecture if depth else PAPERS)
        for timing, inputs, architecture in dict.fromkeys([*papers, *named])
        for depth in config.depths
    ]
    for shape in shapes:
        check_shape(1, shape.depth, shape.timing, shape.architecture)
    return {shape: tuple(config.reject_weights) for shape in shapes}


def scalar_names(shapes: Iterable[HeadShape]) -> tuple[str, ...]:
    """Every scalar that a sweep reads: the standard ones, which each head is compared with, then those that some head
    takes besides.
    """
    return tuple(dict.fromkeys([*STANDARD, *(name for shape in shapes for name in shape.inputs.scalars)]))


def specs(shapes: dict[HeadShape, tuple[float, ...]]) -> list[HeadSpec]:
    """All heads, stack after stack: the order of every [heads] axis of the project."""
    return [HeadSpec(shape, weight) for shape, weights in shapes.items() for weight in weights]


def module_key(name: str) -> str:
    """`name` without characters that torch refuses in a module's name."""
    return re.sub(r"[^0-9A-Za-z_+-]", "_", name)

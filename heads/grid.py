"""The grid of a sweep: which heads there are, what they are called, and which of them share their matrix products."""

import re
from dataclasses import dataclass
from itertools import product

from configs.schema import HeadsConfig
from heads.model.head import Timing, check_shape


@dataclass(frozen=True, order=True)
class Shape:
    """What heads must have in common to be stacked: inputs and depth."""

    timing: Timing
    scalars: bool
    embedding: bool
    depth: int

    @property
    def inputs(self) -> str:
        """fed or drawn, +s with scalars, +e with the token's embedding."""
        return self.timing + "+s" * self.scalars + "+e" * self.embedding

    def __str__(self) -> str:
        return f"{self.inputs}-d{self.depth}"


@dataclass(frozen=True, order=True)
class HeadSpec:
    """One head of the grid."""

    shape: Shape
    reject_weight: float

    def __str__(self) -> str:
        """Its name, for example fed+s-d3-w6: a fed-time head with scalars, three blocks, reject weight 6."""
        return f"{self.shape}-w{self.reject_weight:g}"

    @property
    def key(self) -> str:
        """The name with characters that a module may have."""
        return module_key(str(self))


def grid(config: HeadsConfig) -> dict[Shape, tuple[float, ...]]:
    """Every head of the sweep: for each shape the reject weights that are stacked in it, in the order of the config.

    Raises:
        ValueError: an empty axis, an impossible depth, timing or weight, or the same value twice.
    """
    axes = {name: getattr(config, name) for name in ("timings", "scalars", "embeddings", "depths", "reject_weights")}
    for name, values in axes.items():
        if not values:
            raise ValueError(f"heads.{name} is empty, so the sweep has no head; name at least one value")
        if len(set(values)) != len(values):
            raise ValueError(f"heads.{name} is {list(values)}; every value may stand there once")
    for weight in (*config.reject_weights, config.accept_weight):
        if not 0 < weight < float("inf"):
            raise ValueError(f"a loss weight is {weight}; it must be a positive number")
    shapes = [Shape(*values) for values in product(config.timings, config.scalars, config.embeddings, config.depths)]
    for shape in shapes:
        check_shape(1, shape.depth, shape.timing)
    return {shape: tuple(config.reject_weights) for shape in shapes}


def specs(shapes: dict[Shape, tuple[float, ...]]) -> list[HeadSpec]:
    """All heads, stack after stack: the order of every [heads] axis of the project."""
    return [HeadSpec(shape, weight) for shape, weights in shapes.items() for weight in weights]


def module_key(name: str) -> str:
    """`name` without characters that torch refuses in a module's name."""
    return re.sub(r"[^0-9A-Za-z_+-]", "_", name)

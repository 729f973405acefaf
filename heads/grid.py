"""The grid of a sweep: its heads, their names, and which of them are stacked."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from configs.schema import HeadsConfig
from heads.model.formula import PAPERS
from heads.model.head import HeadShape, Timing
from heads.model.inputs import SIGNALS, Inputs


@dataclass(frozen=True, order=True)
class HeadSpec:
    """One head of the grid."""

    shape: HeadShape
    reject_weight: float
    dropout: float = 0.0
    """Dropout rate in training."""

    def __str__(self) -> str:
        """fed+s-d3-w6-drop0.2, for example: a fed-time head with scalars, three blocks, reject weight 6 and dropout."""
        name = f"{self.shape}-w{self.reject_weight:g}"
        return f"{name}-drop{self.dropout:g}" if self.dropout else name


def grid(config: HeadsConfig) -> list[HeadShape]:
    """The shapes of a sweep, in the order of the config; each has a head for every reject weight. ValueError for empty
    axes; invalid depths, timings or scalars; repeated values; prefix heads that could only read the token.
    """
    axes = "timings scalars embeddings normalised depths architectures reject_weights dropout"
    for name in axes.split():
        values = [tuple(value) if isinstance(value, list) else value for value in getattr(config, name)]
        if not values:
            raise ValueError(f"heads.{name} is empty, so the sweep has no heads; name at least one value")
        if len(set(values)) != len(values):
            raise ValueError(f"heads.{name} is {values}; name each value once")
    inputs = product(config.timings, config.scalars, config.embeddings, config.normalised)
    combined = [
        (timing, Inputs.of(scalars, embedding, timing, normed)) for timing, scalars, embedding, normed in inputs
    ]
    possible = [(timing, inputs) for timing, inputs in combined if timing != "prefix" or not inputs.reads_token]
    if missing := set(config.timings) - {timing for timing, _ in possible}:
        raise ValueError(
            f"heads.timings has {missing.pop()}, but every combination of heads.scalars {list(config.scalars)} "
            f"and heads.embeddings {list(config.embeddings)} reads the token, which is not drawn yet; add "
            "false to both"
        )
    kinds: list[tuple[Timing, Inputs, str]] = [("fed", Inputs(), PAPERS)] if config.specdec else []
    kinds += [(*of_timing, architecture) for of_timing, architecture in product(possible, config.architectures)]
    # without blocks every architecture is the same linear head
    shapes = (
        HeadShape(timing, inputs, depth, architecture if depth else PAPERS)
        for timing, inputs, architecture in kinds
        for depth in config.depths
    )
    unique = list(dict.fromkeys(shapes))
    of_name: dict[str, HeadShape] = {}
    for shape in unique:
        if (other := of_name.setdefault(str(shape), shape)) != shape:
            raise ValueError(
                f"heads.scalars has {list(other.inputs.scalars)} and {list(shape.inputs.scalars)}, whose heads "
                f"have the same name, {shape}; train them in separate heads.dir"
            )
    return unique


def scalar_names(shapes: Sequence[HeadShape]) -> tuple[str, ...]:
    """Every scalar that a sweep reads: the signals that its heads are compared with, then the heads' others."""
    compared = [SIGNALS[shape.timing] for shape in shapes]
    return tuple(dict.fromkeys([*compared, *(name for shape in shapes for name in shape.inputs.scalars)]))


def stacks(config: HeadsConfig) -> list[tuple[HeadShape, float]]:
    """The shapes of a sweep, each with every dropout rate that it is trained with; a stack has all reject weights.
    Linear heads and SpecDec++'s own heads have no dropout.
    """
    pairs: list[tuple[HeadShape, float]] = []
    for shape in grid(config):
        has_dropout = shape.depth > 0 and not shape.is_specdec
        pairs += [(shape, rate) for rate in (config.dropout if has_dropout else (0.0,))]
    return pairs


def specs(config: HeadsConfig) -> list[HeadSpec]:
    """All heads, stack by stack: the order of every [heads] axis of the project."""
    return [HeadSpec(shape, weight, rate) for shape, rate in stacks(config) for weight in config.reject_weights]

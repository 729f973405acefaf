"""What competes in an evaluation: the label, kind, colour and head timing of every family, in the order of table rows.

A family is a set of settings of which dev chooses one: all thresholds of one policy, or of all heads of one timing.
"""

from collections.abc import Callable, Iterable
from itertools import count
from typing import NamedTuple

from decode.policies.registry import AUTO_TOKEN_PROB, POLICIES, RULES
from heads.model.head import Timing

ALONE = "target_alone"
BASELINE = "fixed_length"
PRODUCT = "cumulative_token_prob"
"""The target without a draft, the family that gains are measured from, and the best-known rule without training."""
PERFECT = "perfect_drawn"
ORACLE = "oracle"
LENGTH_HEAD = "length_head"
SPECDEC = "head_specdec"
"""SpecDec++'s own heads, fed-time on the hidden state alone."""
LENGTHS = "lengths"
PROBABILITIES = "probabilities"
ENTROPIES = "entropies"
CUSTOM = "custom"
ENGINES = "engines"
PAPERS = "SpecDec++"
HEADS = "heads"
BOUND = "bounds"
AUTO = "auto"
"""The kind and the only family of the rule of law 4.11 with a head: its head and how it finds lambda are settings."""
TRAINING_FREE = "training-free"
COLOURS = {
    LENGTHS: "#8c6d4f",
    PROBABILITIES: "#3b6fb6",
    ENTROPIES: "#2a9d8f",
    CUSTOM: "#d0589c",
    ENGINES: "#d0589c",  # they compete only where they are named, and no plot needs more than eight colours
    PAPERS: "#d19a1c",
    HEADS: "#c4532d",
    AUTO: "#8e5bb0",
    BOUND: "#98a2b3",
}
"""Kind of policy -> its colour; families of one kind differ by line style."""
_LINES = ("-", "--", ":", "-.")


class Family(NamedTuple):
    """What tables and plots know of a family."""

    label: str
    kind: str
    timing: Timing | None = None
    """Of its trained heads."""
    is_trained: bool = False
    """Whether a custom policy reads a trained network."""

    @property
    def needs_training(self) -> bool:
        return self.kind in (PAPERS, HEADS, AUTO) or self.is_trained


_KINDS = (
    dict.fromkeys((BASELINE, "heuristic"), LENGTHS)
    | dict.fromkeys(("token_prob", PRODUCT, "max_prob", AUTO_TOKEN_PROB), PROBABILITIES)
    | dict.fromkeys(("entropy", "self_verify", "ada_edl"), ENTROPIES)
    | dict.fromkeys(RULES, ENGINES)
)
"""Kinds of the policies that `decode.policies.registry` has from the start; those that users add are CUSTOM."""
_TRAINED_AND_BOUNDS = {
    SPECDEC: Family("SpecDec++", PAPERS, "fed"),
    "head_fed": Family("best head, fed-time with scalars", HEADS, "fed"),
    "head_drawn": Family("best head, drawn-time", HEADS, "drawn"),
    "head_prefix": Family("best prefix head", HEADS, "prefix"),
    AUTO: Family("auto, with a head", AUTO),
    LENGTH_HEAD: Family("length head (AdaFlash)", ENGINES),
    "perfect_fed": Family("perfect head, fed-time", BOUND),
    PERFECT: Family("perfect head", BOUND),
    ORACLE: Family("oracle", BOUND),
}
BOUNDS = tuple(name for name, family in _TRAINED_AND_BOUNDS.items() if family.kind == BOUND)
"""Families that no policy can reach, because they know the outcome or the true acceptance probabilities."""
REPLAYED = (*BOUNDS, LENGTH_HEAD)
"""Families that exist in replay alone."""
HEADS_OF: dict[Timing, tuple[str, ...]] = {
    timing: tuple(name for name, family in _TRAINED_AND_BOUNDS.items() if family.timing == timing)
    for timing in ("fed", "drawn", "prefix")
}
"""Timing -> the families of its heads."""


def families() -> dict[str, Family]:
    """Every known family by name, in the order of table rows; custom policies appear once they are registered."""
    entries = (POLICIES | RULES).items()
    registered = {
        name: Family(entry.label, _KINDS.get(name, CUSTOM), is_trained=entry.kind.is_trained)
        for name, entry in entries
        if name != "head"
    }
    return {ALONE: Family("target alone", LENGTHS), **registered, **_TRAINED_AND_BOUNDS}


def family(name: str) -> Family:
    """The entry of a family; a name that nobody registered is its own label, and CUSTOM."""
    return families().get(name, Family(name, CUSTOM))


GROUPS: dict[str, Callable[[str], bool]] = {
    TRAINING_FREE: lambda name: name in POLICIES and not family(name).is_trained,
    HEADS: lambda name: family(name).kind in (PAPERS, HEADS) or family(name).is_trained,
    BASELINE: lambda name: name == BASELINE,
}
"""Groups whose best families are compared with each other -> whether a family belongs to it."""


def styles_of(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Colour and line of each family of a plot: the colour is that of its kind, the line its own within that kind."""
    numbers = {kind: count() for kind in COLOURS}
    styles = {}
    for name in dict.fromkeys(names):
        number = next(numbers[kind := family(name).kind])
        styles[name] = COLOURS[kind], _LINES[number % len(_LINES)]
    return styles

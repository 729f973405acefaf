"""Competitors that are built and decoded setting by setting, and what the clock said of the one that dev chose."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from evaluation.gain import Gain, Spent, gain_over, median_ratio

AnyCandidate = TypeVar("AnyCandidate")


@dataclass(frozen=True, kw_only=True)
class Standing:
    """What dev chose, on the clock beside its rivals."""

    family: str
    setting: str
    spent: Spent
    rivals: Mapping[str, Spent]

    @cached_property
    def over(self) -> dict[str, Gain]:
        """Gain over each rival, by name."""
        return {name: gain_over(rival, self.spent) for name, rival in self.rivals.items()}

    @property
    def median_over(self) -> dict[str, float]:
        """The same as the median of ratios prompt by prompt, minus 1; of texts of one length."""
        return {name: median_ratio(rival.seconds, self.spent.seconds) - 1 for name, rival in self.rivals.items()}


def fastest(
    candidates: Iterable[AnyCandidate], *, of: Callable[[AnyCandidate], str], speed: Callable[[AnyCandidate], float]
) -> dict[str, AnyCandidate]:
    """The candidate of each competitor, or family of them, that is fastest on dev, the first of equals.

    Args:
        candidates: in order of preference.
        of: the name of a candidate's competitor or family.
        speed: tokens per second on dev.
    """
    best: dict[str, tuple[float, AnyCandidate]] = {}
    for candidate in candidates:
        name, reached = of(candidate), speed(candidate)
        if name not in best or reached > best[name][0]:
            best[name] = reached, candidate
    return {name: candidate for name, (_, candidate) in best.items()}

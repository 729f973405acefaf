"""What is compared, and the one choice: a competitor has settings, and what is fastest on dev stands for it on test.

    competitor   a policy, a hierarchy, a tree, an engine's rule; those of one family compete on dev, and one of them
                 stands for the family
    setting      one way to run it
    candidate    a competitor at one setting, with what it did on dev: replayed, decoded, or stepped through in batches
    gain         over another one on test, paired over prompts, with an interval (`evaluation.intervals`)

Replay runs all settings of a competitor at once, as one policy whose parameters are arrays
(`evaluation.contest.grids`); what cannot be replayed is built and decoded setting by setting.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from decode.loop.drafter import Drafter
from lm import CachedModel

Candidate = TypeVar("Candidate")


@dataclass(frozen=True)
class Setting:
    """One way to run a competitor."""

    label: str
    build: Callable[[], Drafter]
    version: str = ""
    """Identifies what the label does not say, such as a head's weights."""
    target: Callable[[], CachedModel] | None = None
    """Model that verifies; None: the trio's target."""

    @property
    def key(self) -> str:
        """Key that stored generations are filed under."""
        return f"{self.label} {self.version}".strip()


@dataclass(frozen=True)
class Competitor:
    """One row of the tables."""

    name: str
    num_levels: int
    """Models in it: 1 is the target alone."""
    settings: tuple[Setting, ...]
    """Settings to choose from on dev; the first stands where there is no dev."""


def chosen(
    candidates: Iterable[Candidate], *, of: Callable[[Candidate], str], speed: Callable[[Candidate], float]
) -> dict[str, Candidate]:
    """The candidate of each competitor, or family of them, that is fastest on dev, the first of equals.

    Args:
        candidates: in order of preference.
        of: the name of a candidate's competitor or family.
        speed: tokens per second on dev.
    """
    best: dict[str, tuple[float, Candidate]] = {}
    for candidate in candidates:
        name, reached = of(candidate), speed(candidate)
        if name not in best or reached > best[name][0]:
            best[name] = reached, candidate
    return {name: candidate for name, (_, candidate) in best.items()}

"""Taking turns on a clock: competitors run on each prompt one right after the other, so that a machine that slows down
slows all of them. Their order rotates, so that none always meets a cold cache or what another one left in it.
"""

from collections.abc import Iterable, Iterator, Sequence
from time import perf_counter
from typing import TypeVar

from store.progress import Bar

AnyCompetitor = TypeVar("AnyCompetitor")
AnyPrompt = TypeVar("AnyPrompt")


def in_turns(
    competitors: Iterable[AnyCompetitor], prompts: Iterable[AnyPrompt], *, first: int = 0
) -> Iterator[tuple[AnyPrompt, Sequence[AnyCompetitor]]]:
    """Each prompt (or batch size, or repeat) with the competitors in their order: a, b, c, then b, c, a. Competitor
    number `first` begins.
    """
    members = tuple(competitors)
    for turn, prompt in enumerate(prompts, first):
        start = turn % len(members)
        yield prompt, members[start:] + members[:start]


def turns_within(budget_s: float, fewest: int, *, desc: str, unit: str) -> Iterator[int]:
    """Numbers of turns, at least `fewest`, until another one would exceed the budget by the mean of those before."""
    started_s = perf_counter()
    number = 0
    with Bar(total=fewest, desc=desc, unit=unit) as bar:
        while number < bar.total:
            yield number
            number += 1
            turn_s = (perf_counter() - started_s) / number
            bar.total = max(number, fewest, int(budget_s / turn_s))
            bar.update()

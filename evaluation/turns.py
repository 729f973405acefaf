"""Competitors take turns: whatever is compared on a clock is on the same prompt one right after the other, so that a
machine that slows down slows all of them, and none is always the first, whom a cold cache or the last one's leavings
would meet each time.
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
    """Each prompt with the competitors in the order in which they are on: of a, b, c on the first prompt a, b, c, on
    the second b, c, a.

    Args:
        competitors: names, or the competitors themselves.
        prompts: whatever is played by all of them, such as prompts, sizes of batches or repeats.
        first: index of the competitor that begins on the first prompt; a repeat gives its number, so that another
            competitor begins.
    """
    members = tuple(competitors)
    for turn, prompt in enumerate(prompts, first):
        start = turn % len(members)
        yield prompt, members[start:] + members[:start]


def turns_within(budget_s: float, fewest: int, *, desc: str, unit: str) -> Iterator[int]:
    """Numbers of turns until another one would exceed the budget, by the mean of those before; a bar shows them.

    Args:
        budget_s: seconds.
        fewest: turns that are taken however long they take.
        desc: what is timed.
        unit: what a turn is called.
    """
    started_s, number = perf_counter(), 0
    with Bar(total=fewest, desc=desc, unit=unit) as bar:
        while number < bar.total:
            yield number
            number += 1
            turn_s = (perf_counter() - started_s) / number
            bar.total = max(number, fewest, int(budget_s / turn_s))
            bar.update()

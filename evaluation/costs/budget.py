"""Timing goes on for a budget of seconds: how many turns that is, and the turns."""

from collections.abc import Iterator
from time import perf_counter

from store.progress import Bar


def num_turns(turn_s: float, budget_s: float, fewest: int) -> int:
    """Turns of so many seconds that fit in the budget, and at least the fewest."""
    return max(fewest, int(budget_s / turn_s))


def turns_within(budget_s: float, fewest: int, *, desc: str, unit: str) -> Iterator[int]:
    """Numbers of turns until another one would, by the mean of those before, go beyond the budget; a bar shows them.

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
            bar.total = max(number, num_turns((perf_counter() - started_s) / number, budget_s, fewest))
            bar.update()

"""The number of drafted tokens for batches of several sizes (law 4.13): the engine's fixed number in lockstep."""

from dataclasses import asdict, dataclass
from typing import Any

from evaluation.contest.grids import make_grid
from evaluation.contest.in_batches import Entry, Setup
from evaluation.flags.choice import FLAGS, Contest
from evaluation.flags.engines import Drafting
from evaluation.flags.times import Given
from evaluation.intervals import Splits


@dataclass(frozen=True, kw_only=True)
class BatchChoice:
    """The fastest number at one size."""

    size: int
    number: int
    """0: without speculation."""
    tokens_per_s: float
    """Throughput of the whole batch on test."""
    over_none: float
    """Gain over no speculation."""
    over_one: float
    """Gain over the number that is best for the smallest of the sizes."""

    def as_dict(self) -> dict[str, Any]:
        """The choice as JSON has it."""
        return asdict(self)


def choose_in_batches(
    contest: Contest, sizes: tuple[int, ...], given: Given | None, drafting: Drafting | None
) -> list[BatchChoice]:
    """The number that is fastest on dev at each size, sizes ascending.

    Args:
        contest: the engine's.
        sizes: sequences in a batch.
        given: times that were given, by tokens; None: those of one sequence stand for batches.
        drafting: how the engine drafts; None: by its default.
    """
    traces = contest.home if drafting is None else contest.traces[drafting]
    costs = Setup(contest.times.alone, None).curves("") if given is None else given.curves
    lengths = range(traces.dev.max_draft_length + 1)
    grid = make_grid(FLAGS, "fixed_length", {"k": lengths})
    entries = Splits(*(Entry(grid, trace) for trace in traces))
    found: list[BatchChoice] = []
    for size in sorted(sizes):
        dev, test = ([load.spent(costs).tokens_per_s for load in entry.loads(size)] for entry in entries)
        best = dev.index(max(dev))
        first = found[0].number if found else best
        found.append(
            BatchChoice(
                size=size,
                number=best,
                tokens_per_s=test[best],
                over_none=test[best] / test[0] - 1,
                over_one=test[best] / test[first] - 1,
            )
        )
    return found

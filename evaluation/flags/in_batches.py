"""The number of drafted tokens for batches of several sizes (law 4.13): the engine's fixed number in lockstep."""

from collections.abc import Sequence
from typing import NamedTuple

from evaluation.competitor import make_competitor
from evaluation.contest.in_batches import Entry, Setup
from evaluation.flag_types import EngineName
from evaluation.flags.choice import FLAGS, Contest
from evaluation.flags.engines import Drafting
from evaluation.flags.times import Given
from evaluation.table import Table, shown
from evaluation.times import Times

_COLUMNS = {
    "batch": ("size", ""),
    "number": ("number", ""),
    "tokens/s": ("tokens_per_s", ".1f"),
    "over no speculation": ("over_none", "+.1%"),
    "over one number for all": ("over_one", "+.1%"),
}


class BatchChoice(NamedTuple):
    """The fastest number at one size."""

    size: int
    number: int
    """0: without speculation."""
    tokens_per_s: float
    """Throughput of the whole batch on test."""
    over_none: float
    """Gain over no speculation."""
    over_one: float
    """Gain over the number that is best for the smallest size."""


def choose_in_batches(
    contest: Contest, sizes: tuple[int, ...], given: Given | None, drafting: Drafting | None
) -> list[BatchChoice]:
    """The number that is fastest on dev at each size, sizes ascending.

    Args:
        contest: the engine's.
        sizes: sequences in a batch.
        given: times by tokens, from the command line; None: the times of one sequence are used for batches.
        drafting: how the engine drafts; None: by its default.
    """
    traces = contest.home if drafting is None else contest.traces[drafting]
    costs = Setup(contest.alone, None).curves("") if given is None else given.curves
    grid = make_competitor(FLAGS, "fixed_length", {"k": range(traces.dev.max_draft_length + 1)})
    entries = [Entry(grid, trace) for trace in traces]
    choices: list[BatchChoice] = []
    for size in sorted(sizes):
        dev, test = ([load.spent(costs).tokens_per_s for load in entry.loads(size)] for entry in entries)
        best = dev.index(max(dev))
        first = choices[0].number if choices else best
        choices.append(BatchChoice(size, best, test[best], test[best] / test[0] - 1, test[best] / test[first] - 1))
    return choices


def batch_sheet(choices: Sequence[BatchChoice], cost: Times) -> Table:
    """A row per size of batch with its fastest number of drafted tokens."""
    note = (
        "number: drafted tokens, chosen on dev (0: do not speculate); tokens/s of the whole batch on test, predicted "
        "(law 4.13). One number for all: that of the smallest size. No interval: a batch mixes prompts"
    )
    rows = shown((choice._asdict() for choice in choices), _COLUMNS)
    return Table(f"by sequences in a batch; {cost.title}", rows, note)


def batch_line(name: EngineName, choices: Sequence[BatchChoice]) -> str:
    """The numbers as the engine takes them: vLLM for all sizes in one setting, others one server for each."""
    if name != "vllm":
        return "; ".join(f"{choice.size} sequences: {choice.number}" for choice in choices)
    ranges: list[list[int]] = []
    for choice in choices:
        if ranges and ranges[-1][2] == choice.number:
            ranges[-1][1] = choice.size
        else:
            ranges.append([ranges[-1][1] + 1 if ranges else 1, choice.size, choice.number])
    most = max(choice.number for choice in choices)
    return f'"num_speculative_tokens": {most}, "num_speculative_tokens_per_batch_size": {ranges}'

"""`evaluation bench` with `decode.hierarchies`: wall clock of three models beside the two-model loop, arms taking turns
on every prompt.

    against_alone     tokens per second / of the same loop with nothing drafted
    against_sd        tokens per second / of plain speculation with the draft, at the best of the fixed lengths tried

Hierarchies run at the first of the settings that `evaluation hierarchy` chooses from on dev. The best fixed length is
chosen on the timed prompts themselves: a favour to plain speculation, so that a hierarchy that still wins does not owe
it to a badly chosen length.
"""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from decode.drafters.hierarchies.trio import Trio
from decode.loop.decoder import SpeculativeDecoder
from decode.loop.drafter import Drafter, ModelDrafter
from decode.policies import FixedLength
from evaluation.bench.arms import generations_of, timed_in_turns
from evaluation.bench.lengths import heading_of
from evaluation.hierarchies.configurations import NO_DRAFT, competitors_of
from evaluation.sheet import Sheet, crossed
from lm import Pair, Sampling


def hierarchy_rows(
    pair: Pair,
    prompts: Sequence[list[int]],
    samplings: Mapping[str, Sampling],
    *,
    lengths: Sequence[int],
    num_tokens: int,
) -> Iterator[dict[str, Any]]:
    """One row per sampling and drafter.

    Raises:
        ValueError: the pair has no micro model.
    """
    trio = Trio(lambda: pair)
    for name, sampling in samplings.items():
        decoders = {
            drafter_name: SpeculativeDecoder(trio.target, drafter, sampling=sampling, eos_ids=frozenset())
            for drafter_name, drafter in _drafters(trio, lengths).items()
        }
        timed = {drafter_name: generations_of(decoder, num_tokens) for drafter_name, decoder in decoders.items()}
        seconds = {drafter_name: median(taken_s) for drafter_name, taken_s in timed_in_turns(timed, prompts).items()}
        best_s = min(seconds[f"sd K={k}"] for k in lengths)
        for drafter_name, own_s in seconds.items():
            yield {
                "sampling": name,
                "drafter": drafter_name,
                "tokens_per_s": num_tokens / own_s,
                "against_alone": seconds[NO_DRAFT] / own_s,
                "against_sd": best_s / own_s,
            }


def hierarchy_sheet(rows: Sequence[Mapping[str, Any]]) -> Sheet:
    """The rows, drafters down, threads and samplings across."""
    ordered = sorted(rows, key=lambda row: (row["threads"], row["sampling"]))
    cells = (
        (row["drafter"], heading_of(row), f"{row['tokens_per_s']:.1f} ({row['against_sd']:.2f})") for row in ordered
    )
    return Sheet(
        "hierarchies: tokens/s of the loop, and over plain speculation at its best fixed length",
        crossed("drafter", cells),
    )


def _drafters(trio: Trio, lengths: Sequence[int]) -> dict[str, Drafter]:
    two = {f"sd K={k}": ModelDrafter(trio.draft, FixedLength(k)) for k in lengths}
    three = {
        f"{one.name} {one.settings[0].label}": one.settings[0].build()
        for one in competitors_of(trio)
        if one.num_levels == 3
    }
    return {NO_DRAFT: ModelDrafter(trio.draft, FixedLength(0)), **two, **three}

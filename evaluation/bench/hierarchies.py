"""`evaluation bench` with `decode.hierarchies`: wall clock of three models beside the two-model loop, arms taking turns on every prompt.

    against_alone     tokens per second / of the same loop with nothing drafted
    against_sd        tokens per second / of plain speculation with the draft, at the best of the fixed lengths tried

Hierarchies run at the first of the settings that `evaluation hierarchy` chooses from on dev. The best fixed length is chosen on the timed
prompts themselves: a favour to plain speculation, so that a hierarchy that still wins does not owe it to a badly chosen length.
"""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from rich.table import Table

from decode.drafters.hierarchies.trio import Trio
from decode.loop.decoder import SpeculativeDecoder
from decode.loop.drafter import Drafter, ModelDrafter
from decode.policies import FixedLength
from evaluation.bench.arms import generations_of, timed_in_turns
from evaluation.hierarchies.contenders import contenders_of
from lm import Pair, Sampling


def hierarchy_rows(
    pair: Pair, prompts: Sequence[list[int]], samplings: Mapping[str, Sampling], *, lengths: Sequence[int], num_tokens: int
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
                "against_alone": seconds["target alone"] / own_s,
                "against_sd": best_s / own_s,
            }


def hierarchy_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The rows, drafters down, threads and samplings across."""
    table = Table(title="hierarchies: tokens/s of the loop, and over plain speculation at its best fixed length")
    table.add_column("drafter")
    columns = sorted({(row["threads"], row["sampling"]) for row in rows})
    for num_threads, name in columns:
        table.add_column(f"{name}, {num_threads} thread{'s' * (num_threads > 1)}", justify="right")
    for drafter in dict.fromkeys(row["drafter"] for row in rows):
        by_column = {(row["threads"], row["sampling"]): row for row in rows if row["drafter"] == drafter}
        table.add_row(drafter, *(f"{by_column[column]['tokens_per_s']:.1f} ({by_column[column]['against_sd']:.2f})" for column in columns))
    return table


def _drafters(trio: Trio, lengths: Sequence[int]) -> dict[str, Drafter]:
    two = {f"sd K={k}": ModelDrafter(trio.draft, FixedLength(k)) for k in lengths}
    three = {f"{one.name} {one.settings[0].label}": one.settings[0].build() for one in contenders_of(trio) if one.num_levels == 3}
    return {"target alone": ModelDrafter(trio.draft, FixedLength(0)), **two, **three}

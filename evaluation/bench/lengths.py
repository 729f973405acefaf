"""The loop at fixed draft lengths beside assisted generation at the same lengths: what the loop itself costs, whatever
policy runs in it.

against_assisted  tokens per second of the loop / of assisted generation, same pair, same fixed length, same sampling
against_plain     tokens per second of the loop / of the target's plain generation
"""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from decode.policies import FixedLength
from evaluation.bench.arms import generations_of, median_ratio, timed_in_turns
from evaluation.bench.schedules import assisted, constant
from evaluation.costs.measure import Loop
from evaluation.sheet import Sheet, crossed
from lm import Pair, Sampling


def length_rows(
    pair: Pair,
    prompts: Sequence[list[int]],
    samplings: Mapping[str, Sampling],
    *,
    lengths: Sequence[int],
    num_tokens: int,
    has_compiled: bool,
) -> Iterator[dict[str, Any]]:
    """One row per sampling and draft length, each as soon as it is measured."""
    for name, sampling in samplings.items():
        what: dict[str, Any] = {
            "pair": pair,
            "prompts": prompts,
            "sampling": sampling,
            "max_draft_length": max(lengths),
        }
        loops = {"ours": Loop(**what, max_new_tokens=num_tokens)}
        if has_compiled:
            loops["compiled"] = Loop(**what, max_new_tokens=num_tokens, compile=True)
        for k in lengths:
            timed = {
                which: assisted(pair, num_tokens, sampling, how)
                for which, how in (("plain", None), ("assisted", constant(k)))
            }
            timed |= {which: generations_of(loop.decoder(FixedLength(k)), num_tokens) for which, loop in loops.items()}
            seconds = timed_in_turns(timed, prompts)
            row: dict[str, Any] = {"sampling": name, "k": k}
            row |= {f"{arm}_tokens_per_s": num_tokens / median(taken_s) for arm, taken_s in seconds.items()}
            row["against_plain"] = median_ratio(seconds["plain"], seconds["ours"])
            row["against_assisted"] = median_ratio(seconds["assisted"], seconds["ours"])
            if has_compiled:
                row["compiled_against_assisted"] = median_ratio(seconds["assisted"], seconds["compiled"])
                if sampling.is_greedy:
                    row["compiled_tokens_differ"] = num_differing(loops["ours"], loops["compiled"], k)
            yield row


def num_differing(loop: Loop, other: Loop, k: int) -> int:
    """Greedy generations that two loops end with other tokens: near ties that rounding decides."""
    decoders = [each.decoder(FixedLength(k)) for each in (loop, other)]
    texts = (
        [decoder.generate(prompt, loop.max_new_tokens).token_ids for decoder in decoders] for prompt in loop.prompts
    )
    return sum(one != another for one, another in texts)


def length_sheet(rows: Sequence[Mapping[str, Any]]) -> Sheet:
    """Ratios against assisted generation: draft lengths down, threads and samplings across."""
    ordered = sorted(rows, key=lambda row: (row["k"], row["threads"], row["sampling"]))
    cells = ((str(row["k"]), heading_of(row), _ratios(row)) for row in ordered)
    return Sheet("tokens/s of the loop / of assisted generation (compiled)", crossed("K", cells), names=0)


def heading_of(row: Mapping[str, Any]) -> str:
    """The column of a row: its sampling and threads."""
    return f"{row['sampling']}, {row['threads']} thread{'s' * (row['threads'] > 1)}"


def _ratios(row: Mapping[str, Any]) -> str:
    compiled = row.get("compiled_against_assisted")
    return f"{row['against_assisted']:.2f}" + (f" ({compiled:.2f})" if compiled else "")

"""The loop itself on a clock, whatever policy runs in it: two models at fixed lengths, three models as hierarchies.

Fixed lengths stand beside assisted generation at the same lengths:

    against_assisted  tokens per second of the loop / of assisted generation, same pair, same fixed length, same
                      sampling
    against_plain     tokens per second of the loop / of the target's plain generation

With `decode.hierarchies` three models take turns with two:

    against_alone     tokens per second / of the same loop with nothing drafted
    against_sd        tokens per second / of plain speculation with the draft, at the best of the fixed lengths tried

Hierarchies run at the first of the settings that `evaluation hierarchy` chooses from on dev. The best fixed length is
chosen on the timed prompts themselves: a favour to plain speculation, so that a hierarchy that still wins does not owe
it to a badly chosen length.
"""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from decode.drafters.factory import PairModels
from decode.loop.drafter import Drafter, ModelDrafter
from decode.policies import FixedLength
from evaluation.bench.arms import generations_of, timed_in_turns
from evaluation.bench.schedules import assisted, constant
from evaluation.competitors import fastest
from evaluation.costs.measure import Loop
from evaluation.hierarchies.configurations import NO_DRAFT, competitors_of
from evaluation.intervals import median_ratio
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
        settings: dict[str, Any] = {
            "pair": pair,
            "prompts": prompts,
            "sampling": sampling,
            "max_draft_length": max(lengths),
        }
        loops = {"ours": Loop(**settings, max_new_tokens=num_tokens)}
        if has_compiled:
            loops["compiled"] = Loop(**settings, max_new_tokens=num_tokens, compile=True)
        for k in lengths:
            timed = {
                arm: assisted(pair, num_tokens, sampling, changes)
                for arm, changes in (("plain", None), ("assisted", constant(k)))
            }
            timed |= {arm: generations_of(loop.decoder(FixedLength(k)), num_tokens) for arm, loop in loops.items()}
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


def num_differing(loop: Loop, rival: Loop, k: int) -> int:
    """Greedy generations that two loops end with other tokens: near ties that rounding decides."""
    decoders = [loop_.decoder(FixedLength(k)) for loop_ in (loop, rival)]
    texts = (
        [decoder.generate(prompt, loop.max_new_tokens).token_ids for decoder in decoders] for prompt in loop.prompts
    )
    return sum(text != rival_text for text, rival_text in texts)


def length_sheet(rows: Sequence[Mapping[str, Any]]) -> Sheet:
    """Ratios against assisted generation: draft lengths down, threads and samplings across."""
    ordered = sorted(rows, key=lambda row: (row["k"], row["threads"], row["sampling"]))
    cells = ((str(row["k"]), heading_of(row), _ratios(row)) for row in ordered)
    return Sheet("tokens/s of the loop / of assisted generation (compiled)", crossed("K", cells), names=0)


def length_verdict(rows: Sequence[Mapping[str, Any]]) -> str:
    """The fastest fixed length of every sampling and number of threads, in a sentence each."""
    best = fastest(rows, of=heading_of, speed=lambda row: float(row["ours_tokens_per_s"]))
    return "\n".join(
        f"{heading}: K = {row['k']} is the fastest fixed length, {row['against_assisted']:.2f} times transformers' "
        "assisted generation of the same length."
        for heading, row in best.items()
    )


def heading_of(row: Mapping[str, Any]) -> str:
    """The column of a row: its sampling and threads."""
    return f"{row['sampling']}, {row['threads']} thread{'s' * (row['threads'] > 1)}"


def _ratios(row: Mapping[str, Any]) -> str:
    compiled = row.get("compiled_against_assisted")
    return f"{row['against_assisted']:.2f}" + (f" ({compiled:.2f})" if compiled else "")


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
    trio = PairModels(pair)
    for name, sampling in samplings.items():
        decoders = {
            drafter_name: trio.decoder(drafter, sampling=sampling, eos_ids=frozenset())
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


def hierarchy_verdict(rows: Sequence[Mapping[str, Any]]) -> str:
    """The fastest drafter of every sampling and number of threads, in a sentence each."""
    best = fastest(rows, of=heading_of, speed=lambda row: float(row["tokens_per_s"]))
    return "\n".join(
        f"{heading}: {row['drafter']} is the fastest drafter, {row['against_alone']:.2f} times the target alone."
        for heading, row in best.items()
    )


def _drafters(trio: PairModels, lengths: Sequence[int]) -> dict[str, Drafter]:
    two = {f"sd K={k}": ModelDrafter(trio.draft, FixedLength(k)) for k in lengths}
    three = {
        f"{competitor.name} {competitor.settings[0].label}": competitor.settings[0].build()
        for competitor in competitors_of(trio)
        if competitor.num_levels == 3
    }
    return {NO_DRAFT: ModelDrafter(trio.draft, FixedLength(0)), **two, **three}

"""Continuous batches on a clock (law 4.13): fixed lengths and policies at several sizes, in turns, and the curves that
their rounds give.

Every run decodes the same prompts under the same seed, enough of them to keep the batch full for a while; EOS is
switched off. The curves t_draft(sequences) and t_target(tokens) are of rounds in which no prompt was read.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, islice
from operator import itemgetter
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch

from decode.loop.batch import BatchRound
from decode.loop.counts import Counts
from decode.policies import FixedLength, Policy
from decode.policies.batch import BatchCosts, Curve, batched
from evaluation.costs.measure import Loop
from evaluation.gain import comparison, gain_of_turns
from evaluation.regression import rising
from evaluation.sources.clock import Clocked, clock_in_turns
from evaluation.table import Table, crossed

_TURNS = 3
_REQUESTS_PER_ROW = 2
_POINTS = 8


def measure_sizes(
    loop: Loop, policies: Mapping[str, Policy], sizes: Sequence[int]
) -> tuple[list[dict[str, Any]], BatchCosts]:
    """Run every policy at every size, in turns; `auto` runs as the batch's rule, with the curves of a first turn of
    fixed lengths, which `policies` must have.

    Returns:
        Rows of every policy at every size: median over turns of tokens/s, and the gain over the best fixed length with
        its interval over turns; and curves from all rounds of fixed lengths, which look at no token.
    """
    fixed = [name for name, policy in policies.items() if isinstance(policy, FixedLength)]
    rounds: list[BatchRound] = []
    for size in sizes:
        for name in fixed:
            _arm_of(loop, policies[name], size, rounds)(0)
    first = curves_of(rounds)
    rows: list[dict[str, Any]] = []
    for size in sizes:
        arms = {}
        for name, policy in policies.items():
            arms[name] = _arm_of(loop, batched(policy, size, first), size, rounds if name in fixed else [])
        seeds = {str(turn): turn for turn in range(1, _TURNS + 1)}
        runs = clock_in_turns(arms, seeds, desc=f"bench: batches of {size}", warm_up=0)
        rows += _rows_of(runs, fixed, size)
    return rows, curves_of(rounds)


def _rows_of(runs: Mapping[str, Sequence[Clocked]], fixed: Sequence[str], size: int) -> list[dict[str, Any]]:
    speeds = {
        name: median(run.counts.num_emitted / run.whole_s for run in of_policy) for name, of_policy in runs.items()
    }
    seconds = {name: [run.whole_s for run in of_policy] for name, of_policy in runs.items()}
    best = max(fixed, key=speeds.__getitem__)
    rows = []
    for name, speed in speeds.items():
        gain = gain_of_turns(seconds[best], seconds[name])  # all runs of a size write equally many tokens
        row = {"batch_size": size, "policy": name, "tokens_per_s": speed, "against_fixed": 1 + gain.value}
        rows.append(row | {"gain": gain})
    return rows


def _arm_of(loop: Loop, policy: Policy, size: int, rounds: list[BatchRound]) -> Callable[[int], Clocked]:
    """A batch of `size` sequences from a seed; its rounds are added to `rounds`."""
    decoder = loop.decoder(policy)
    prompts = list(islice(cycle(loop.prompts), _REQUESTS_PER_ROW * size))

    def decode(seed: int) -> Clocked:
        generator = torch.Generator().manual_seed(seed)
        started_s = perf_counter()
        batch = decoder.batch(prompts, loop.max_new_tokens, batch_size=size, generator=generator)
        rounds_s = []
        for round_ in batch:
            rounds.append(round_)
            rounds_s.append(perf_counter() - started_s)
        whole_s = perf_counter() - started_s
        return Clocked(
            counts=Counts(num_emitted=sum(generation.counts.num_emitted for generation in batch.generations)),
            whole_s=whole_s,
            first_token_s=rounds_s[0],
        )

    return decode


def curves_of(rounds: Sequence[BatchRound]) -> BatchCosts:
    """t_draft by sequences, from drafts in which all took every step, and t_target by tokens; neither ever falls.

    Raises:
        ValueError: no round that drafted.
    """
    draft = defaultdict(list)
    target = defaultdict(list)
    for round_ in rounds:
        if round_.num_joined:
            continue
        target[round_.num_tokens].append(round_.target_s)
        if round_.steps and len(set(round_.steps)) == 1:
            draft[round_.steps[0]].append(round_.draft_s / len(round_.steps))
    if not draft:
        raise ValueError("no round of these batches drafted with all of its sequences; measure a fixed length too")
    return BatchCosts(_thinned(rising(draft)), _thinned(rising(target)))


def _thinned(curve: Curve) -> Curve:
    points = np.linspace(0, len(curve.numbers) - 1, min(_POINTS, len(curve.numbers))).round().astype(int)
    return Curve(tuple(curve.numbers[at] for at in points), tuple(curve.seconds[at] for at in points))


def size_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Policies down, sizes across."""
    cells = []
    for row in sorted(rows, key=itemgetter("batch_size")):
        text = f", {row['gain'].text}" if row["gain"].value else ""
        cells.append((row["policy"], f"batch {row['batch_size']}", f"{row['tokens_per_s']:.1f}{text}"))
    title = "tokens/s of continuous batches, all sequences together, medians over turns"
    note = f"after the comma: over the best fixed length's of the same turn, with its 95 % interval over {_TURNS} turns"
    return Table(title, crossed("policy", cells), note)


def size_verdict(rows: Sequence[Mapping[str, Any]]) -> str:
    """How the fastest policy of every size compares with the best fixed length."""
    best = {row["batch_size"]: row for row in sorted(rows, key=itemgetter("batch_size", "tokens_per_s"))}
    sentences = []
    for size, row in best.items():
        compared = comparison(row["policy"], row["gain"], "the best fixed length")
        sentences.append(f"In batches of {size}, {compared}.")
    return " ".join(sentences)

"""Continuous batches on a clock (law 4.13): fixed lengths and policies at several sizes, in turns, and the curves that
their rounds give.

Every run decodes the same prompts under the same seed, enough of them to keep the batch full for a while; EOS is
switched off. The curves t_draft(sequences) and t_target(tokens) are of rounds in which no prompt was read.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain, cycle, islice
from operator import itemgetter
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch

from decode.loop.batch import BatchRound
from decode.policies import FixedLength, Policy
from decode.policies.batch import BatchCosts, Curve, batched
from evaluation.costs.measure import Loop
from evaluation.regression import rising
from evaluation.table import Table, crossed
from evaluation.turns import in_turns

_TURNS = 3
_REQUESTS_PER_ROW = 2
_POINTS = 8


def measure_sizes(
    loop: Loop, policies: Mapping[str, Policy], sizes: Sequence[int]
) -> tuple[list[dict[str, Any]], BatchCosts]:
    """Run every policy at every size, in turns; `auto` runs as the batch's rule, with the curves of a first turn of
    fixed lengths, which `policies` must have.

    Returns:
        Rows of every policy at every size, medians over turns of tokens/s and of the ratio to the best fixed length's;
        and curves from all rounds of fixed lengths, which look at no token.
    """
    prompts = {size: list(islice(cycle(loop.prompts), _REQUESTS_PER_ROW * size)) for size in sizes}
    fixed, rows = [name for name, policy in policies.items() if isinstance(policy, FixedLength)], []
    first_turn = (_run(loop, policies[name], prompts[size], size, seed=0)[1] for size in sizes for name in fixed)
    rounds = list(chain(*first_turn))
    first = curves_of(rounds)
    for size in sizes:
        speeds: dict[str, list[float]] = defaultdict(list)
        for turn, order in in_turns(policies, range(_TURNS + 1)):
            for name in order:
                speed, played = _run(loop, batched(policies[name], size, first), prompts[size], size, seed=turn)
                if turn:  # the first is a warm-up
                    speeds[name].append(speed)
                    rounds += played if name in fixed else []
        best = speeds[max(fixed, key=lambda name: median(speeds[name]))]
        for name in policies:
            against = median(speed / rival_speed for speed, rival_speed in zip(speeds[name], best, strict=True))
            row = {"batch_size": size, "policy": name, "tokens_per_s": median(speeds[name])}
            rows.append(row | {"against_fixed": against})
    return rows, curves_of(rounds)


def _run(
    loop: Loop, policy: Policy, prompts: Sequence[list[int]], size: int, *, seed: int
) -> tuple[float, list[BatchRound]]:
    """Tokens per second of one batch, and its rounds."""
    decoder, generator = loop.decoder(policy), torch.Generator().manual_seed(seed)
    started_s = perf_counter()
    batch = decoder.batch(prompts, loop.max_new_tokens, batch_size=size, generator=generator)
    rounds = list(batch)
    return sum(generation.counts.num_emitted for generation in batch.generations) / (perf_counter() - started_s), rounds


def curves_of(rounds: Sequence[BatchRound]) -> BatchCosts:
    """t_draft by sequences, from drafts in which all took every step, and t_target by tokens; neither ever falls.

    Raises:
        ValueError: no round that drafted.
    """
    draft, target = defaultdict(list), defaultdict(list)
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
    """A few points of a curve, spread evenly over its numbers."""
    points = np.linspace(0, len(curve.numbers) - 1, min(_POINTS, len(curve.numbers))).round().astype(int)
    return Curve(tuple(curve.numbers[at] for at in points), tuple(curve.seconds[at] for at in points))


def size_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Policies down, sizes across."""
    cells = (
        (row["policy"], f"batch {row['batch_size']}", f"{row['tokens_per_s']:.1f}, {row['against_fixed'] - 1:+.1%}")
        for row in sorted(rows, key=itemgetter("batch_size"))
    )
    title = "tokens/s of continuous batches, all sequences together, medians over turns"
    return Table(title, crossed("policy", cells), "after the comma: over the best fixed length's of the same turn")


def size_verdict(rows: Sequence[Mapping[str, Any]]) -> str:
    """The fastest policy of every size, in a sentence."""
    best = {row["batch_size"]: row for row in sorted(rows, key=itemgetter("batch_size", "tokens_per_s"))}
    named = (f"{row['policy']} {row['against_fixed'] - 1:+.1%} in batches of {size}" for size, row in best.items())
    return f"Fastest on this clock, over the best fixed length: {', '.join(named)}."

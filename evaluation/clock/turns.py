"""Generations of several policies on a clock, in turns: the loop that is configured, played to by a trace
(`evaluation.traces.played`).

Each turn visits every prompt, and on it every runner, in an order that rotates; both models hold the prompt before the
clock starts. The first turn is not timed: it compiles whatever the others will need, since those feed the very same
tokens, and holds every generation against its replay. Signals were recorded many positions at once and are read one by
one, so their last bits may differ, and a threshold may fall between: such a prompt is left out for everyone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from jaxtyping import Bool, Float

from decode.loop.decoder import Generation, SpeculativeDecoder
from evaluation.clock.primed import PrimedLoop
from evaluation.contest import Result
from evaluation.played import Played, lengths_of
from evaluation.traces.played import PlayedSampler
from evaluation.traces.trace import Array, Trace
from evaluation.turns import in_turns
from store.progress import Bar

_COUNTED = ("num_emitted", "num_drafted", "num_target", "num_accepted")
PARTS = ("wall_s", "draft_s", "target_s")
"""Parts of a generation's seconds that are kept."""


@dataclass(frozen=True)
class Clocked:
    """Seconds of all runners, and the rows on which all of them did what their replays say."""

    seconds: Float[Array, "runner repeat row part"]
    """Parts as `PARTS` names them."""
    agrees: Bool[Array, " row"]
    """Whether every runner did what its replay says."""

    def wall_s(self, runner: int) -> Float[Array, " row"]:
        """Seconds of each row that agrees, medians over the repeats."""
        return np.median(self.seconds[runner, ..., 0][:, self.agrees], axis=0)

    def share(self, runner: int, part: str) -> float:
        """Share of a runner's seconds that went into one part."""
        totals = self.seconds[runner][:, self.agrees].sum((0, 1))
        return float(totals[PARTS.index(part)] / totals[0])


def clock(
    loop: PrimedLoop, runners: Sequence[Result], trace: Trace, rows: Sequence[int], *, repeats: int, name: str
) -> Clocked:
    """Play the whole trace to every runner, once untimed and then `repeats` times.

    Args:
        loop: the loop of the config, which writes recorded texts.
        runners: the settings that are timed.
        trace: the rows that are played.
        rows: their numbers on the runners' test split.
        repeats: timed turns.
        name: the name of the dataset, for the progress bar.
    """
    num = len(trace.rows)
    seconds, agrees = np.zeros((len(runners), repeats, num, len(PARTS))), np.ones(num, dtype=bool)
    with Bar(total=(repeats + 1) * num * len(runners), desc=f"clock: {name}", unit="generations") as bar:
        decoders, replays = (
            [loop.decoder(runner.policy) for runner in runners],
            [replayed_on(runner, rows) for runner in runners],
        )
        for turn in range(repeats + 1):
            for row, order in in_turns(range(len(runners)), range(num), first=turn):
                loop.prime(trace.rows[row].prompt_ids)
                for number in order:
                    generation, timed = _timed(decoders[number], trace, row)
                    if turn:
                        seconds[number, turn - 1, row] = timed
                    elif not _agrees(generation, replays[number], row):
                        agrees[row] = False
                    bar.update()
    return Clocked(seconds, agrees)


def replayed_on(result: Result, rows: Sequence[int]) -> Played:
    """What a result did on some test rows."""
    assert result.played is not None
    return result.played.select([0], rows)


def _timed(decoder: SpeculativeDecoder, trace: Trace, row: int) -> tuple[Generation, tuple[float, ...]]:
    request, draws = trace.rows[row], PlayedSampler(trace, row)
    started_s = perf_counter()
    generation = decoder.generate(request.prompt_ids, request.limit, generator=draws)
    wall_s = perf_counter() - started_s
    rounds = generation.rounds
    return generation, (wall_s, sum(round_.draft_s for round_ in rounds), sum(round_.target_s for round_ in rounds))


def _agrees(generation: Generation, replayed: Played, row: int) -> bool:
    """Whether a generation is its replay, draft lengths included; a draft that is read at its end alone may pay more
    forwards.
    """
    lengths = lengths_of(generation, replayed.lengths.shape[-1] - 1)
    counts = all(getattr(generation.counts, name) == getattr(replayed.counts, name)[0, row] for name in _COUNTED)
    return counts and np.array_equal(lengths, replayed.lengths[0, row])

"""Generations of several policies on a clock, in turns: the loop that is configured, played to by a trace
(`evaluation.traces.sampler`).

Each turn visits every prompt, and on it every runner, in an order that rotates. Both models hold the prompt before the
clock starts (law 4.5: after `prime(prompt)` the cache holds prompt[:-1], a prefix of committed[:-1], and `reset`
returns to that); beside a feature draft the first round reads the prompt, for every policy alike. The first turn is not
timed: it compiles whatever the others will need, since those feed the very same tokens, and holds every generation
against its replay. Signals were recorded many positions at once and are read one by one, so their last bits may differ,
and a threshold may fall between: such a prompt is left out for everyone.
"""

from collections.abc import Sequence
from functools import cached_property, partial
from time import perf_counter

import numpy as np
from jaxtyping import Bool, Float

from decode.drafters.factory import PairModels
from decode.loop.decoder import Generation
from evaluation.contest import Result
from evaluation.costs.measure import Loop
from evaluation.played import Played
from evaluation.traces.sampler import PlayedSampler
from evaluation.traces.trace import Array, Trace
from evaluation.turns import in_turns
from lm import CachedModel
from store.progress import Bar

_COUNTED = ("num_emitted", "num_drafted", "num_target", "num_accepted")


class PrimedModel(CachedModel):
    """A `CachedModel` whose `reset` keeps the prompt."""

    _num_primed = 0

    def prime(self, prompt_ids: Sequence[int]) -> None:
        """Read all of the prompt but its last token; sequences start from there until the next call."""
        self._num_primed = 0
        self.reset()
        if len(prompt_ids) > 1:
            self.feed(prompt_ids[:-1])
        self._num_primed = len(prompt_ids) - 1

    def reset(self) -> None:
        """Go back to the end of the prompt."""
        if self._num_primed:
            self.roll_back(self._num_primed)
        else:
            super().reset()


class PrimedLoop(Loop):
    """The loop of a config, eager or compiled, for several policies that take turns on one prompt."""

    @property
    def eos_ids(self) -> frozenset[int]:
        return self.pair.eos_ids

    def prime(self, prompt_ids: Sequence[int]) -> None:
        """Set the text that every decoder starts from next."""
        for model in (self.models.target, *self.models.drafts.values()):
            if isinstance(model, PrimedModel) and model.recorder is None:
                model.prime(prompt_ids)

    @cached_property
    def models(self) -> PairModels:
        return PairModels(self.pair, self.compile, kind=partial(PrimedModel, compile=self.compile))


def clock(
    loop: PrimedLoop, runners: Sequence[Result], trace: Trace, rows: Sequence[int], *, repeats: int, name: str
) -> tuple[Float[Array, "runner repeat row part"], Bool[Array, " row"]]:
    """Play the whole trace to every runner, once untimed and then `repeats` times.

    Args:
        loop: the loop of the config, which writes recorded texts.
        runners: the settings that are timed.
        trace: the rows that are played.
        rows: their numbers on the runners' test split.
        repeats: timed turns.
        name: the name of the dataset, for the progress bar.

    Returns:
        Seconds of each generation, of its drafts and of its verifications; and the rows on which every runner did what
        its replay says.
    """
    num = len(trace.rows)
    seconds, agrees = np.zeros((len(runners), repeats, num, 3)), np.ones(num, dtype=bool)
    with Bar(total=(repeats + 1) * num * len(runners), desc=f"clock: {name}", unit="generations") as bar:
        decoders = [loop.decoder(runner.policy) for runner in runners]
        replays = [replayed_on(runner, rows) for runner in runners]
        for turn in range(repeats + 1):
            for row, order in in_turns(range(len(runners)), range(num), first=turn):
                request = trace.rows[row]
                loop.prime(request.prompt_ids)
                for number in order:
                    draws, started_s = PlayedSampler(trace, row), perf_counter()
                    generation = decoders[number].generate(request.prompt_ids, request.limit, generator=draws)
                    wall_s, rounds = perf_counter() - started_s, generation.rounds
                    if turn:
                        parts_s = (sum(round_.draft_s for round_ in rounds), sum(round_.target_s for round_ in rounds))
                        seconds[number, turn - 1, row] = (wall_s, *parts_s)
                    elif not _agrees(generation, replays[number], row):
                        agrees[row] = False
                    bar.update()
    return seconds, agrees


def replayed_on(result: Result, rows: Sequence[int]) -> Played:
    """What a result did on some test rows."""
    assert result.played is not None
    return result.played.select([0], rows)


def _agrees(generation: Generation, replayed: Played, row: int) -> bool:
    """Whether a generation is its replay, draft lengths included; a draft that is read at its end alone may pay more
    forwards.
    """
    drafted = [len(round_.drafted) for round_ in generation.rounds]
    lengths = np.bincount(drafted, minlength=replayed.lengths.shape[-1])
    counts = all(getattr(generation.counts, name) == getattr(replayed.counts, name)[0, row] for name in _COUNTED)
    return counts and np.array_equal(lengths, replayed.lengths[0, row])

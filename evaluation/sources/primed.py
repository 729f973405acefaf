"""The source of `evaluation evaluate --clock`: policies that were replayed decode the same test prompts on a clock.

The runners take turns on every prompt (`evaluation.sources.clock`). Both models hold the prompt before the clock starts
(law 4.5: after `prime(prompt)` the cache holds prompt[:-1], a prefix of committed[:-1], and `reset` returns to that);
beside a feature draft the first round reads the prompt, for every policy alike. Every prompt is decoded once before
anything is timed: this compiles whatever the timed generations will need, since those feed the very same tokens, and
holds every generation against its replay. Signals were recorded many positions at once and are read one by one, so
their last bits may differ, and a threshold may fall between: such a prompt is left out for everyone.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from decode.drafters.factory import PairModels
from decode.experiment import Experiment
from decode.policies import FixedLength
from evaluation.clock import ClockReport, about_clock, report_of
from evaluation.competitor import Competitor
from evaluation.contest import Contest, Result, replay_arms, result_of
from evaluation.costs.measure import Loop
from evaluation.families import ALONE, REPLAYED
from evaluation.gain import Splits
from evaluation.played import Played
from evaluation.sources.clock import Clocked, clock_generation, clock_in_turns, played_of
from evaluation.traces.sampler import PlayedSampler
from evaluation.traces.trace import Trace
from lm import CachedModel

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

    def reset(self, num_tokens: int = 0) -> None:
        """Go back to the end of the prompt."""
        if self._num_primed:
            self.roll_back(self._num_primed)
        else:
            super().reset(num_tokens)

    def forget(self, length: int) -> None:
        """Keep the copies that a return to the end of the prompt needs."""
        super().forget(min(length, self._num_primed or length))


class PrimedLoop(Loop):
    """The loop of a config for several policies that take turns on one prompt."""

    def prime(self, prompt_ids: Sequence[int]) -> None:
        """Set the text that every decoder starts from next, unless it is set."""
        if self.primed == [*prompt_ids]:
            return
        self.primed[:] = prompt_ids
        for model in (self.models.target, *self.models.drafts.values()):
            if isinstance(model, PrimedModel) and model.recorder is None:
                model.prime(prompt_ids)

    @cached_property
    def primed(self) -> list[int]:
        """The text that the models hold."""
        return []

    @cached_property
    def models(self) -> PairModels:
        return PairModels(self.pair, model_class=PrimedModel)


def clock_dataset(
    experiment: Experiment, contest: Contest, test: Trace, *, num_prompts: int, repeats: int
) -> ClockReport:
    """The first test prompts of one dataset, every turn of each once, on the loop of the config."""
    loop = PrimedLoop.of(experiment, ends_at_eos=True)
    rows = clocked_rows(test, num_prompts)
    alone = next(replay_arms([Competitor(ALONE, ALONE, FixedLength(0), ({},))], Splits(test, test)))
    runners = [result_of(alone, 0, contest.times)]
    runners += [result for name, result in contest.results.items() if name not in REPLAYED]
    on_clock = clock(loop, runners, test.select(rows), rows, repeats=repeats, name=contest.dataset)
    num_left_out = len(rows) - len(on_clock[0].prompt_of_row)
    return report_of(
        on_clock,
        runners,
        contest.times,
        dataset=contest.dataset,
        about=about_clock(on_clock[0], num_left_out, num_repeats=repeats),
    )


def clocked_rows(trace: Trace, num_prompts: int) -> list[int]:
    """Rows of the first prompts, each turn with its first draw."""
    firsts = {(row.dataset, row.id): number for number, row in reversed([*enumerate(trace.rows)])}
    return sorted(number for number in firsts.values() if trace.prompt_of_row[number] < num_prompts)


def clock(
    loop: PrimedLoop, runners: Sequence[Result], trace: Trace, rows: Sequence[int], *, repeats: int, name: str
) -> list[Played]:
    """Play the trace to every runner, once untimed and then `repeats` times, each runner under its own family.

    Args:
        loop: decodes.
        runners: what decodes; the replays of their test splits have the trace's rows as numbers `rows`.
        trace: is played.
        rows: see `runners`.
        repeats: of every timed generation.
        name: of the dataset, for messages.

    Returns:
        What each runner did, with its seconds, on the rows on which all of them did what their replays say.

    Raises:
        ValueError: there is no such row.
    """
    arms = {runner.family: _arm_of(loop, runner, trace) for runner in runners}
    replays = [runner.played.select([0], rows) for runner in runners]
    every_row = {str(row): row for row in range(len(trace.rows))}
    checked = clock_in_turns(arms, every_row, desc=f"clock: {name}, checks")
    agreeing = {
        key: row
        for key, row in every_row.items()
        if all(_agrees(checked[runner.family][row], of, row) for runner, of in zip(runners, replays, strict=True))
    }
    if not agreeing:
        raise ValueError(f"{name}: no response is decoded as it was replayed; record the trace again with this pair")
    runs = clock_in_turns(arms, agreeing, desc=f"clock: {name}", repeats=repeats)
    kept = list(agreeing.values())
    return [
        replace(of.select([0], kept), seconds=played_of([runs[runner.family]]).seconds)
        for runner, of in zip(runners, replays, strict=True)
    ]


def _arm_of(loop: PrimedLoop, runner: Result, trace: Trace) -> Callable[[int], Clocked]:
    decoder = loop.decoder(runner.policy)

    def decode(row: int) -> Clocked:
        request = trace.rows[row]
        loop.prime(request.prompt_ids)
        return clock_generation(decoder, [*request.prompt_ids], request.limit, draws=PlayedSampler(trace, row))

    return decode


def _agrees(run: Clocked, replayed: Played, row: int) -> bool:
    """Whether a generation is its replay, draft lengths included; a draft that is read at its end alone may pay more
    forwards.
    """
    lengths = np.zeros_like(replayed.lengths[0, row])
    lengths[: len(run.lengths)] = run.lengths
    counts = all(getattr(run.counts, name) == getattr(replayed.counts, name)[0, row] for name in _COUNTED)
    return counts and np.array_equal(lengths, replayed.lengths[0, row])

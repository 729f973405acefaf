"""`evaluation evaluate --clock`: clocked generations beside what the times predict of the same prompts (law 4.9).

Every family decodes at the setting that dev chose, in real generations that the trace is played to
(`evaluation.traces.sampler`), and so does the target alone. The oracle and the perfect head are left out: they know
what no loop knows.

The runners take turns on every prompt (`evaluation.sources.clock`). Both models hold the prompt before the clock starts
(law 4.5: after `prime(prompt)` the cache holds prompt[:-1], a prefix of committed[:-1], and `reset` returns to that);
beside a feature draft the first round reads the prompt, for every policy alike. Every prompt is decoded once before
anything is timed: this compiles whatever the timed generations will need, since those feed the very same tokens, and
holds every generation against its replay. Signals were recorded many positions at once and are read one by one, so
their last bits may differ, and a threshold may fall between: such a prompt is left out for everyone.

    difference            clocked tokens/s over predicted ones - 1
    draft, verify, rest   clocked less predicted seconds of drafts, of verifications, and between rounds (where nothing
                          is predicted), over all predicted seconds
    common                median difference of all families: the machine's speed now against that when it was timed
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from decode.drafters.factory import PairModels
from decode.experiment import Experiment
from decode.policies import FixedLength
from evaluation.competitor import Competitor
from evaluation.contest import Contest, Result, replay_arms, result_of
from evaluation.costs.measure import Loop
from evaluation.families import ALONE, REPLAYED, family
from evaluation.gain import MIN_PROMPTS, Splits
from evaluation.played import Played
from evaluation.sources.clock import Clocked, clock_generation, clock_in_turns, latency_of, played_of
from evaluation.table import Table, flat, shown
from evaluation.times import Times
from evaluation.traces.sampler import PlayedSampler
from evaluation.traces.trace import Trace
from lm import CachedModel

TOLERANCE = 0.03
"""A difference beyond this is pointed out."""
_PARTS = {"draft": "drafting", "verify": "verification", "rest": "the rest"}
_GAINS = ("predicted_gain", "clocked_gain")
_COLUMNS = {"policy": ("policy", ""), "setting": ("setting", "")}
_COLUMNS |= {f"{kind} tokens/s": (f"{kind}_tokens_per_s", ".1f") for kind in ("predicted", "clocked")}
_COLUMNS |= {"difference": ("difference", "+.1%")}
_COLUMNS |= {f"of it {words}": (part, "+.1%") for part, words in _PARTS.items()}
_COLUMNS |= {f"{kind} gain": (f"{kind}_gain", "") for kind in ("predicted", "clocked")}
_COLUMNS |= {f"request p{percent} s": (f"request_p{percent}_s", ".3g") for percent in (50, 95)}
_COLUMNS |= {f"first token p{percent} s": (f"first_token_p{percent}_s", ".2g") for percent in (50, 95)}
_COUNTED = ("num_emitted", "num_drafted", "num_target", "num_accepted")


@dataclass(frozen=True)
class ClockReport:
    """What was predicted and what the clock says of the same families on the same prompts of one dataset."""

    predicted: Contest
    clocked: Contest
    about: str = ""
    """What was clocked, in a few words."""

    @property
    def dataset(self) -> str:
        return self.clocked.dataset

    def difference(self, name: str) -> float:
        """Clocked over predicted tokens per second of a family, less 1."""
        return self.clocked.results[name].tokens_per_s / self.predicted.results[name].tokens_per_s - 1

    @cached_property
    def common(self) -> float:
        """The median difference of all families."""
        return float(np.median([self.difference(name) for name in self.clocked.results]))

    @cached_property
    def parts(self) -> dict[str, dict[str, float | None]]:
        """Family -> clocked less predicted seconds of each part, over all predicted seconds, and clocked over predicted
        seconds of drafts (None without any) and of verifications.
        """
        return {name: _parts(_played(result), self.predicted.times) for name, result in self.clocked.results.items()}

    @property
    def verdict(self) -> str:
        """The families that differ by more than `TOLERANCE`, and the part of a round that they differ in."""
        listed = []
        for name in self.clocked.results:
            difference = self.difference(name)
            if abs(difference) > TOLERANCE:
                sizes = {words: abs(self.parts[name][part] or 0.0) for part, words in _PARTS.items()}
                most = max(sizes, key=sizes.__getitem__)
                listed.append(f"{family(name).label} {difference:+.1%}, most of it {most}")
        if not listed:
            return f"every family is within {TOLERANCE:.0%} of its prediction"
        differing = ", ".join(listed)
        return (
            f"beyond {TOLERANCE:.0%} of the prediction: {differing}; {self.common:+.1%} is the median of all families"
        )

    @property
    def rows(self) -> list[dict[str, Any]]:
        """A row for each family, for tables and JSON."""
        return [
            {
                "family": name,
                "setting": result.label,
                "predicted_tokens_per_s": self.predicted.results[name].tokens_per_s,
                "clocked_tokens_per_s": result.tokens_per_s,
                "difference": self.difference(name),
                **self.parts[name],
                "predicted_gain": self.predicted.gain(name),
                "clocked_gain": self.clocked.gain(name),
                **latency_of(_played(result)),
                "tokens": result.throughput.tokens.tolist(),
                "seconds": result.throughput.seconds.tolist(),
            }
            for name, result in self.clocked.results.items()
        ]

    def as_dict(self) -> dict[str, Any]:
        """This dataset's entry of clock.json: what was clocked, its verdict, and a row for every policy."""
        return {
            "dataset": self.dataset,
            "about": self.about,
            "verdict": self.verdict,
            "common": self.common,
            "rows": [flat(row) for row in self.rows],
        }


def _played(result: Result) -> Played:
    assert result.played is not None
    return result.played


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


def clock_table(report: ClockReport) -> Table:
    """A row for each family."""
    rows = [
        row | {name: row[name].text for name in _GAINS} | {"policy": family(row["family"]).label} for row in report.rows
    ]
    note = (
        f"{report.verdict}; gains over the best fixed length, with 95 % paired bootstrap intervals over prompts "
        f"(from {MIN_PROMPTS} on); 50th and 95th percentiles of a request's seconds and of those to its first token, "
        "without reading the prompt"
    )
    return Table(f"{report.dataset} on a clock: {report.about}", shown(rows, _COLUMNS), note, names=2)


def check_clock(num_prompts: int, repeats: int, *, as_recorded: bool = False) -> None:
    """Raise ValueError unless a clock can run so often; on a record, which may have no prompts, it cannot at all."""
    if num_prompts > 0 and as_recorded:
        raise ValueError("--clock decodes, and decode.as_recorded has neither models nor prompts; give one of the two")
    if num_prompts < 0:
        raise ValueError(f"clock is {num_prompts}; it is a number of test prompts, 0 for none")
    if repeats < 1:
        raise ValueError(f"repeats is {repeats}; every generation is timed at least once")


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
    about = about_clock(on_clock[0], num_left_out, num_repeats=repeats)
    return report_of(on_clock, runners, contest.times, dataset=contest.dataset, about=about)


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
    replays = [played_on(runner, rows) for runner in runners]
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


def played_on(result: Result, rows: Sequence[int]) -> Played:
    """What a result did on some test rows."""
    return _played(result).select([0], rows)


def _agrees(run: Clocked, replayed: Played, row: int) -> bool:
    """Whether a generation is its replay, draft lengths included; a draft that is read at its end alone may pay more
    forwards.
    """
    lengths = np.zeros_like(replayed.lengths[0, row])
    lengths[: len(run.lengths)] = run.lengths
    counts = all(getattr(run.counts, name) == getattr(replayed.counts, name)[0, row] for name in _COUNTED)
    return counts and np.array_equal(lengths, replayed.lengths[0, row])


def report_of(
    on_clock: Sequence[Played], runners: Sequence[Result], times: Times, *, dataset: str, about: str = ""
) -> ClockReport:
    """Every runner, the best fixed length among them, predicted and clocked on the same rows; rows of one prompt, such
    as the turns of a conversation, count together. `on_clock`: what each runner did, with its seconds (`clock`).
    """
    predicted = {}
    clocked = {}
    for runner, played in zip(runners, on_clock, strict=True):
        # the error of the times is left out on both sides: the clock shows it
        same = replace(runner, played=played, arm=None, times=None)
        predicted[runner.family] = replace(same, throughput=times.throughput(played).at(0))
        clocked[runner.family] = replace(same, throughput=played.throughput.at(0))
    return ClockReport(Contest(dataset, times, predicted), Contest(dataset, times, clocked), about)


def about_clock(played: Played, num_left_out: int, *, num_repeats: int) -> str:
    """What was clocked, in a few words."""
    num_rows = len(played.prompt_of_row)
    num_prompts = len(np.unique(played.prompt_of_row))
    responses = f"{num_rows} responses to " if num_prompts < num_rows else ""
    about = f"{responses}{num_prompts} test prompts, medians of {num_repeats} generations each, prompts read beforehand"
    if num_left_out:
        about += f"; {num_left_out} responses left out, where a threshold falls between the last bits of loop and trace"
    return about


def _parts(played: Played, times: Times) -> dict[str, float | None]:
    """Clocked less predicted seconds of each part, over all predicted seconds; and clocked over predicted seconds of
    drafts, None without any, and of verifications.
    """
    assert played.seconds is not None
    whole, draft, verify = (float(played.seconds[name].sum()) for name in ("whole_s", "drafting_s", "verifying_s"))
    total_s = float(times.time_s(played).sum())
    lengths = played.lengths[0].sum(0)
    verify_s = float(lengths @ times.target_s(np.arange(len(lengths))))
    seconds = (draft - (total_s - verify_s), verify - verify_s, whole - draft - verify)
    draft_pace = float(draft / (total_s - verify_s)) if played.counts.num_drafted.sum() else None
    paces = {"draft_pace": draft_pace, "verify_pace": float(verify / verify_s)}
    return {part: float(part_s / total_s) for part, part_s in zip(_PARTS, seconds, strict=True)} | paces

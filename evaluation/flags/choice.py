"""The setting of an engine's rule that is fastest on dev, judged on test beside the engine's default, the best fixed
length, no speculation, and what it lacks: our policies and heads under the same drafts and costs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from decode.policies import FixedLength
from decode.policies.registry import registered
from evaluation.contest.arms import Arm, replay_arms
from evaluation.contest.grids import Grid, make_grid
from evaluation.costs.model import CostModel
from evaluation.flags.engines import Drafting, Engine, Setting
from evaluation.intervals import Gain, Resamples, Splits, Work, gain_of
from evaluation.traces.trace import Trace

Traces = Mapping[Drafting, Splits[Trace]]
Counted = Int[np.ndarray, "setting prompt"]
NONE, DEFAULT, FIXED, FLAGS = "no speculation", "the engine's default", "best fixed length", "these flags"


class Times(NamedTuple):
    """What forwards cost."""

    alone: CostModel
    """Without speculation: t_target(0) counts."""
    speculating: CostModel
    """With it."""

    @classmethod
    def of(cls, cost: CostModel, engine: Engine) -> "Times":
        """The costs of an engine, what each of its rounds pays beyond the draft in t_target(k)."""
        extra_s = engine.extra_forwards * cost.t_draft_s
        return cls(cost, replace(cost, t_target_s=tuple(seconds + extra_s for seconds in cost.t_target_s)))


class Option(NamedTuple):
    """One way to run: what it did on both splits."""

    label: str
    setting: Setting
    work: Splits[Work]
    drafting: Drafting | None = None
    """None: it drafts nothing."""

    @property
    def speeds(self) -> Splits[float]:
        """Tokens per second on both splits."""
        return Splits(*(float(work.tokens.sum() / work.seconds.sum()) for work in self.work))


@dataclass(frozen=True)
class Choice:
    """A competitor at its fastest option on dev."""

    what: str
    option: Option
    reached: Float[np.ndarray, " resample"]
    """Tokens per second on test of each resample, whose dev prompts choose anew."""

    @property
    def tokens_per_s(self) -> float:
        """Predicted throughput on test."""
        return self.option.speeds.test

    def over(self, base: "Choice") -> Gain:
        """The predicted gain over another competitor."""
        return gain_of(self.tokens_per_s / base.tokens_per_s - 1, base.reached, self.reached)


class Contest:
    """Every competitor at given costs."""

    def __init__(self, engine: Engine, traces: Traces, times: Times) -> None:
        self.engine, self.traces, self.times = engine, traces, times
        dev, test = self.home
        self.resamples = Resamples(dev.num_prompts, test.num_prompts, times.alone.errors)

    @property
    def home(self) -> Splits[Trace]:
        """Traces of the engine's default way of drafting."""
        return next(iter(self.traces.values()))

    @cached_property
    def arms(self) -> dict[Drafting, Arm]:
        """The engine's rule at every setting, under each way of drafting."""
        entry, longest = registered(self.engine.rule), self.home.dev.max_draft_length
        values = (self.engine.values or entry.values)(longest)
        grid = make_grid(FLAGS, self.engine.rule, values)
        return {drafting: arm_of(grid, traces) for drafting, traces in self.traces.items()}

    @cached_property
    def options(self) -> list[Option]:
        """Every setting of the engine."""
        return [option for drafting, arm in self.arms.items() for option in self._options(arm, drafting)]

    @cached_property
    def none(self) -> Option:
        """The target alone."""
        grid = Grid(NONE, NONE, FixedLength(0), ({},))
        return options_of(arm_of(grid, self.home), self.times.alone, None)[0]

    @property
    def best_on_test(self) -> float:
        """The highest throughput on test, whatever dev says."""
        return max(option.speeds.test for option in [self.none, *self.options])

    def choice(self, what: str, options: Sequence[Option]) -> Choice:
        """The fastest of these options on dev."""
        best = max(options, key=lambda option: option.speeds.dev)
        return Choice(what, best, self.resamples.throughput([joined(options)]))

    def choices(self) -> dict[str, Choice]:
        """No speculation, the default where there is one, the best fixed length, and the flags."""
        default = self.engine.default
        same = [] if default is None else self._at(default)
        lengths = Grid(FIXED, FIXED, FixedLength(self._lengths), tuple({"k": int(k)} for k in self._lengths))
        fixed = self._options(arm_of(lengths, self.home), next(iter(self.traces)))
        groups = {NONE: [self.none], DEFAULT: same, FIXED: fixed, FLAGS: [self.none, *self.options]}
        return {what: self.choice(what, options) for what, options in groups.items() if options}

    @property
    def _lengths(self) -> np.ndarray:
        return np.arange(1, self.home.dev.max_draft_length + 1)

    def _at(self, setting: Setting) -> list[Option]:
        """The setting under the default way of drafting."""
        policy = make_grid(DEFAULT, self.engine.rule, {name: [value] for name, value in setting.items()})
        return self._options(arm_of(policy, self.home), next(iter(self.traces)))

    def _options(self, arm: Arm, drafting: Drafting) -> list[Option]:
        """The engine's settings, with what it pays for their drafts."""
        cost, options = self.times.speculating, options_of(arm, self.times.speculating, drafting)
        if not self.engine.drafts_whole:
            return options
        rounds = Splits(*(each.per_prompt(each.counts.num_target) for each in (arm.dev, arm.test)))
        texts = Splits(*(each.per_prompt(np.ones_like(each.counts.num_target)) for each in (arm.dev, arm.test)))
        return [
            option._replace(
                work=Splits(
                    whole(option.work.dev, int(option.setting["k"]), cost, rounds.dev[[place]], texts.dev[[place]]),
                    whole(option.work.test, int(option.setting["k"]), cost, rounds.test[[place]], texts.test[[place]]),
                )
            )
            for place, option in enumerate(options)
        ]


def whole(work: Work, k: int, cost: CostModel, rounds: Counted, texts: Counted) -> Work:
    """The work of an engine that drafts and verifies its full number in every round, whatever room a text has left, and
    drafts once more for each text.
    """
    return work._replace(
        drafting_s=cost.t_draft_s * k * (rounds + texts), verifying_s=float(cost.target_s(np.array([k]))[0]) * rounds
    )


def arm_of(grid: Grid, traces: Splits[Trace]) -> Arm:
    """One grid on both splits."""
    return next(replay_arms([grid], traces))


def options_of(arm: Arm, cost: CostModel, drafting: Drafting | None) -> list[Option]:
    """The settings of an arm at these costs."""
    works = arm.work(cost)
    label = "" if drafting is None else drafting.label
    return [
        Option(label, setting, Splits(*(rows_of(work, place) for work in works)), drafting)
        for place, setting in enumerate(arm.grid.settings)
    ]


def rows_of(work: Work, place: int) -> Work:
    """The work of one setting."""
    return Work(**{name: getattr(work, name)[[place]] for name in Work._fields[:-1]}, stop_kind=work.stop_kind)


def joined(options: Sequence[Option]) -> Splits[Work]:
    """The work of several options, one row each."""

    def of(works: Sequence[Work]) -> Work:
        parts = {name: np.concatenate([getattr(work, name) for work in works]) for name in Work._fields[:-1]}
        return Work(**parts, stop_kind=works[0].stop_kind)

    return Splits(of([option.work.dev for option in options]), of([option.work.test for option in options]))

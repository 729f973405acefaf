"""The setting of an engine's rule that is fastest on dev, judged on test beside the engine's default, the best fixed
length, no speculation, and what it lacks: our policies and heads under the same drafts and costs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from decode.policies import FixedLength
from decode.policies.registry import registered
from evaluation.contest.arms import Arm, replay_arms
from evaluation.contest.grids import Grid, make_grid
from evaluation.costs.model import CostModel
from evaluation.flags.engines import Drafting, Engine, Setting
from evaluation.intervals import Gain, Spent, Splits, gain_over
from evaluation.traces.replay import Replayed
from evaluation.traces.trace import Trace

Traces = Mapping[Drafting, Splits[Trace]]
NONE, DEFAULT, FIXED, FLAGS = "no speculation", "the engine's default", "best fixed length", "these flags"


class Times(NamedTuple):
    """What forwards cost, and which of them an engine pays."""

    alone: CostModel
    """Without speculation: t_target(0) counts."""
    speculating: CostModel
    """With it."""
    drafts_whole: bool = False
    """As of the engine."""

    @classmethod
    def of(cls, cost: CostModel, engine: Engine) -> "Times":
        """The costs of an engine, what each of its rounds pays beyond the draft in t_target(k)."""
        extra_s = engine.extra_forwards * cost.t_draft_s
        speculating = replace(cost, t_target_s=tuple(seconds + extra_s for seconds in cost.t_target_s))
        return cls(cost, speculating, engine.drafts_whole)

    def spent(self, played: Replayed, settings: Sequence[Setting]) -> Spent:
        """What an engine pays for what its rule did at these settings, replayed or decoded."""
        spent, cost = self.speculating.spent(played), self.speculating
        if not self.drafts_whole:
            return spent
        lengths = np.array([[int(setting["k"])] for setting in settings])
        rounds = played.per_prompt(played.counts.num_target)
        texts = played.per_prompt(np.ones_like(played.counts.num_target))
        stopping_s = cost.stop_s(played.stop_kind) * played.per_prompt(played.counts.num_draft_forwards)
        # a full number in every round, whatever room a text has left, and once more for each text
        drafting_s = cost.t_draft_s * lengths * (rounds + texts)
        return spent._replace(seconds=drafting_s + stopping_s + cost.target_s(lengths) * rounds)


class Option(NamedTuple):
    """One way to run: what it did on both splits."""

    label: str
    setting: Setting
    spent: Splits[Spent]
    drafting: Drafting | None = None
    """None: it drafts nothing."""

    @property
    def speeds(self) -> Splits[float]:
        """Tokens per second on both splits."""
        return Splits(*(float(spent.tokens_per_s) for spent in self.spent))


@dataclass(frozen=True)
class Choice:
    """A competitor at its fastest option on dev."""

    what: str
    option: Option

    @property
    def tokens_per_s(self) -> float:
        """Predicted throughput on test."""
        return self.option.speeds.test

    def over(self, base: "Choice") -> Gain:
        """The predicted gain over another competitor."""
        return gain_over(base.option.spent.test, self.option.spent.test)


class Contest:
    """Every competitor at given costs."""

    def __init__(self, engine: Engine, traces: Traces, times: Times) -> None:
        self.engine, self.traces, self.times = engine, traces, times

    @property
    def home(self) -> Splits[Trace]:
        """Traces of the engine's default way of drafting."""
        return next(iter(self.traces.values()))

    @cached_property
    def arms(self) -> dict[Drafting, Arm]:
        """The engine's rule at every setting, under each way of drafting."""
        entry, longest = registered(self.engine.rule), self.home.dev.max_draft_length
        values = (self.engine.values or entry.values)(longest)
        grid = make_grid(FLAGS, self.engine.rule, values, kind=self.engine.kind)
        return {drafting: arm_of(grid, traces) for drafting, traces in self.traces.items()}

    @cached_property
    def options(self) -> list[Option]:
        """Every setting of the engine."""
        return [option for drafting, arm in self.arms.items() for option in self._options(arm, drafting)]

    @cached_property
    def none(self) -> Option:
        """The target alone."""
        grid = Grid(NONE, NONE, FixedLength(0), ({},))
        arm = arm_of(grid, self.home)
        return options_of(arm, arm.spent(self.times.alone), None)[0]

    @property
    def best_on_test(self) -> float:
        """The highest throughput on test, whatever dev says."""
        return max(option.speeds.test for option in [self.none, *self.options])

    def choice(self, what: str, options: Sequence[Option]) -> Choice:
        """The fastest of these options on dev."""
        return Choice(what, max(options, key=lambda option: option.speeds.dev))

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
        values = {name: [value] for name, value in setting.items()}
        grid = make_grid(DEFAULT, self.engine.rule, values, kind=self.engine.kind)
        return self._options(arm_of(grid, self.home), next(iter(self.traces)))

    def _options(self, arm: Arm, drafting: Drafting) -> list[Option]:
        """The engine's settings, with what it pays for them."""
        settings = arm.grid.settings
        spent = Splits(self.times.spent(arm.dev, settings), self.times.spent(arm.test, settings))
        return options_of(arm, spent, drafting)


def arm_of(grid: Grid, traces: Splits[Trace]) -> Arm:
    """One grid on both splits."""
    return next(replay_arms([grid], traces))


def options_of(arm: Arm, spent: Splits[Spent], drafting: Drafting | None) -> list[Option]:
    """The settings of an arm, each with what it spent."""
    label = "" if drafting is None else drafting.label
    return [
        Option(label, setting, Splits(spent.dev.at(place), spent.test.at(place)), drafting)
        for place, setting in enumerate(arm.grid.settings)
    ]

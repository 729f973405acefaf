"""An engine's settings, chosen on dev and compared on test with its default, the best fixed length, no speculation, and
what the engine lacks: our policies and heads under the same costs.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from decode.policies import FixedLength
from decode.policies.registry import registered
from evaluation.competitor import Competitor, competitors_of, make_competitor
from evaluation.contest.arms import picks_of, replay_arms, replay_dataset
from evaluation.contest.travel import calibrated_on
from evaluation.families import BASELINE, BOUNDS, GROUPS, HEADS, TRAINING_FREE
from evaluation.flags.engines import Drafting, Engine, Setting
from evaluation.gain import Gain, Spent, Splits, gain_over
from evaluation.played import Played
from evaluation.times import Times
from evaluation.traces.trace import Trace
from heads.model.head import AcceptanceHead

Traces = Mapping[Drafting, Splits[Trace]]
NONE, DEFAULT, FIXED, FLAGS = "no speculation", "the engine's default", "best fixed length", "these flags"
OURS = {TRAINING_FREE: "our best policy without training", HEADS: "our best head"}


class Choice(NamedTuple):
    """A competitor at one setting, with its tokens and seconds on both splits."""

    label: str
    """How the engine drafts, or the name of our policy."""
    setting: Setting
    spent: Splits[Spent]
    drafting: Drafting | None = None
    """None: it is not a setting of the engine."""

    @property
    def tokens_per_s(self) -> float:
        """Predicted throughput on test."""
        return float(self.spent.test.tokens_per_s)

    def over(self, base: "Choice") -> Gain:
        """The predicted gain over another competitor."""
        return gain_over(base.spent.test, self.spent.test)


class Contest:
    """All competitors of one engine.

    Attributes:
        alone: costs without speculation.
        speculating: costs with it: what each round pays beyond its draft is part of t_target(k).
        home: traces of the engine's default way of drafting.
    """

    def __init__(self, engine: Engine, traces: Traces, cost: Times) -> None:
        extra_s = engine.extra_forwards * cost.t_draft_s
        self.engine, self.traces, self.alone = engine, traces, cost
        self.speculating = replace(cost, t_target_s=tuple(seconds + extra_s for seconds in cost.t_target_s))
        self._default_drafting, self.home = next(iter(traces.items()))

    def spent(self, played: Played, settings: Sequence[Setting]) -> Spent:
        """Tokens and the engine's seconds of its rule at these settings, replayed or decoded."""
        cost = self.speculating
        spent = cost.spent(played)
        if not self.engine.drafts_whole:
            return spent
        lengths = np.array([[int(setting["k"])] for setting in settings])
        rounds = played.per_prompt(played.counts.num_target)
        texts = played.per_prompt(np.ones_like(played.counts.num_target))
        stopping_s = cost.stop_s(played.stop_kind) * played.per_prompt(played.counts.num_draft_forwards)
        # a full draft in every round, even where a text has no room for it, and one more for each text
        drafting_s = cost.t_draft_s * lengths * (rounds + texts)
        return spent._replace(seconds=drafting_s + stopping_s + cost.target_s(lengths) * rounds)

    @cached_property
    def none(self) -> Choice:
        """The target alone."""
        [arm] = replay_arms([Competitor(NONE, NONE, FixedLength(0), ({},))], self.home)
        dev, test = arm.spent(self.alone)
        return Choice("", {}, Splits(dev.at(0), test.at(0)))

    @cached_property
    def options(self) -> list[Choice]:
        """Every setting of the engine, under each way of drafting."""
        values = (self.engine.values or registered(self.engine.rule).values)(self.home.dev.max_draft_length)
        grid = make_competitor(FLAGS, self.engine.rule, values, kind=self.engine.kind)
        return [choice for drafting in self.traces for choice in self._replayed(grid, drafting)]

    def choices(self) -> dict[str, Choice]:
        """No speculation, the default if there is one, the best fixed length, and the flags."""
        chosen = {NONE: self.none}
        if self.engine.default is not None:
            default = {name: [value] for name, value in self.engine.default.items()}
            [chosen[DEFAULT]] = self._replayed(
                make_competitor(DEFAULT, self.engine.rule, default, kind=self.engine.kind)
            )
        lengths = make_competitor(FIXED, "fixed_length", {"k": range(1, self.home.dev.max_draft_length + 1)})
        chosen[FIXED] = fastest_on_dev(self._replayed(lengths))
        return chosen | {FLAGS: fastest_on_dev([self.none, *self.options])}

    def ours(self, heads: Mapping[str, AcceptanceHead], *, drawn: Splits[Trace]) -> dict[str, Choice]:
        """The best of our policies without training, and of our heads.

        Our loop draws its drafts. If the engine takes the likeliest tokens, ours compete on both kinds of drafts.

        Args:
            heads: by name; one that was trained on other drafts is calibrated to these.
            drawn: the trace of drafts that are drawn as the target's tokens are.
        """
        cost, kinds = self.speculating, {"": self.home}
        if self.home.dev.draft_sampling is not None:
            kinds[" on drawn drafts"] = drawn
        picks = []
        for label, traces in kinds.items():
            fitted = {**heads, **calibrated_on(traces.dev, heads)}
            grids = competitors_of({}, fitted, max_draft_length=traces.dev.max_draft_length)
            arms = replay_dataset(traces, grids, heads=fitted, perfect_head=False, name="our policies").arms
            competing = [arm for arm in arms if arm.grid.family not in (*BOUNDS, BASELINE)]
            picks += [(label, pick) for pick in picks_of(competing, cost).values()]
        found = {}
        for group, name in OURS.items():
            members = [(label, pick) for label, pick in picks if GROUPS[group](pick.family)]
            if members:
                label, best = max(members, key=lambda member: member[1].tokens_per_s_on_dev(cost))
                dev, test = best.arm.spent(cost)
                spent = Splits(dev.at(best.setting), test.at(best.setting))
                found[name] = Choice(f"{best.family}{label}", best.values, spent)
        return found

    def _replayed(self, grid: Competitor, drafting: Drafting | None = None) -> list[Choice]:
        """Every setting of a grid; `drafting` None: the default."""
        drafting = drafting or self._default_drafting
        [arm] = replay_arms([grid], self.traces[drafting])
        dev, test = (self.spent(replayed, grid.settings) for replayed in (arm.dev, arm.test))
        return [
            Choice(drafting.label, setting, Splits(dev.at(index), test.at(index)), drafting)
            for index, setting in enumerate(grid.settings)
        ]


def fastest_on_dev(choices: Iterable[Choice]) -> Choice:
    """The choice of the highest throughput on dev; the first of equals."""
    return max(choices, key=lambda choice: float(choice.spent.dev.tokens_per_s))

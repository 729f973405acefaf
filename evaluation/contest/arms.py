"""Arms: what competes in an evaluation, replayed on both splits of one dataset (law 4.10).

Arms of one family compete on dev, and the winner stands for the family on test. Which of them wins depends on the
costs, what they did does not: replay once, choose at every cost. Only the rule of law 4.11 is another policy at every
cost.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from decode.loop.counts import Counts
from decode.policies.base import Policy
from evaluation.competitor import Competitor, bounds, label_of
from evaluation.families import HEADS_OF, ORACLE, family
from evaluation.gain import Spent, Splits
from evaluation.hierarchies.built import fastest
from evaluation.played import Played
from evaluation.times import Times
from evaluation.traces.bounds import Oracle
from evaluation.traces.replay import replay_settings
from evaluation.traces.trace import Trace
from evaluation.tuning.rule import auto_for
from heads.model.head import AcceptanceHead, Timing
from store.progress import Bar


@dataclass(frozen=True)
class Arm:
    """One grid, replayed on both splits of one dataset."""

    grid: Competitor
    dev: Played
    test: Played
    ratio: float | None = None
    """t_target / t_draft that its rule was solved for; None: it depends on no times, or on those of the evaluation."""

    def spent(self, cost: Times) -> Splits[Spent]:
        """Tokens and seconds of all its settings at this cost."""
        return Splits(cost.spent(self.dev), cost.spent(self.test))


class Pick(NamedTuple):
    """An arm at one setting."""

    arm: Arm
    setting: int

    @property
    def family(self) -> str:
        """Family that the arm stands for."""
        return self.arm.grid.family

    @property
    def values(self) -> Mapping[str, Any]:
        """The parameters of the setting."""
        return self.arm.grid.settings[self.setting]

    @property
    def label(self) -> str:
        """Head and setting in a few characters."""
        return label_of(self.arm.grid.name, self.values)

    def tokens_per_s_on_dev(self, cost: Times) -> float:
        """Throughput on dev, by which the setting was chosen."""
        return float(cost.tokens_per_s(self.arm.dev)[self.setting])

    @property
    def policy(self) -> Policy:
        """The policy with the chosen setting, as the loop runs it."""
        return replace(self.arm.grid.policy, **self.values)  # type: ignore[type-var]

    def replayed(self, rows: Sequence[int]) -> Played:
        """This setting alone on some test rows."""
        test, here = self.arm.test, np.ix_([self.setting], rows)
        counts = {name: values[here] for name, values in vars(test.counts).items() if isinstance(values, np.ndarray)}
        return replace(
            test, counts=Counts(**counts), lengths=test.lengths[here], prompt_of_row=test.prompt_of_row[rows]
        )

    def spent(self, cost: Times) -> Spent:
        """Tokens and seconds of each test prompt."""
        return cost.spent(self.arm.test).at(self.setting)


@dataclass(frozen=True, kw_only=True)
class Replays:
    """One dataset: its traces, and all arms that do not depend on costs."""

    traces: Splits[Trace]
    arms: list[Arm]
    heads: Mapping[str, AcceptanceHead]
    """Heads of the arms, by name."""

    def best(self, cost: Times) -> dict[Timing, AcceptanceHead]:
        """The head of each timing that is fastest on dev at this cost: a deeper one has to earn what it costs."""
        return {timing: self.heads[name] for timing, name in fastest_heads(self.arms, cost).items()}

    def cheapest(self, cost: Times) -> dict[Timing, AcceptanceHead]:
        """Fastest head on dev among those of each timing whose stop costs least."""
        stop_s = {arm.grid.name: cost.stop_s(arm.grid.policy.stop_kind) for arm in self.arms}
        found: dict[Timing, str] = {}
        for families in HEADS_OF.values():
            arms = [arm for arm in self.arms if arm.grid.family in families]
            least = min((stop_s[arm.grid.name] for arm in arms), default=0.0)
            found |= fastest_heads([arm for arm in arms if stop_s[arm.grid.name] <= least], cost)
        return {timing: self.heads[name] for timing, name in found.items()}

    def auto_arms(
        self, cost: Times, *, is_online: Sequence[bool] = (False, True), timing: Timing | None = None
    ) -> list[Arm]:
        """The rule of law 4.11 for these costs, lambda from dev or learned online, with the head that is fastest on dev
        of this timing; None: of the timing of the fastest head.
        """
        timing = timing or self.fastest_timing(cost)
        return [] if timing is None else self.ruled(self.best(cost)[timing], cost, is_online)

    def ruled(self, head: AcceptanceHead, cost: Times, is_online: Sequence[bool] = (False, True)) -> list[Arm]:
        """The rule of law 4.11 with this head."""
        rules = {
            f"auto_{head.timing}{'_online' * learns}": auto_for(head, self.traces.dev, cost, is_online=learns)
            for learns in is_online
        }
        return list(replay_arms((Competitor(name, name, rule, ({},)) for name, rule in rules.items()), self.traces))

    def fastest_timing(self, cost: Times) -> Timing | None:
        """Timing of the head that is fastest on dev; None where no heads compete."""
        arms = [arm for arm in self.arms if family(arm.grid.family).timing]
        return family(fastest_on_dev(arms, cost).family).timing if arms else None

    def oracle_arm(self, cost: Times) -> Arm:
        """Gain that knowledge of the outcomes is worth at these costs; the arm without costs is it wherever drafting an
        accepted token pays.
        """
        dev = self.traces.dev
        oracle = Oracle(cost.round_s(dev.max_draft_length, has_blocks=dev.block_size is not None))
        return next(replay_arms([Competitor(ORACLE, ORACLE, oracle, ({},))], self.traces))


def replay_dataset(
    traces: Splits[Trace],
    grids: Sequence[Competitor],
    *,
    heads: Mapping[str, AcceptanceHead],
    perfect_head: bool,
    name: str,
) -> Replays:
    """Every arm of one dataset, the bounds last.

    Args:
        traces: of the dataset.
        grids: all but the bounds.
        heads: those of the grids, by name.
        perfect_head: the trace knows acceptance along branches too, which the bounds of the perfect head need.
        name: of the dataset, for the progress bar.
    """
    ends = [grid for grid in bounds() if perfect_head or grid.family == ORACLE]
    with Bar(total=sum(len(grid.settings) for grid in [*grids, *ends]), desc=f"replay: {name}", unit="settings") as bar:
        arms = list(replay_arms(grids, traces, bar.update))
        arms += replay_arms(ends, traces, bar.update)
    return Replays(traces=traces, arms=arms, heads=heads)


def replay_arms(
    grids: Iterable[Competitor], traces: Splits[Trace], progress: Callable[[int], object] = lambda count: None
) -> Iterator[Arm]:
    """Every grid on both splits; `progress` is told the number of settings after each."""
    for grid in grids:
        yield Arm(grid, replay_settings(traces.dev, grid.policy), replay_settings(traces.test, grid.policy))
        progress(len(grid.settings))


def fastest_heads(arms: Sequence[Arm], cost: Times) -> dict[Timing, str]:
    """Timing -> name of the head that is fastest on dev, whatever it reads."""
    rivals = {timing: [arm for arm in arms if arm.grid.family in families] for timing, families in HEADS_OF.items()}
    return {timing: fastest_on_dev(of_timing, cost).arm.grid.head for timing, of_timing in rivals.items() if of_timing}


def by_family(arms: Iterable[Arm]) -> dict[str, list[Arm]]:
    """Family -> its arms, in order of first appearance."""
    families: dict[str, list[Arm]] = {}
    for arm in arms:
        families.setdefault(arm.grid.family, []).append(arm)
    return families


def picks_of(arms: Iterable[Arm], cost: Times) -> dict[str, Pick]:
    """Family -> its arm and setting of the highest throughput on dev."""
    return fastest(_at_best(arms, cost), of=lambda pick: pick.family, speed=lambda pick: pick.tokens_per_s_on_dev(cost))


def fastest_on_dev(arms: Iterable[Arm], cost: Times) -> Pick:
    """The arm and setting of the highest throughput on dev, whatever their families; the first of equals."""
    return max(_at_best(arms, cost), key=lambda pick: pick.tokens_per_s_on_dev(cost))


def _at_best(arms: Iterable[Arm], cost: Times) -> list[Pick]:
    return [Pick(arm, int(cost.tokens_per_s(arm.dev).argmax())) for arm in arms]


def total(counts: Counts, setting: int) -> Counts:
    """One setting's totals over prompts."""
    return Counts(
        **{name: int(values[setting].sum()) for name, values in vars(counts).items() if isinstance(values, np.ndarray)}
    )

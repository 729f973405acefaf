"""How the best threshold, or other setting, is chosen: one contest between all competitors on one dataset at one set of
times (law 4.10).

    1. Every setting of every competitor is replayed on the dev and on the test prompts (`replay_dataset`), once: what a
       policy does on a trace depends on no times.
    2. Of all settings of a family, `fastest_on_dev` takes the one with the most tokens per second on dev.
    3. That setting is judged on the test prompts: its `Result`.

Two policies depend on the times: the rule of law 4.11, with a head or without one, and the oracle. `hold_each` solves
and replays them for each set of times.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Float

from decode.policies.base import Policy
from decode.policies.registry import AUTO_TOKEN_PROB
from evaluation.competitor import ONLINE, Arm, Competitor, bounds, label_of
from evaluation.families import AUTO, BASELINE, GROUPS, HEADS_OF, ORACLE, REPLAYED, families, family
from evaluation.gain import Gain, Splits, Throughput, gain_over
from evaluation.played import Played
from evaluation.splits import RepeatedSplits, repeated_splits
from evaluation.times import Times
from evaluation.traces.replay import Oracle, replay_settings
from evaluation.traces.trace import Trace
from evaluation.tuning.rule import autos_for, side_by_side, token_rules_for
from heads.model.head import AcceptanceHead, Timing
from store.progress import Bar


@dataclass(frozen=True, kw_only=True)
class Result:
    """A competitor at one setting, on the test prompts."""

    competitor: Competitor
    number: int
    """Of the setting."""
    on_dev: float | None = None
    """Tokens per second on dev, by which the setting was chosen."""
    played: Played
    """What this setting did on test."""
    arm: Arm | None = None
    """All settings of the competitor."""
    times: Times | None = None
    """Turn counts into seconds; None if it was clocked."""

    @property
    def family(self) -> str:
        return self.competitor.family

    @property
    def setting(self) -> Mapping[str, Any]:
        return self.competitor.settings[self.number]

    @property
    def label(self) -> str:
        """Head and setting in a few characters."""
        return label_of(self.competitor.name, self.setting)

    @property
    def policy(self) -> Policy:
        """The policy at this setting, as the loop runs it."""
        return self.competitor.policy_at(self.number)

    @cached_property
    def throughput(self) -> Throughput:
        """Tokens and seconds of each test prompt."""
        every = self.played.throughput if self.times is None else self.times.throughput(self.played)
        return every.at(0)

    @property
    def tokens_per_s(self) -> float:
        return float(self.throughput.tokens_per_s)

    def over(self, base: "Result") -> Gain:
        """The gain over another result, with the error of the times in its interval."""
        return gain_over(base.throughput, self.throughput).widened(self._times_error(base))

    def _times_error(self, base: "Result") -> float:
        """Standard deviation of the gain over the errors of the times, which both results share."""
        if not len(self.sampled_s) or not len(base.sampled_s):
            return 0.0
        tokens = self.throughput.tokens.sum() / base.throughput.tokens.sum()
        return float(tokens * np.std(base.sampled_s / self.sampled_s))

    @cached_property
    def sampled_s(self) -> Float[np.ndarray, " sample"]:
        """Seconds of all prompts at each of the `Times.samples`."""
        samples = [] if self.times is None else self.times.samples
        return np.array([times.time_s(self.played).sum() for times in samples])

    def percent_of(self, bound: "Result | None") -> float:
        """Throughput in per cent of a bound's; NaN where the trace does not know the bound."""
        if bound is None:
            return float("nan")
        seconds = bound.throughput.seconds.sum() / self.throughput.seconds.sum()
        tokens = self.throughput.tokens.sum()
        return float(100 * seconds * (tokens / bound.throughput.tokens.sum()))


@dataclass(frozen=True)
class Contest:
    """Every family's result on one dataset at one set of times."""

    dataset: str
    times: Times
    results: Mapping[str, Result]
    """By family, in the order of tables."""
    splits: RepeatedSplits | None = None
    """Every family with dev and test redrawn; None where that was not computed."""
    source: "Contest | None" = None
    """The contest of another set, whose choices are judged on these test prompts as well."""
    transferred: Mapping[str, Result] = field(default_factory=dict)
    """Every family but the bounds, at the setting that the dev prompts of the `source` chose."""
    _gains: dict[tuple[str, str], Gain] = field(default_factory=dict, repr=False)

    @property
    def baseline(self) -> Result:
        return self.results[BASELINE]

    @property
    def num_prompts(self) -> int:
        return len(self.baseline.throughput.tokens)

    @cached_property
    def leaders(self) -> dict[str, Result]:
        """Group of families -> the result that is fastest on dev; groups without any are left out."""
        groups = {group: list(filter(belongs, self.results)) for group, belongs in GROUPS.items()}
        return {group: fastest(self.results[name] for name in names) for group, names in groups.items() if names}

    @cached_property
    def best(self) -> Result:
        """The fastest on dev of what can be run."""
        return fastest(result for name, result in self.results.items() if name not in REPLAYED)

    def gain(self, name: str, base: str = BASELINE) -> Gain:
        """The gain of a family over another one."""
        if (name, base) not in self._gains:
            self._gains[name, base] = self.results[name].over(self.results[base])
        return self._gains[name, base]


@dataclass(frozen=True)
class Replays:
    """The traces of one dataset, and all arms that depend on no times."""

    traces: Splits[Trace]
    arms: Sequence[Arm]
    has_token_rule: bool = False
    """Whether `token_rules` compete."""

    def autos(
        self, head: AcceptanceHead, every: Sequence[Times], is_online: Sequence[bool] = (False, True)
    ) -> list[list[Arm]]:
        """The rule of law 4.11 with this head at each of several times: an arm for each way to find lambda."""
        arms: list[list[Arm]] = [[] for _ in every]
        name = next((arm.competitor.name for arm in self.arms if head in arm.competitor.policy.heads), AUTO)
        for learns in is_online:
            rules = autos_for(head, self.traces.dev, every, is_online=learns)
            played = [replay_settings(trace, side_by_side(rules)) for trace in self.traces]
            for number, rule in enumerate(rules):
                competitor = Competitor(AUTO, name, rule, ({ONLINE: learns},))
                arms[number].append(Arm(competitor, *(part.select([number]) for part in played)))
        return arms

    def token_rules(self, every: Sequence[Times]) -> list[Arm]:
        """The rule of law 4.11 without a head at each of several times, on calibrated q(y): two numbers and lambda are
        fitted on dev. Its setting has every number, so that it can be written down and run.
        """
        rules = token_rules_for(self.traces.dev, every)
        played = [replay_settings(trace, side_by_side(rules)) for trace in self.traces]
        arms = []
        for number, rule in enumerate(rules):
            setting = {f.name: getattr(rule, f.name) for f in fields(rule) if getattr(rule, f.name) != f.default}
            competitor = Competitor(AUTO_TOKEN_PROB, AUTO_TOKEN_PROB, rule, (setting,))
            arms.append(Arm(competitor, *(part.select([number]) for part in played)))
        return arms

    def oracle(self, times: Times) -> Arm:
        """The oracle that knows these times; the one without times is it wherever drafting an accepted token pays."""
        dev = self.traces.dev
        oracle = Oracle(times.round_s(dev.max_draft_length, has_blocks=dev.block_size is not None))
        return next(replay_arms([Competitor(ORACLE, ORACLE, oracle, ({},))], self.traces))


def hold(replays: Replays, times: Times, *, dataset: str = "", is_online: Sequence[bool] = (False, True)) -> Contest:
    """`hold_each` at one set of times."""
    return hold_each(replays, [times], dataset=dataset, is_online=is_online)[0]


def hold_each(
    replays: Replays, every: Sequence[Times], *, dataset: str = "", is_online: Sequence[bool] = (False, True)
) -> list[Contest]:
    """The contest of one dataset at each of several times; `is_online`: forms of `auto` that compete with the head that
    is fastest on dev: lambda from dev, learned online.
    """
    best_arms = [fastest_on_dev(replays.arms, times) for times in every]
    of_head: dict[AcceptanceHead, list[int]] = {}
    for number, results in enumerate(best_arms):
        if heads := [result for name, result in results.items() if family(name).timing]:
            of_head.setdefault(fastest(heads).competitor.policy.heads[0], []).append(number)
    autos: dict[int, list[Arm]] = {}
    for head, numbers in of_head.items():
        autos |= zip(numbers, replays.autos(head, [every[number] for number in numbers], is_online), strict=True)
    token_rules = replays.token_rules(every) if replays.has_token_rule else []
    contests = []
    for number, (times, results) in enumerate(zip(every, best_arms, strict=True)):
        of_times = [*token_rules[number : number + 1], *autos.get(number, ()), replays.oracle(times)]
        results = fastest_on_dev(of_times, times, results)
        order = dict.fromkeys([*(name for name in families() if name in results), *results])
        splits = repeated_splits([*replays.arms, *of_times], times)
        contests.append(Contest(dataset, times, {name: results[name] for name in order}, splits))
    return contests


def fastest_on_dev(arms: Iterable[Arm], times: Times, rivals: Mapping[str, Result] | None = None) -> dict[str, Result]:
    """Family -> its arm and setting with the most tokens per second on dev, the first of equals, on test; `rivals`
    were chosen before and compete, too.
    """
    best = dict(rivals or {})
    for arm in arms:
        number, on_dev = best_setting(arm.dev, times)
        rival = best.get(arm.competitor.family)
        if rival is None or on_dev > (rival.on_dev or 0.0):
            best[arm.competitor.family] = result_of(arm, number, times, on_dev=on_dev)
    return best


def best_setting(dev: Played, times: Times) -> tuple[int, float]:
    """(number, tokens per second) of the setting that is fastest on dev, the first of equals."""
    speeds = times.tokens_per_s(dev)
    number = int(speeds.argmax())
    return number, float(speeds[number])


def result_of(arm: Arm, number: int, times: Times, *, on_dev: float | None = None) -> Result:
    """An arm at one setting, on test."""
    played = arm.test.select([number])
    return Result(competitor=arm.competitor, number=number, on_dev=on_dev, played=played, arm=arm, times=times)


def fastest(results: Iterable[Result]) -> Result:
    """The fastest on dev, the first of equals."""
    return max(results, key=lambda result: result.on_dev or 0.0)


def fastest_heads(results: Mapping[str, Result]) -> dict[Timing, AcceptanceHead]:
    """Timing -> the head that is fastest on dev, whatever it reads."""
    rivals = {timing: [results[name] for name in names if name in results] for timing, names in HEADS_OF.items()}
    return {timing: fastest(members).competitor.policy.heads[0] for timing, members in rivals.items() if members}


def replay_dataset(
    traces: Splits[Trace],
    competitors: Sequence[Competitor],
    *,
    perfect_head: bool,
    name: str,
    has_token_rule: bool = False,
) -> Replays:
    """Every arm of one dataset, the bounds last; `perfect_head`: the trace knows acceptance along branches too, which
    the bounds of the perfect head need; `has_token_rule` as `Replays` has it.
    """
    every = [*competitors, *bounds(perfect_head=perfect_head)]
    heads = [head for entry in competitors for head in entry.policy.heads if isinstance(head, AcceptanceHead)]
    for trace in traces:
        trace.score(heads)
    arms = list(replay_arms(Bar(every, desc=f"replay: {name}", unit="policies", leave=False), traces))
    return Replays(traces, arms, has_token_rule)


def replay_arms(competitors: Iterable[Competitor], traces: Splits[Trace]) -> Iterator[Arm]:
    """Every competitor on both splits."""
    for entry in competitors:
        yield Arm(entry, *(replay_settings(trace, entry.policy) for trace in traces))

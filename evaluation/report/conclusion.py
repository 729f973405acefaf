"""The verdict of a contest, as values: which policy to use, and how sure that choice is.

Three candidates compete, each at the setting that dev chose: the best fixed length, the best rule that needs no
training, and the best head. One beats another if its gain on test is above noise and it is ahead in at least 90 % of
the repeated splits. The head is recommended if it beats both of the others, the rule if it beats the fixed length. If
neither does, the simpler of those two that nothing beats is recommended, never the head. With fewer than 10 test
prompts there is no verdict, and the fixed length that is fastest on dev is used.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from evaluation.competitor import Arm
from evaluation.contest import Contest, Result, fastest
from evaluation.families import BASELINE, GROUPS, HEADS, TRAINING_FREE
from evaluation.gain import MIN_PROMPTS, Gain, Throughput, gain_over
from evaluation.times import Times

MIN_SHARE_AHEAD = 0.9
"""Of the repeated splits."""
NUM_RESAMPLES = 200
"""Of the dev prompts."""
Range = tuple[str, list[int | float]]
"""A parameter, and neighbouring values of it in ascending order."""


@dataclass(frozen=True)
class Verdict:
    """Which policy to use on one dataset at one set of times."""

    contest: Contest
    candidates: Mapping[str, Result]
    """Group of families -> its best on dev, the simplest first: fixed length, rule without training, head."""
    head_shares: Mapping[str, float] = field(default_factory=dict)
    """Head -> share of the resampled dev sets that choose it, the largest first; empty if it was not computed."""

    @property
    def is_decided(self) -> bool:
        """Whether there are enough test prompts."""
        return self.contest.num_prompts >= MIN_PROMPTS

    @cached_property
    def group(self) -> str:
        """The group of the recommended policy; with too few prompts nothing beats the fixed length."""
        groups = list(self.candidates)
        for number in range(len(groups) - 1, 0, -1):
            if all(self.beats(groups[number], simpler) for simpler in groups[:number]):
                return groups[number]
        without_training = [group for group in groups if group != HEADS]
        for group in without_training:
            if not any(self.beats(rival, group) for rival in groups):
                return group
        return BASELINE

    @cached_property
    def undecided_by_times(self) -> str | None:
        """The group that would be recommended if measured times were exact; None if their error decides nothing."""
        groups = list(self.candidates)
        for number in range(len(groups) - 1, groups.index(self.group), -1):
            if self.is_decided and all(self._may_beat(groups[number], simpler) for simpler in groups[:number]):
                return groups[number]
        return None

    def _may_beat(self, group: str, rival: str) -> bool:
        """Whether one candidate beats another at exact times."""
        gain = self.gain(group, rival)
        is_ahead = gain.is_above_noise or (gain.value > 0 and gain.is_blurred_by_times)
        return is_ahead and self.share_ahead(group, rival) >= MIN_SHARE_AHEAD

    @property
    def winner(self) -> Result:
        """The recommended policy at its setting."""
        return self.candidates[self.group]

    def gain(self, group: str, rival: str) -> Gain:
        """The gain of one candidate over another on test."""
        return self.contest.gain(self.candidates[group].family, self.candidates[rival].family)

    def share_ahead(self, group: str, rival: str) -> float:
        """Share of the repeated splits in which one candidate is ahead of another; 1 without splits."""
        splits = self.contest.splits
        return 1.0 if splits is None else splits.share_ahead(group, rival)

    def beats(self, group: str, rival: str) -> bool:
        """Whether one candidate is faster than another by more than noise, in most of the repeated splits too."""
        if group == rival:
            return False
        return self.gain(group, rival).is_above_noise and self.share_ahead(group, rival) >= MIN_SHARE_AHEAD

    @cached_property
    def near_best(self) -> Range | None:
        """The settings of the recommended policy that are as good on dev; None if it has one setting."""
        return near_best(self.winner, self.contest.times)


def conclude(contest: Contest, arms: Iterable[Arm] = ()) -> Verdict:
    """The verdict of a contest; `arms` are all that were replayed for it, to choose heads on resampled dev sets."""
    rules = [result for name, result in contest.results.items() if name != BASELINE and GROUPS[TRAINING_FREE](name)]
    candidates = {BASELINE: contest.baseline}
    if rules:
        candidates[TRAINING_FREE] = fastest(rules)
    if HEADS in contest.leaders:
        candidates[HEADS] = contest.leaders[HEADS]
    heads = [arm for arm in arms if arm.competitor.head]
    return Verdict(contest, candidates, head_shares(heads, contest.times))


def near_best(result: Result, times: Times) -> Range | None:
    """The values around a result's setting whose 95 % interval, paired with the best setting on dev, includes 0; None
    if no parameter varies, or there are too few dev prompts for an interval.
    """
    settings = result.competitor.settings
    numbers = [key for key, value in result.setting.items() if _is_number(value)]
    varying = [key for key in numbers if any(setting[key] != result.setting[key] for setting in settings)]
    if not varying or result.arm is None:
        return None
    parameter = varying[0]
    others = {key: value for key, value in result.setting.items() if key != parameter}
    neighbours = [number for number, setting in enumerate(settings) if others.items() <= setting.items()]
    neighbours.sort(key=lambda number: settings[number][parameter])
    on_dev = times.throughput(result.arm.dev)
    if on_dev.tokens.shape[-1] < MIN_PROMPTS:
        return None
    best = on_dev.at(result.number)
    center = neighbours.index(result.number)
    above = _while_as_good(neighbours[center + 1 :], on_dev, best)
    below = _while_as_good(neighbours[:center][::-1], on_dev, best)
    values = [settings[number][parameter] for number in (*below, result.number, *above)]
    return parameter, sorted(values)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _while_as_good(numbers: Sequence[int], on_dev: Throughput, best: Throughput) -> list[int]:
    """The first of these settings, up to the first one that is slower than the best beyond noise."""
    as_good: list[int] = []
    for number in numbers:
        if gain_over(best, on_dev.at(number)).is_below_noise:
            break
        as_good.append(number)
    return as_good


def head_shares(arms: Sequence[Arm], times: Times) -> dict[str, float]:
    """Head -> share of the resampled dev sets (bootstrap over prompts) on which one of its settings is the fastest of
    all heads' settings, the largest first; empty for fewer than two heads.
    """
    names = [arm.competitor.head for arm in arms]
    if len(set(names)) < 2:
        return {}
    num_prompts = times.throughput(arms[0].dev).tokens.shape[-1]
    generator = np.random.default_rng(0)
    weights = generator.multinomial(num_prompts, np.full(num_prompts, 1 / num_prompts), size=NUM_RESAMPLES)
    fastest_of_arms = []
    for arm in arms:
        on_dev = times.throughput(arm.dev)
        speeds = (on_dev.tokens @ weights.T) / (on_dev.seconds @ weights.T)
        fastest_of_arms.append(speeds.max(axis=0))
    counts = Counter(names[number] for number in np.argmax(fastest_of_arms, axis=0))
    return {name: count / NUM_RESAMPLES for name, count in counts.most_common()}

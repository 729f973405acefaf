"""One row of an evaluation's table: a family at the setting that dev chose, on test, beside what is possible (law
4.10).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from evaluation.competitor import label_of
from evaluation.contest.arms import Pick, total
from evaluation.families import BASELINE, GROUPS, HEADS, ORACLE, PERFECT, TRAINING_FREE
from evaluation.gain import Gain, Spent, gain_over
from evaluation.times import Times


@dataclass(frozen=True, kw_only=True)
class Result:
    """One family on test; its fields are the columns of results.csv (`evaluation.table.flat`)."""

    family: str
    name: str
    setting: Mapping[str, Any]
    discard_rate: float
    verification_rate: float
    acceptance_length: float
    mean_draft_length: float
    tokens_per_s: float
    speed_up: float
    gain: Gain
    """Over the best fixed length."""
    lead: Gain
    """Over the best training-free policy."""
    percent_of_oracle: float
    percent_of_perfect: float
    """Throughput in per cent of the perfect head's without the lag; NaN where the trace does not know it."""

    @property
    def label(self) -> str:
        """The setting in a few characters."""
        return label_of(self.name, self.setting)


class Yardstick(NamedTuple):
    """The arms and prompts that results are measured against."""

    spent: Mapping[str, Spent]
    """Tokens and seconds of every family on test, the best fixed length and the oracle among them."""
    t_target_s: float
    """Seconds of one token by the target alone."""
    champions: Mapping[str, str]
    """Family of each group that is fastest on dev; HEADS where there are some."""


def yardstick_of(picks: Mapping[str, Pick], cost: Times) -> Yardstick:
    """The yardstick of one dataset at one cost, where dev chose these."""
    champions = {group: pick.family for group, pick in champions_of(picks.values(), cost).items()}
    return Yardstick({family: pick.spent(cost) for family, pick in picks.items()}, cost.t_target_s[0], champions)


def champions_of(picks: Iterable[Pick], cost: Times) -> dict[str, Pick]:
    """Group -> the pick that is fastest on dev; groups without any are left out."""
    ranked = sorted(picks, key=lambda pick: -pick.tokens_per_s_on_dev(cost))
    best = {group: next((pick for pick in ranked if belongs(pick.family)), None) for group, belongs in GROUPS.items()}
    return {group: pick for group, pick in best.items() if pick is not None}


def lead_of(yardstick: Yardstick) -> Gain | None:
    """The gain of the best head over the best training-free policy, both chosen on dev; None where there is no head."""
    if HEADS not in yardstick.champions:
        return None
    free, head = (yardstick.spent[yardstick.champions[group]] for group in (TRAINING_FREE, HEADS))
    return gain_over(free, head)


def results_of(picks: Mapping[str, Pick], cost: Times, yardstick: Yardstick) -> list[Result]:
    """One result per family."""
    return [result_of(pick, cost, yardstick) for pick in picks.values()]


def result_of(pick: Pick, cost: Times, yardstick: Yardstick) -> Result:
    """The figures of one family on test against the yardstick."""
    counts, spent, rivals = total(pick.arm.test.counts, pick.setting), pick.spent(cost), yardstick.spent
    return Result(
        family=pick.family,
        name=pick.arm.grid.name,
        setting=pick.values,
        discard_rate=counts.discard_rate,
        verification_rate=counts.verification_rate,
        acceptance_length=counts.acceptance_length,
        mean_draft_length=counts.num_drafted / counts.num_target,
        tokens_per_s=spent.tokens_per_s,
        speed_up=spent.tokens_per_s * yardstick.t_target_s,
        gain=gain_over(rivals[BASELINE], spent),
        lead=gain_over(rivals[yardstick.champions[TRAINING_FREE]], spent),
        percent_of_oracle=_percent_of(rivals[ORACLE], spent),
        percent_of_perfect=_percent_of(rivals[PERFECT], spent) if PERFECT in rivals else float("nan"),
    )


def _percent_of(bound: Spent, spent: Spent) -> float:
    return float(100 * bound.seconds.sum() / spent.seconds.sum() * (spent.tokens.sum() / bound.tokens.sum()))

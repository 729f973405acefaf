"""One row of an evaluation's table: a family at the setting that dev chose, on test, beside what is possible (law
4.10).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from decode.policies.registry import POLICIES
from evaluation.competitors import Finalist
from evaluation.contest.arms import BASELINE, Arm, by_family, picks_of
from evaluation.contest.grids import label_of
from evaluation.costs.model import CostModel
from evaluation.intervals import Gain, Resamples, Spent, gain_of, gain_over
from evaluation.traces.trace import Array

TRAINING_FREE, HEADS = "training-free", "heads"
GROUPS: dict[str, Callable[[str], bool]] = {
    TRAINING_FREE: lambda family: family in POLICIES,
    HEADS: lambda family: family.startswith(("head_", "auto_")),
}
"""Groups of families, of which the best are compared: whether a family belongs to each."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """One family on test; its fields are the columns of results.csv (`evaluation.sheet.flat`)."""

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
    """Tokens and seconds of every replayed family, the best fixed length and the oracle among them."""
    t_target_s: float
    """Seconds of one token by the target alone."""
    reached: Mapping[str, Array]
    """Throughput of every replayed family in the same resamples, each time at the setting that the resampled dev
    prompts choose.
    """
    resamples: Resamples
    """Those, for competitors that are yet to come."""
    champions: Mapping[str, str]
    """Family of each group that is fastest on dev: TRAINING_FREE and, where there are some, HEADS."""


def yardstick_of(arms: Sequence[Arm], cost: CostModel, *, num_home: int = 0) -> Yardstick:
    """The yardstick of one dataset at one cost; `num_home`: dev prompts of the home set, where others' choices are
    made.
    """
    families, picks = by_family(arms), picks_of(arms, cost)
    competitors = {family: [arm.work(cost) for arm in members] for family, members in families.items()}
    num_dev, num_test = (work.tokens.shape[1] for work in competitors[BASELINE][0])
    resamples = Resamples(num_dev, num_test, cost.errors, num_home=num_home)
    reached = {family: resamples.throughput(members) for family, members in competitors.items()}
    champions = {}
    for group, belongs in GROUPS.items():
        members = [family for family in families if belongs(family)]
        if members:
            champions[group] = max(members, key=lambda family: picks[family].tokens_per_s_on_dev(cost))
            reached[group] = resamples.throughput(
                [competitor for family in members for competitor in competitors[family]]
            )
    return Yardstick(
        {family: pick.spent(cost) for family, pick in picks.items()}, cost.t_target_s[0], reached, resamples, champions
    )


def lead_of(yardstick: Yardstick) -> Gain | None:
    """The gain of the best head over the best training-free policy, both chosen on dev; None where there is no head."""
    if HEADS not in yardstick.champions:
        return None
    head, training_free = (yardstick.spent[yardstick.champions[group]] for group in (HEADS, TRAINING_FREE))
    lead = head.tokens_per_s / training_free.tokens_per_s - 1
    return gain_of(lead, yardstick.reached[TRAINING_FREE], yardstick.reached[HEADS])


def results_of(arms: Sequence[Arm], cost: CostModel, yardstick: Yardstick) -> list[Result]:
    """One result per family."""
    return [result_of(pick.finalist(cost), yardstick) for pick in picks_of(arms, cost).values()]


def result_of(finalist: Finalist, yardstick: Yardstick) -> Result:
    """The figures of one family on test against the yardstick."""
    family, counts, spent, rivals = finalist.family, finalist.counts, finalist.spent, yardstick.spent
    return Result(
        family=family,
        name=finalist.name,
        setting=finalist.setting,
        discard_rate=counts.discard_rate,
        verification_rate=counts.verification_rate,
        acceptance_length=counts.acceptance_length,
        mean_draft_length=counts.num_drafted / counts.num_target,
        tokens_per_s=spent.tokens_per_s,
        speed_up=spent.tokens_per_s * yardstick.t_target_s,
        gain=_gain(family, spent, BASELINE, BASELINE, yardstick),
        lead=_gain(family, spent, yardstick.champions[TRAINING_FREE], TRAINING_FREE, yardstick),
        percent_of_oracle=_percent_of(rivals["oracle"], spent),
        percent_of_perfect=_percent_of(rivals["perfect_drawn"], spent) if "perfect_drawn" in rivals else float("nan"),
    )


def _gain(family: str, spent: Spent, rival: str, group: str, yardstick: Yardstick) -> Gain:
    """Gain over one rival, which stands for a group of families; what was decoded and not replayed is resampled as it
    is.
    """
    if family not in yardstick.reached:
        return gain_over(yardstick.spent[rival], spent)
    value = spent.tokens_per_s / yardstick.spent[rival].tokens_per_s - 1
    return gain_of(value, yardstick.reached[group], yardstick.reached[family])


def _percent_of(bound: Spent, spent: Spent) -> float:
    return float(100 * bound.seconds.sum() / spent.seconds.sum() * (spent.tokens.sum() / bound.tokens.sum()))

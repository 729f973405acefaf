"""One row of an evaluation's table: a family at the setting that dev chose, on test, beside what is possible (law 4.10)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from decode.costs.model import CostModel
from decode.evaluation.arms import BASELINE, Pick
from decode.intervals import Spent, gain_over
from decode.loop.counts import Counts


@dataclass(frozen=True, kw_only=True)
class Result:
    """One family on test; its fields are the columns of results.csv."""

    family: str
    name: str
    setting: Mapping[str, Any]
    discard_rate: float
    verification_rate: float
    acceptance_length: float
    mean_draft_length: float
    tokens_per_s: float
    speed_up: float
    gain: float
    """Throughput over that of the best fixed length, minus 1."""
    gain_low: float
    """95 % interval, paired bootstrap over prompts."""
    gain_high: float
    percent_of_oracle: float
    percent_of_perfect: float
    """Of the perfect head without the lag; NaN where the trace does not know it."""

    @property
    def label(self) -> str:
        """The setting in a few characters."""
        values = ", ".join(f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}" for key, value in self.setting.items())
        return f"{self.name.removeprefix('head:')}: {values}" if self.name.startswith("head") else values or "-"


class Yardstick(NamedTuple):
    """What results are measured by."""

    spent: Mapping[str, Spent]
    """Of every replayed family, the best fixed length and the oracle among them."""
    t_target_s: float
    """Seconds of one token by the target alone."""


def yardstick_of(picks: Mapping[str, Pick], cost: CostModel) -> Yardstick:
    """The yardstick of one dataset at one cost."""
    return Yardstick({family: pick.spent(cost) for family, pick in picks.items()}, cost.t_target_s[0])


def results_of(picks: Mapping[str, Pick], yardstick: Yardstick) -> list[Result]:
    """One result per family."""
    return [
        result_of(
            family=family,
            name=pick.arm.grid.name,
            setting=pick.arm.grid.settings[pick.setting],
            counts=pick.counts,
            spent=yardstick.spent[family],
            yardstick=yardstick,
        )
        for family, pick in picks.items()
    ]


def result_of(*, family: str, name: str, setting: Mapping[str, Any], counts: Counts, spent: Spent, yardstick: Yardstick) -> Result:
    """The figures of one family: its totals on test, and what each test prompt came to, against the yardstick."""
    rivals = yardstick.spent
    gain = gain_over(rivals[BASELINE], spent)
    return Result(
        family=family,
        name=name,
        setting=setting,
        discard_rate=counts.discard_rate,
        verification_rate=counts.verification_rate,
        acceptance_length=counts.acceptance_length,
        mean_draft_length=counts.num_drafted / counts.num_target,
        tokens_per_s=spent.tokens_per_s,
        speed_up=spent.tokens_per_s * yardstick.t_target_s,
        gain=gain.value,
        gain_low=gain.low,
        gain_high=gain.high,
        percent_of_oracle=_percent_of(rivals["oracle"], spent),
        percent_of_perfect=_percent_of(rivals["perfect_drawn"], spent) if "perfect_drawn" in rivals else float("nan"),
    )


def _percent_of(bound: Spent, own: Spent) -> float:
    return float(100 * bound.seconds.sum() / own.seconds.sum() * (own.tokens.sum() / bound.tokens.sum()))

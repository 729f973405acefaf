"""Settings chosen on dev, reported on test, beside what is possible (law 4.10).

For each family the setting (and, of heads, the head) with the highest throughput on dev is taken; its test figures stand in the table. The
difference from the best fixed length is a ratio of throughputs on the same prompts, so its interval is a paired bootstrap over prompts.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.stats import bootstrap

from decode.costs.model import CostModel
from decode.evaluation.grids import Grid
from decode.loop.counts import Counts
from decode.traces.replay import Replayed, replay_settings
from decode.traces.trace import Array, Trace

_RESAMPLES = 2000
BASELINE = "fixed_length"


@dataclass(frozen=True)
class Arm:
    """One grid, replayed on both splits of one dataset."""

    grid: Grid
    dev: Replayed
    test: Replayed


@dataclass(frozen=True)
class Result:
    """One family at its dev-chosen setting, on test."""

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
    """Of the perfect head without the lag."""

    @property
    def label(self) -> str:
        """Setting in a few characters."""
        values = ", ".join(f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}" for key, value in self.setting.items())
        return f"{self.name.removeprefix('head:')}: {values}" if self.name.startswith("head") else values or "-"


def replay_arms(grids: Iterable[Grid], dev: Trace, test: Trace, progress: Any) -> list[Arm]:
    """Every grid on both splits."""
    arms = []
    for grid in grids:
        arms.append(Arm(grid, replay_settings(dev, grid.policy), replay_settings(test, grid.policy)))
        progress(len(grid.settings))
    return arms


def throughput(replayed: Replayed, cost: CostModel) -> Float[Array, " setting"]:
    """Tokens per second of every setting, all prompts together."""
    return replayed.counts.num_emitted.sum(-1) / cost.time_s(replayed).sum(-1)


def chosen(arms: Sequence[Arm], cost: CostModel) -> tuple[Arm, int]:
    """The arm and setting of the highest throughput on dev."""
    best = [(float(values.max()), index, int(values.argmax())) for index, values in enumerate(throughput(arm.dev, cost) for arm in arms)]
    _, index, setting = max(best, key=lambda entry: entry[0])
    return arms[index], setting


def results_of(arms: Sequence[Arm], cost: CostModel) -> list[Result]:
    """One result per family, in order of first appearance."""
    families: dict[str, list[Arm]] = {}
    for arm in arms:
        families.setdefault(arm.grid.family, []).append(arm)
    picks = {family: chosen(members, cost) for family, members in families.items()}
    times = {family: cost.time_s(arm.test)[setting] for family, (arm, setting) in picks.items()}
    return [result_of(family, *picks[family], cost=cost, times=times) for family in picks]


def result_of(family: str, arm: Arm, setting: int, *, cost: CostModel, times: Mapping[str, Float[Array, " row"]]) -> Result:
    """The figures of one family; `times` holds the seconds per prompt of every family."""
    counts = total(arm.test.counts, setting)
    own = times[family]
    speed = counts.num_emitted / own.sum()
    low, high = gain_interval(times[BASELINE], own)
    return Result(
        family,
        arm.grid.name,
        arm.grid.settings[setting],
        counts.discard_rate,
        counts.verification_rate,
        counts.acceptance_length,
        counts.num_drafted / counts.num_target,
        speed,
        speed * cost.t_target_s[0],
        times[BASELINE].sum() / own.sum() - 1,
        low,
        high,
        100 * times["oracle"].sum() / own.sum(),
        100 * times["perfect_drawn"].sum() / own.sum() if "perfect_drawn" in times else float("nan"),
    )


def total(counts: Counts, setting: int) -> Counts:
    """One setting's totals over prompts."""
    return Counts(**{name: int(values[setting].sum()) for name, values in vars(counts).items() if isinstance(values, np.ndarray)})


def gain_interval(base_s: Float[Array, " row"], own_s: Float[Array, " row"], *, seed: int = 0) -> tuple[float, float]:
    """95 % interval of sum(base) / sum(own) - 1, prompts resampled in pairs (the same tokens are emitted in both arms)."""
    if len(own_s) < 2 or np.allclose(base_s, own_s):
        gain = float(base_s.sum() / own_s.sum() - 1)
        return gain, gain
    drawn = bootstrap(
        (base_s, own_s),
        lambda base, own, axis: base.sum(axis) / own.sum(axis) - 1,
        paired=True,
        vectorized=True,
        n_resamples=_RESAMPLES,
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    return float(drawn.confidence_interval.low), float(drawn.confidence_interval.high)

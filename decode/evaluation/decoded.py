"""Hierarchies in `decode evaluate`: decoded on the trace's prompts, not replayed, and set beside the replayed policies.

    T = t_micro F_micro + t_draft F_draft + sum over rounds of t_target(k)             (law 4.9 with a third time)

t_draft and t_target(k) are the evaluation's; t_micro keeps its measured, or given, ratio to t_draft, also on other hardware. A decoded
arm writes other tokens than the trace holds (the same law, other draws), so its gain compares throughputs, and its interval is wider than
those of replayed arms.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float
from rich.table import Table

from configs.schema import Config
from decode.costs.model import CostModel
from decode.evaluation.results import BASELINE, Arm, Result, chosen
from decode.hierarchies.contenders import arms_of
from decode.hierarchies.runs import MICRO_ALONE, Run, directory_of, play, times_of
from decode.hierarchies.runs import chosen as chosen_on_dev
from decode.hierarchies.times import redundancy, target_utilisation
from decode.hierarchies.trio import Trio
from decode.traces.replay import Array
from decode.traces.trace import Trace
from lm import load_pair

FAMILIES = {
    MICRO_ALONE: "decoded_micro",
    "sd + pre-verify": "decoded_pre_verify",
    "sd + pre-verify + self-verify": "decoded_pre_self_verify",
    "HSDDW": "decoded_hsddw",
    "pre-verified, fixed lengths": "decoded_pre_verified",
    "interleaved (Chen)": "decoded_interleaved",
}
"""Arm of `decode hierarchy` -> family."""
NAMES = {
    "decoded_micro": "micro alone, fixed length *",
    "decoded_pre_verify": "HSDDW's pre-verify *",
    "decoded_pre_self_verify": "HSDDW's pre- and self-verify *",
    "decoded_hsddw": "HSDDW *",
    "decoded_pre_verified": "pre-verified, fixed lengths *",
    "decoded_interleaved": "interleaved (Chen) *",
}
_RESAMPLES = 2000
_COUNTS = ("num_micro", "num_drafted", "num_target", "num_micro_forwards", "num_draft_forwards")


@dataclass(frozen=True)
class DecodedHierarchies:
    """The hierarchies on one dataset's prompts."""

    dev: list[Run]
    test: list[Run]
    """Each arm at every setting that one of the evaluation's costs chose on dev."""
    micro_ratio: float
    """t_micro / t_draft."""

    def picks(self, cost: CostModel) -> dict[str, Run]:
        """Family -> its run on test, at the setting that is fastest on dev at this cost."""
        arms = list({run.arm.name: run.arm for run in self.dev}.values())
        keys = {arm.name: arm.settings[0].key for arm in chosen_on_dev(arms, self.dev, lambda run: self.speed(run, cost))}
        return {FAMILIES[run.arm.name]: run for run in self.test if run.setting.key == keys[run.arm.name]}

    def seconds(self, run: Run, cost: CostModel) -> Float[Array, " row"]:
        """T of every prompt."""
        return np.array(
            [
                cost.t_draft_s * (self.micro_ratio * counts.num_micro_forwards + counts.num_draft_forwards)
                + cost.target_s(np.array(decoded.lengths)).sum()
                for counts, decoded in zip(run.each, run.decoded, strict=True)
            ]
        )

    def speed(self, run: Run, cost: CostModel) -> float:
        """Tokens per second over all prompts."""
        return float(run.counts.num_emitted / self.seconds(run, cost).sum())

    def results(self, cost: CostModel, replayed: Sequence[Result], arms: Sequence[Arm]) -> list[Result]:
        """One row per arm, in the form of the replayed ones.

        Args:
            cost: of this evaluation.
            replayed: its results, bounds among them.
            arms: what was replayed, the best fixed length among it.
        """
        arm, setting = chosen([arm for arm in arms if arm.grid.family == BASELINE], cost)
        base = np.stack([arm.test.counts.num_emitted[setting], cost.time_s(arm.test)[setting]])
        bounds = {result.family: result.tokens_per_s for result in replayed}
        return [self._result(family, run, cost, base, bounds) for family, run in self.picks(cost).items()]

    def table(self, cost: CostModel) -> Table:
        """Counts of the three models, sigma and eta."""
        title = (
            f"* decoded on {len(self.test[0].decoded)} test prompts, not replayed; t_micro / t_draft = {self.micro_ratio:.2f}; "
            "N: tokens, F: forwards; sigma, eta: HSDDW's redundancy and target utilisation"
        )
        columns = ("N", "N_micro", "N_draft", "N_target", "F_micro", "F_draft", "sigma %", "eta %")
        table = Table("hierarchy", "setting", title=title, title_justify="left")
        for column in columns:
            table.add_column(column, justify="right")
        for family, run in self.picks(cost).items():
            counts = run.counts
            rates = (f"{100 * rate:.2f}" for rate in (redundancy(counts), target_utilisation(counts)))
            numbers = (str(getattr(counts, name)) for name in ("num_emitted", *_COUNTS))
            table.add_row(NAMES[family].removesuffix(" *"), run.label, *numbers, *rates)
        return table

    def annotated(self, frame: pd.DataFrame, cost: CostModel) -> pd.DataFrame:
        """`frame` with a column `source` (replayed, decoded) and, of the decoded rows, the counts."""
        columns: dict[str, dict[str, Any]] = {}
        for family, run in self.picks(cost).items():
            counts = run.counts
            columns[family] = {"source": "decoded", "num_prompts": len(run.decoded), "micro_ratio": self.micro_ratio}
            columns[family] |= {name: int(getattr(counts, name)) for name in ("num_emitted", *_COUNTS)}
            columns[family] |= {"redundancy": redundancy(counts), "target_utilisation": target_utilisation(counts)}
        added = pd.DataFrame([columns.get(family, {"source": "replayed"}) for family in frame["family"]], index=frame.index)
        return frame.join(added)

    def _result(self, family: str, run: Run, cost: CostModel, base: Float[Array, "2 row"], bounds: Mapping[str, float]) -> Result:
        counts, speed = run.counts, self.speed(run, cost)
        own = np.stack([[each.num_emitted for each in run.each], self.seconds(run, cost)])
        low, high = _gain_interval(own, base)
        return Result(
            family,
            run.arm.name,
            dict(part.split("=", 1) for part in run.label.split()),
            counts.discard_rate,
            counts.verification_rate,
            counts.acceptance_length,
            counts.num_drafted / counts.num_target,
            speed,
            speed * cost.t_target_s[0],
            _gain(own.sum(1), base.sum(1)),
            low,
            high,
            100 * speed / bounds["oracle"],
            100 * speed / bounds["perfect_drawn"] if "perfect_drawn" in bounds else float("nan"),
        )


def decode_hierarchies(config: Config, dataset: str, traces: tuple[Trace, Trace], costs: Sequence[CostModel]) -> DecodedHierarchies:
    """Decode what is not there yet: every setting on dev, on test those that win at one of the costs.

    Args:
        config: with a micro model.
        dataset: its name.
        traces: dev and test, whose prompts are used.
        costs: of this machine first.
    """
    directory = directory_of(config, dataset)
    trio = Trio(lambda: load_pair(config.pair))
    arms = [arm for arm in arms_of(trio) if arm.name in FAMILIES]
    prompts = [[list(row.prompt_ids) for row in trace.rows] for trace in traces]
    dev = play(config, trio, arms, prompts[0], directory=directory)
    found = DecodedHierarchies(dev, [], _micro_ratio(config, dev, costs[0]))
    for cost in costs:
        known = {(run.arm.name, run.setting.key) for run in found.test}
        picked = chosen_on_dev(arms, dev, lambda run, cost=cost: found.speed(run, cost))  # type: ignore[misc]
        new = [arm for arm in picked if (arm.name, arm.settings[0].key) not in known]
        found.test.extend(play(config, trio, new, prompts[1], directory=directory))
    return found


def _micro_ratio(config: Config, runs: Sequence[Run], cost: CostModel) -> float:
    """t_micro / t_draft: given, or fitted over the generations on dev."""
    if config.decode.t_micro_s is not None:
        return config.decode.t_micro_s / cost.t_draft_s
    times = times_of(runs)
    return times.t_micro_s / times.t_draft_s


def _gain(own: Float[Array, "2 ..."], base: Float[Array, "2 ..."]) -> Any:
    """Throughput over throughput, minus 1, from (tokens, seconds)."""
    return (own[0] / own[1]) / (base[0] / base[1]) - 1


def _gain_interval(own: Float[Array, "2 row"], base: Float[Array, "2 row"]) -> tuple[float, float]:
    """95 % interval by bootstrap over prompts, both arms resampled alike."""
    draws = np.random.default_rng(0).integers(own.shape[1], size=(_RESAMPLES, own.shape[1]))
    low, high = np.quantile(_gain(own[:, draws].sum(-1), base[:, draws].sum(-1)), [0.025, 0.975])
    return float(low), float(high)

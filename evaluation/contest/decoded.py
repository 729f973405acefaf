"""Hierarchies in `evaluation evaluate`: decoded on the trace's prompts, not replayed, beside the replayed policies.

    T = t_micro F_micro + t_draft F_draft + sum over rounds of t_target(k)             (law 4.9 with a third time)

t_draft and t_target(k) are the evaluation's; t_micro keeps its measured, or given, ratio to t_draft, also on other
hardware. A decoded arm writes other tokens than the trace holds (the same law, other draws), so its gain compares
throughputs, and its interval is wider than those of replayed arms.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Int

from evaluation.competitors import Finalist, Setting
from evaluation.contest.results import Result, Yardstick, result_of
from evaluation.costs.model import CostModel
from evaluation.hierarchies.configurations import competitors_of
from evaluation.hierarchies.runs import MICRO_ALONE, Candidate, ResumableLoop, at_settings, best_on_dev, trio_times
from evaluation.hierarchies.times import COUNTED, redundancy, target_utilisation
from evaluation.intervals import Spent, Splits
from evaluation.sheet import Sheet
from evaluation.traces.trace import Trace

FAMILIES = {
    MICRO_ALONE: "decoded_micro",
    "sd + pre-verify": "decoded_pre_verify",
    "sd + pre-verify + self-verify": "decoded_pre_self_verify",
    "HSDDW": "decoded_hsddw",
    "pre-verified, fixed lengths": "decoded_pre_verified",
    "interleaved (Chen)": "decoded_interleaved",
}
"""Competitor of `evaluation hierarchy` -> family."""
HIERARCHY_NAMES = {
    "decoded_micro": "micro alone, fixed length *",
    "decoded_pre_verify": "HSDDW's pre-verify *",
    "decoded_pre_self_verify": "HSDDW's pre- and self-verify *",
    "decoded_hsddw": "HSDDW *",
    "decoded_pre_verified": "pre-verified, fixed lengths *",
    "decoded_interleaved": "interleaved (Chen) *",
}


@dataclass(frozen=True)
class DecodedHierarchies:
    """The hierarchies on one dataset's prompts."""

    dev: list[Candidate]
    test: list[Candidate]
    """Each competitor at every setting that one of the evaluation's costs chose on dev."""
    micro_ratio: float
    """t_micro / t_draft."""
    prompt_of_row: Int[np.ndarray, " decoded"]
    """Prompt of each generation on test: the later turns of a conversation belong to its prompt."""

    def picks(self, cost: CostModel) -> dict[str, Candidate]:
        """Family -> its run on test, at the setting that is fastest on dev at this cost."""
        best = self.best(cost)
        return {
            FAMILIES[run.competitor.name]: run for run in self.test if run.setting.key == best[run.competitor.name].key
        }

    def best(self, cost: CostModel) -> dict[str, Setting]:
        """Competitor -> its setting that is fastest on dev at this cost."""
        return best_on_dev(self.dev, lambda run: self.spent(run, cost).tokens_per_s)

    def spent(self, run: Candidate, cost: CostModel) -> Spent:
        """Tokens and seconds of every generation."""
        return run.spent(
            [
                cost.t_draft_s * (self.micro_ratio * counts.num_micro_forwards + counts.num_draft_forwards)
                + cost.target_s(np.array(decoded.lengths)).sum()
                for counts, decoded in zip(run.each, run.decoded, strict=True)
            ]
        )

    def results(self, cost: CostModel, yardstick: Yardstick) -> list[Result]:
        """One row per competitor, in the form of the replayed ones, against the same yardstick."""
        return [
            result_of(
                Finalist(
                    family,
                    name=run.competitor.name,
                    setting=dict(part.split("=", 1) for part in run.label.split()),
                    spent=Spent(*(np.bincount(self.prompt_of_row, amounts) for amounts in self.spent(run, cost))),
                    counts=run.counts,
                ),
                yardstick,
            )
            for family, run in self.picks(cost).items()
        ]

    def sheet(self, cost: CostModel) -> Sheet:
        """Counts of the three models, sigma and eta."""
        rows = []
        for family, run in self.picks(cost).items():
            counts = run.counts
            numbers = {heading: str(getattr(counts, name)) for heading, name in COUNTED.items()}
            rates = {"sigma %": f"{100 * redundancy(counts):.2f}", "eta %": f"{100 * target_utilisation(counts):.2f}"}
            rows.append(
                {"hierarchy": HIERARCHY_NAMES[family].removesuffix(" *"), "setting": run.label, **numbers, **rates}
            )
        title = (
            f"* decoded on {len(self.test[0].decoded)} test prompts, not replayed; t_micro / t_draft = "
            f"{self.micro_ratio:.2f}; "
            "N: tokens, F: forwards; sigma, eta: HSDDW's redundancy and target utilisation"
        )
        return Sheet(title, rows, names=2)

    def annotated(self, frame: pd.DataFrame, cost: CostModel) -> pd.DataFrame:
        """`frame` with a column `source` (replayed, decoded) and, of the decoded rows, the counts."""
        columns: dict[str, dict[str, Any]] = {}
        for family, run in self.picks(cost).items():
            counts = run.counts
            columns[family] = {"source": "decoded", "num_prompts": len(run.decoded), "micro_ratio": self.micro_ratio}
            columns[family] |= {name: int(getattr(counts, name)) for name in COUNTED.values()}
            columns[family] |= {"redundancy": redundancy(counts), "target_utilisation": target_utilisation(counts)}
        return frame.join(
            pd.DataFrame([columns.get(family, {"source": "replayed"}) for family in frame["family"]], index=frame.index)
        )


def decode_hierarchies(
    loop: ResumableLoop, traces: Splits[Trace], *, costs: Sequence[CostModel], t_micro_s: float | None
) -> DecodedHierarchies:
    """Decode what is not there yet: every setting on dev, on test those that win at one of the costs.

    Args:
        loop: of the dataset.
        traces: of the dataset, whose prompts are used, each once.
        costs: of this machine first.
        t_micro_s: seconds of a micro forward; None: fitted over the generations on dev, in proportion to t_draft.
    """
    competitors = [competitor for competitor in competitors_of(loop.trio) if competitor.name in FAMILIES]
    on_dev, on_test = ([list(trace.rows[row].prompt_ids) for row in trace.first_draws] for trace in traces)
    dev = loop.play(competitors, on_dev)
    times = trio_times(dev) if t_micro_s is None else None
    ratio = times.t_micro_s / times.t_draft_s if times else t_micro_s / costs[0].t_draft_s  # type: ignore[operator]
    decoded = DecodedHierarchies(dev, [], ratio, traces.test.prompt_of_row[traces.test.first_draws])
    for cost in costs:
        done = {(run.competitor.name, run.setting.key) for run in decoded.test}
        best = at_settings(competitors, decoded.best(cost))
        decoded.test.extend(
            loop.play(
                [competitor for competitor in best if (competitor.name, competitor.settings[0].key) not in done],
                on_test,
            )
        )
    return decoded

"""python -m evaluation replay: one policy over the recorded trace, with no model loaded.

The policy is written as for `decode generate` (`decode.policies.registry`). `auto` keeps the index that `evaluation tune` wrote into its head
and takes the times of this run: the measured ones, those of the YAML, or those of the ratio that is asked for.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from rich.table import Table

from configs.schema import Config
from decode.experiment import Experiment
from decode.loop.counts import Counts
from decode.policies import Policy
from decode.policies.auto import Auto
from evaluation.console import wide_console
from evaluation.contest.arms import total
from evaluation.costs.machine import costs_for
from evaluation.costs.model import CostModel
from evaluation.traces.recording import trace_folder
from evaluation.traces.replay import replay_settings
from evaluation.traces.trace import Trace

_BARS = " ▁▂▃▄▅▆▇█"
_RATES = ("discard rate", "verification rate", "acceptance length", "tokens/s", "speed-up")
_COLUMNS = ("prompts", "N", "N_draft", "accepted", "N_target", *_RATES)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One policy on one split of one dataset."""

    dataset: str
    split: str
    num_prompts: int
    counts: Counts
    tokens_per_s: float
    speed_up: float
    """Over the target alone."""
    rounds_by_length: list[int]
    """Rounds that drafted 0, 1, … tokens."""

    def as_dict(self) -> dict[str, Any]:
        """Counts and rates as JSON."""
        rates = {name: float(getattr(self.counts, name)) for name in ("discard_rate", "verification_rate", "acceptance_length")}
        counts = {name: int(value) for name, value in asdict(self.counts).items() if "micro" not in name}
        rest = {name: getattr(self, name) for name in ("tokens_per_s", "speed_up", "rounds_by_length")}
        return {"dataset": self.dataset, "split": self.split, "num_prompts": self.num_prompts, **counts, **rates, **rest}


def replay(config: Config, *, policy: str, ratio: float | None = None) -> None:
    """Replay one policy over the recorded trace: counts, rates, tokens/s, draft lengths.

    Args:
        config: of the experiment whose trace is replayed (`python -m evaluation trace` records it).
        policy: a name of `decode.policies.registry` (one that is not there prints them all), or head:PATH; parameters follow, as in
            entropy:max_sqrt_entropy=0.4 or head:PATH,max_rejection_prob=auto.
        ratio: t_target / t_draft of other hardware, in place of the measured times.
    """
    experiment = Experiment(config)
    rule = experiment.policy(policy)
    folder = trace_folder(experiment)
    traces = {dataset: folder.load(dataset) for dataset in experiment.datasets}
    folder.complete()  # nothing is missing, so this only compares the trace's manifest with the config
    cost = costs_for(experiment, ratio, others=[rule])
    rule = at_costs(rule, cost)
    rows = [
        row_of(rule, part, cost=cost, dataset=dataset, split=split)
        for dataset, splits in traces.items()
        for split, part in splits._asdict().items()
    ]
    wide_console().print(table_of(rows, policy=policy, cost=cost))
    for row in rows:
        print(f"draft lengths, {row.dataset} {row.split}: {histogram(row.rounds_by_length)}")
    print(json.dumps({"policy": policy, "costs": asdict(cost), "played": [row.as_dict() for row in rows]}))


def at_costs(policy: Policy, cost: CostModel) -> Policy:
    """`auto` at these times; where it was tuned for others, its lambda is estimated from scratch. Other policies do not depend on times."""
    if not isinstance(policy, Auto):
        return policy
    line = cost.line(policy.stop_kind)
    if np.allclose([getattr(policy, name) for name in line._fields], line, rtol=0.01, atol=0.0):
        return policy
    return replace(policy, **line._asdict(), throughput=None, prior_profit=None)


def row_of(policy: Policy, trace: Trace, *, cost: CostModel, dataset: str, split: str) -> Row:
    """Totals of the policy over the prompts of one split."""
    replayed = replay_settings(trace, policy)
    speed = float(cost.tokens_per_s(replayed)[0])
    return Row(
        dataset=dataset,
        split=split,
        num_prompts=trace.num_prompts,
        counts=total(replayed.counts, 0),
        tokens_per_s=speed,
        speed_up=speed * cost.t_target_s[0],
        rounds_by_length=replayed.lengths[0].sum(0).tolist(),
    )


def table_of(rows: Sequence[Row], *, policy: str, cost: CostModel) -> Table:
    """One row per dataset and split."""
    table = Table(title=f"{policy}; {cost.title}")
    for name in ("dataset", "split", *_COLUMNS):
        table.add_column(name, justify="left" if name in ("dataset", "split") else "right")
    for row in rows:
        counts = row.counts
        numbers = (row.num_prompts, counts.num_emitted, counts.num_drafted, counts.num_accepted, counts.num_target)
        rates = (f"{counts.discard_rate:.3f}", f"{counts.verification_rate:.3f}", f"{counts.acceptance_length:.2f}")
        table.add_row(row.dataset, row.split, *(f"{n:,}" for n in numbers), *rates, f"{row.tokens_per_s:.1f}", f"{row.speed_up:.2f}")
    return table


def histogram(rounds_by_length: Sequence[int]) -> str:
    """Share of rounds by draft length: a bar for each length from 0, and the median."""
    rounds = np.asarray(rounds_by_length)
    # Bars are rounded up, so that a length that occurs at all can be seen.
    heights = np.ceil(rounds / max(1, rounds.max()) * (len(_BARS) - 1)).astype(int)
    median = int(np.searchsorted(rounds.cumsum(), rounds.sum() / 2))
    mean = float(rounds @ np.arange(len(rounds)) / max(1, rounds.sum()))
    return f"0 |{''.join(_BARS[height] for height in heights)}| {len(rounds) - 1}   mean {mean:.2f}, median {median}"

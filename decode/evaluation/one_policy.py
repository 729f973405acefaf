"""python -m decode replay: one policy over the recorded trace, with no model loaded.

The policy is written as for `decode generate` (`decode.policies.registry`). `auto` keeps the index that `decode tune` wrote into its head
and takes the times of this run: the measured ones, those of the YAML, or the ratio asked for.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from rich.table import Table

from configs.schema import Config
from decode.console import wide_console
from decode.costs.command import costs_for
from decode.costs.model import CostModel
from decode.evaluation.results import throughput, total
from decode.generate.command import policy_for
from decode.loop.counts import Counts
from decode.policies import Policy
from decode.policies.auto import Auto
from decode.traces.command import SPLITS, datasets_of, load_trace, record
from decode.traces.replay import Replayed, replay_settings
from decode.tuning.rule import times_of

_BARS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Played:
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
        config: of the experiment whose trace is replayed (`python -m decode trace` records it).
        policy: a name of `decode.policies.registry` (one that is not there prints them all), or head:PATH; parameters follow, as in
            entropy:max_sqrt_entropy=0.4 or head:PATH,max_rejection_prob=auto.
        ratio: t_target / t_draft of other hardware, in place of the measured times.
    """
    rule = policy_for(config, policy)
    traces = {(dataset, split): load_trace(config, dataset, split) for dataset in datasets_of(config) for split in SPLITS}
    record(config)  # all is there: this compares the trace's manifest with the config
    cost = costs_for(config, ratio)
    rule = at_costs(rule, cost)
    played = [
        play(replay_settings(trace, rule), cost, dataset=dataset, split=split, num_prompts=len(trace.rows))
        for (dataset, split), trace in traces.items()
    ]
    wide_console().print(table_of(played, policy, cost))
    for each in played:
        print(f"draft lengths, {each.dataset} {each.split}: {histogram(each.rounds_by_length)}")
    print(json.dumps({"policy": policy, "costs": asdict(cost), "played": [each.as_dict() for each in played]}))


def at_costs(policy: Policy, cost: CostModel) -> Policy:
    """`auto` at these times; where they are not those it was tuned for, its lambda is estimated anew. Other policies know no times."""
    if not isinstance(policy, Auto):
        return policy
    times = times_of(cost)
    if np.allclose([getattr(policy, name) for name in times._fields], times, rtol=0.01, atol=0.0):
        return policy
    return replace(policy, **times._asdict(), throughput=None, prior_profit=None)


def play(replayed: Replayed, cost: CostModel, *, dataset: str, split: str, num_prompts: int) -> Played:
    """Totals of the one setting that was replayed."""
    speed = float(throughput(replayed, cost)[0])
    lengths = replayed.lengths[0].sum(0).tolist()
    return Played(dataset, split, num_prompts, total(replayed.counts, 0), speed, speed * cost.t_target_s[0], lengths)


def table_of(played: Sequence[Played], policy: str, cost: CostModel) -> Table:
    """One row per dataset and split."""
    table = Table(title=f"{policy}; t_target/t_draft = {cost.ratio:.2f} ({cost.origin})")
    names = (
        "prompts",
        "N",
        "N_draft",
        "accepted",
        "N_target",
        "discard rate",
        "verification rate",
        "acceptance length",
        "tokens/s",
        "speed-up",
    )
    for name in ("dataset", "split", *names):
        table.add_column(name, justify="left" if name in ("dataset", "split") else "right")
    for each in played:
        counts = each.counts
        numbers = (each.num_prompts, counts.num_emitted, counts.num_drafted, counts.num_accepted, counts.num_target)
        shares = (f"{counts.discard_rate:.3f}", f"{counts.verification_rate:.3f}", f"{counts.acceptance_length:.2f}")
        table.add_row(each.dataset, each.split, *(f"{n:,}" for n in numbers), *shares, f"{each.tokens_per_s:.1f}", f"{each.speed_up:.2f}")
    return table


def histogram(rounds_by_length: Sequence[int]) -> str:
    """Share of rounds by draft length: a bar for each length from 0, and the median."""
    rounds = np.asarray(rounds_by_length)
    heights = np.ceil(rounds / max(1, rounds.max()) * (len(_BARS) - 1)).astype(int)
    median = int(np.searchsorted(rounds.cumsum(), rounds.sum() / 2))
    mean = float(rounds @ np.arange(len(rounds)) / max(1, rounds.sum()))
    return f"0 |{''.join(_BARS[height] for height in heights)}| {len(rounds) - 1}   mean {mean:.2f}, median {median}"

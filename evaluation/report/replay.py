"""python -m evaluation replay: one policy over the recorded trace, with no model loaded.

`auto` keeps the index that `evaluation tune` wrote into its head and takes the times of this run.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from configs.hints import say_next
from configs.load import accepts_yaml
from configs.schema import Config
from data_gen.store.manifest import read_manifest
from decode.experiment import Experiment
from decode.policies import Policy
from decode.policies.auto import Auto
from evaluation.costs.machine import costs_for
from evaluation.table import Table, printing, say, shown
from evaluation.times import Times
from evaluation.traces.recording import trace_folder
from evaluation.traces.replay import replay_settings
from evaluation.traces.trace import Trace

_COLUMNS = {
    "dataset": ("dataset", ""),
    "split": ("split", ""),
    "prompts": ("num_prompts", ","),
    "tokens": ("num_emitted", ","),
    "drafted": ("num_drafted", ","),
    "accepted": ("num_accepted", ","),
    "target forwards": ("num_target", ","),
    "discard rate": ("discard_rate", ".3f"),
    "verification rate": ("verification_rate", ".3f"),
    "acceptance length": ("acceptance_length", ".2f"),
    "tokens/s": ("tokens_per_s", ".1f"),
    "speed-up": ("speed_up", ".2f"),
}


@accepts_yaml
def replay_policy(config: Config, *, policy: str, ratio: float | None = None, json: bool = False) -> None:
    """Run `acceptance-heads replay`; `configs.measuring` documents its flags."""
    experiment = Experiment(config)
    directory = experiment.directory / "trace"
    if (directory / "manifest.json").is_file():  # a missing trace is refused after what is wrong with the policy
        recorded = read_manifest(directory, command="trace", keys=["target", "draft"])
        experiment.presume({"target": recorded["target"], "draft": recorded["draft"]})
    if experiment.presumed:
        print(f"{' and '.join(sorted(experiment.presumed))} not here: taken for those of the trace", file=sys.stderr)
    rule = experiment.policy(policy)
    folder = trace_folder(experiment)
    traces = {dataset: folder.load(dataset) for dataset in experiment.datasets}
    folder.complete()  # nothing is missing, so this only compares the trace's manifest with the config
    cost = costs_for(experiment, ratio, policy=rule)
    rule = at_costs(rule, cost)
    rows = [
        played(rule, part, cost=cost, dataset=dataset, split=split)
        for dataset, splits in traces.items()
        for split, part in vars(splits).items()
    ]
    with printing(json) as publish:
        Table(f"{policy}; {cost.title}", shown(rows, _COLUMNS), names=2).print()
        for row in rows:
            print(f"draft lengths, {row['dataset']} {row['split']}: {lengths_text(row['rounds_by_length'])}")
        for row in (row for row in rows if row["split"] == "test"):
            say(
                f"{cost.where}: {policy} on {row['num_prompts']:,} test prompts of {row['dataset']}, predicted "
                f"{row['speed_up']:.2f} times the target alone ({row['acceptance_length']:.2f} tokens per target "
                f"forward, {row['discard_rate']:.2f} drafted tokens discarded per token)."
            )
        say_next(config, "evaluate", ", which compares it with every other policy; bench does on a clock")
        publish({"policy": policy, "costs": asdict(cost), "played": rows})


def at_costs(policy: Policy, cost: Times) -> Policy:
    """`auto` at these times; where it was tuned for others, its lambda is estimated from scratch."""
    if not isinstance(policy, Auto):
        return policy
    # a rule that was tuned for blocks has no seconds of a draft step
    line = cost.line(policy.stop_kind, has_blocks=policy.t_draft_s == 0)
    if np.allclose([getattr(policy, name) for name in line._fields], line, rtol=0.01, atol=0.0):
        return policy
    return replace(policy, **line._asdict(), throughput=None, prior_profit=None)


def played(policy: Policy, trace: Trace, *, cost: Times, dataset: str, split: str) -> dict[str, Any]:
    """Counts and rates of the policy over the prompts of one split; `rounds_by_length`: rounds that drafted 0, 1, …
    tokens.
    """
    replayed = replay_settings(trace, policy)
    counts, speed = replayed.total(), float(cost.tokens_per_s(replayed)[0])
    return {
        "dataset": dataset,
        "split": split,
        "num_prompts": trace.num_prompts,
        **{name: int(value) for name, value in vars(counts).items() if "micro" not in name},
        **{name: float(getattr(counts, name)) for name in ("discard_rate", "verification_rate", "acceptance_length")},
        "tokens_per_s": speed,
        "speed_up": speed * cost.t_target_s[0],
        "rounds_by_length": replayed.lengths[0].sum(0).tolist(),
    }


def lengths_text(rounds_by_length: Sequence[int]) -> str:
    """Mean and median draft length over rounds."""
    rounds = np.asarray(rounds_by_length)
    median = int(np.searchsorted(rounds.cumsum(), rounds.sum() / 2))
    return f"mean {rounds @ np.arange(len(rounds)) / max(1, rounds.sum()):.2f}, median {median}"

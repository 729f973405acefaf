"""python -m evaluation replay: one or more policies over the recorded trace, with no model loaded.

`auto` keeps the index that `evaluation tune` wrote into its head and takes the times of this run.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
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
from evaluation.competitor import Arm, Competitor
from evaluation.contest import replay_arms, result_of
from evaluation.costs.machine import costs_for
from evaluation.gain import conclusion
from evaluation.played import Played
from evaluation.table import Table, flat, printing, say, shown
from evaluation.times import Times
from evaluation.traces.recording import trace_folder

_COLUMNS = {
    "policy": ("policy", ""),
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

Row = dict[str, Any]
"""A policy on one split of a dataset, or its gain over another policy there."""


@accepts_yaml
def replay_policy(config: Config, *, policy: Sequence[str], ratio: float | None = None, json: bool = False) -> None:
    """Run `acceptance-heads replay`; `configs.measuring` documents its flags."""
    specs = [policy] if isinstance(policy, str) else list(dict.fromkeys(policy))
    experiment = Experiment(config)
    directory = experiment.directory / "trace"
    if (directory / "manifest.json").is_file():  # a missing trace is refused after what is wrong with the policy
        recorded = read_manifest(directory, command="trace", keys=["target", "draft"])
        experiment.presume({"target": recorded["target"], "draft": recorded["draft"]})
    if experiment.presumed:
        print(f"{' and '.join(sorted(experiment.presumed))} not here: taken for those of the trace", file=sys.stderr)
    rules = [experiment.policy(spec) for spec in specs]
    folder = trace_folder(experiment)
    traces = {dataset: folder.load(dataset) for dataset in experiment.datasets}
    folder.complete()  # nothing is missing, so this only compares the trace's manifest with the config
    cost = costs_for(experiment, ratio, policies=rules)
    longest = experiment.decode.max_draft_length
    competitors = [
        Competitor(spec, spec, at_costs(rule, cost, longest), ({},)) for spec, rule in zip(specs, rules, strict=True)
    ]
    every_arm = {dataset: list(replay_arms(competitors, splits)) for dataset, splits in traces.items()}
    rows = [row for dataset, arms in every_arm.items() for row in _rows_of(dataset, arms, cost)]
    comparisons = [entry for dataset, arms in every_arm.items() for entry in _comparisons(dataset, arms, cost)]
    with printing(json) as publish:
        Table(f"{' against '.join(specs)}; {cost.title}", shown(rows, _COLUMNS), names=3).print()
        for row in rows:
            where = f"{row['policy']}, {row['dataset']} {row['split']}"
            print(f"draft lengths, {where}: {lengths_text(row['rounds_by_length'])}")
        for row in rows:
            if row["split"] == "test":
                say(_sentence_of(row, cost))
        for comparison in comparisons:
            say(f"{comparison['dataset']}: {comparison['conclusion']}.")
        say_next(config, "evaluate", ", which compares every policy; bench does on a clock")
        publish({"policies": specs, "costs": asdict(cost), "played": rows, "gains": comparisons})


def _rows_of(dataset: str, arms: Sequence[Arm], cost: Times) -> Iterator[Row]:
    for arm in arms:
        for split, played in (("dev", arm.dev), ("test", arm.test)):
            num_prompts = len(np.unique(played.prompt_of_row))
            row = {"policy": arm.competitor.name, "dataset": dataset, "split": split, "num_prompts": num_prompts}
            yield row | figures_of(played, cost)


def _sentence_of(row: Mapping[str, Any], cost: Times) -> str:
    return (
        f"{cost.where}: {row['policy']} on {row['num_prompts']:,} test prompts of {row['dataset']}, predicted "
        f"{row['speed_up']:.2f} times the target alone ({row['acceptance_length']:.2f} tokens per target "
        f"forward, {row['discard_rate']:.2f} drafted tokens discarded per token)."
    )


def _comparisons(dataset: str, arms: Sequence[Arm], cost: Times) -> Iterator[Row]:
    """The gain of every policy over the first one on the test prompts of a dataset, in numbers and in words."""
    first, *others = (result_of(arm, 0, cost) for arm in arms)
    for result in others:
        names = result.competitor.name, first.competitor.name
        gain = result.over(first)
        sentence = conclusion(names[0], gain, names[1], len(first.throughput.tokens))
        yield {"dataset": dataset, "policy": names[0], "over": names[1], **flat({"gain": gain}), "conclusion": sentence}


def at_costs(policy: Policy, cost: Times, longest: int) -> Policy:
    """`auto` at these times, with drafts up to the `longest`; where it was tuned for others, its lambda is estimated
    from scratch.
    """
    if not isinstance(policy, Auto):
        return policy
    # a rule that was tuned for blocks has no seconds of a draft step
    line = cost.line(policy.stop_kind, longest, has_blocks=policy.t_draft_s == 0)
    if np.allclose([getattr(policy, name) for name in line], list(line.values()), rtol=0.01, atol=0.0):
        return policy
    return replace(policy, **line, throughput=None, prior_profit=None)


def figures_of(played: Played, cost: Times) -> dict[str, Any]:
    """Counts and rates of a policy over all prompts; `rounds_by_length`: rounds that drafted 0, 1, … tokens."""
    counts = played.total()
    speed = float(cost.tokens_per_s(played)[0])
    return {
        **{name: int(value) for name, value in vars(counts).items() if "micro" not in name},
        **{name: float(getattr(counts, name)) for name in ("discard_rate", "verification_rate", "acceptance_length")},
        "tokens_per_s": speed,
        "speed_up": speed * cost.alone_s,
        "rounds_by_length": played.lengths[0].sum(0).tolist(),
    }


def lengths_text(rounds_by_length: Sequence[int]) -> str:
    """Mean and median draft length over rounds."""
    rounds = np.asarray(rounds_by_length)
    median = int(np.searchsorted(rounds.cumsum(), rounds.sum() / 2))
    return f"mean {rounds @ np.arange(len(rounds)) / max(1, rounds.sum()):.2f}, median {median}"

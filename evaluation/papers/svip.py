"""SVIP (arXiv 2411.18462), Tables 1, 2, 5 and 6: speed-ups of a constant length of 5, of the heuristic, and of SVIP,
replayed on test.

Tables 1 and 5 have a column per category of the prompts (SpecBench's), greedy and at temperature 1; Tables 2 and 6 a
column per generation length, at temperature 1 and greedy. The pair's `Sampling` decides which two are made.

SVIP's threshold is the paper's where the pair is one of its pairs, and for other pairs what its procedure chooses: of
{0.2, 0.3, 0.4, 0.5} the fastest on 8 prompts held out, here of dev. The heuristic starts at 5. Departures: drafts end
at decode.max_draft_length (the paper's limit is 40); the times of a forward do not grow with the context; the speed-up
of one generation length is that of the first so many tokens of the longer generations.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from decode.experiment import Experiment
from decode.policies import Entropy, FixedLength, Heuristic, Policy
from evaluation.contest import best_setting
from evaluation.costs.machine import costs_for
from evaluation.table import Table
from evaluation.times import Times
from evaluation.traces.recording import trace_folder
from evaluation.traces.replay import replay_settings
from evaluation.traces.trace import Trace

PUBLISHED = {"pythia": 0.4, "qwen2.5": 0.3, "llama-3": 0.3}
"""Part of the target's name -> the threshold that the paper chose for its pair."""
CHOICES = (0.2, 0.3, 0.4, 0.5)
HELD_OUT = 8
_LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 6144, 8192)
"""Generation lengths; the paper prints those from 128 on, the shorter ones are for pairs that write little."""


def svip_tables(experiment: Experiment) -> list[Table]:
    """Both tables of this pair's sampling."""
    folder = trace_folder(experiment)
    folder.complete()
    traces, times = {dataset: folder.load(dataset) for dataset in experiment.datasets}, costs_for(experiment)
    threshold, why = threshold_for(Path(experiment.models.target.path).name, next(iter(traces.values())).dev, times)
    methods: dict[str, Policy] = {"Const.": FixedLength(5), "Heuristics": Heuristic(5), "SVIP": Entropy(threshold)}
    categories = {
        name: part for dataset, trace in traces.items() for name, part in by_category(dataset, trace.test).items()
    }
    rows = []
    for dataset, trace in traces.items():
        cut = dict(by_length(trace.test, experiment.decode.max_new_tokens))
        prefix = f"{dataset}: " if len(traces) > 1 else ""
        rows += [
            {"Methods": f"{prefix}{name}", **_cells(speed_ups(cut, policy, times))} for name, policy in methods.items()
        ]
    first, second = (1, 6) if experiment.sampling.is_greedy else (5, 2)
    figures = f"replayed on test, predicted at {times.title}; h = {threshold:g} ({why})"
    return [
        Table(f"SVIP Table {first}: speed-up by category, {figures}", category_rows(categories, methods, times)),
        Table(f"SVIP Table {second}: speed-up by generation length, {figures}", rows),
    ]


def threshold_for(target: str, dev: Trace, times: Times) -> tuple[float, str]:
    """The threshold max_sqrt_entropy, and its origin."""
    for name, threshold in PUBLISHED.items():
        if name in target.lower():
            return threshold, "the paper's"
    held_out = dev.select(range(min(HELD_OUT, len(dev.rows))))
    number, _ = best_setting(replay_settings(held_out, Entropy(np.array(CHOICES))), times)  # type: ignore[arg-type]
    return CHOICES[number], f"chosen on {len(held_out.rows)} dev prompts"


def category_rows(parts: Mapping[str, Trace], methods: Mapping[str, Policy], times: Times) -> list[dict[str, str]]:
    """A column per category; the last is their mean, with SVIP's gain over the constant."""
    speeds = {name: speed_ups(parts, policy, times) for name, policy in methods.items()}
    means = {name: np.mean(list(of_parts.values())) for name, of_parts in speeds.items()}
    gain = {"SVIP": f" ({means['SVIP'] / means['Const.'] - 1:+.1%})"}
    return [
        {"Methods": name, **_cells(of_parts), "Avg.": f"{means[name]:.2f}{gain.get(name, '')}"}
        for name, of_parts in speeds.items()
    ]


def by_category(dataset: str, trace: Trace) -> dict[str, Trace]:
    """The prompts of each category; a dataset without categories is one."""
    members: dict[str, list[int]] = {}
    for index, row in enumerate(trace.rows):
        members.setdefault(row.category or dataset, []).append(index)
    return {name: trace.select(members[name]) for name in sorted(members)}


def by_length(trace: Trace, longest: int) -> Iterator[tuple[str, Trace]]:
    """Every response cut off after each generation length."""
    for length in [length for length in _LENGTHS if length <= longest] or [longest]:
        yield str(length), trace.select(range(len(trace.rows)), num_tokens=length)


def speed_ups(parts: Mapping[str, Trace], policy: Policy, times: Times) -> dict[str, float]:
    """Predicted speed-ups over the target alone, by column."""
    speeds = {name: best_setting(replay_settings(part, policy), times)[1] for name, part in parts.items()}
    return {name: speed * times.t_target_s[0] for name, speed in speeds.items()}


def _cells(speeds: Mapping[str, float]) -> dict[str, str]:
    return {name: f"{speed:.2f}" for name, speed in speeds.items()}

"""SVIP (arXiv 2411.18462), Tables 1, 2, 5 and 6: speed-ups of a constant length of 5, of the heuristic, and of SVIP,
replayed on test.

Tables 1 and 5 have a column per category of the prompts (SpecBench's), greedy and at temperature 1; Tables 2 and 6 a
column per generation length, at temperature 1 and greedy. The pair's `Sampling` decides which two are made.

SVIP's threshold is the paper's where the pair is one of its pairs, and for other pairs what its procedure chooses: of
{0.2, 0.3, 0.4, 0.5} the fastest on 8 prompts held out, here of dev. The heuristic starts at 5. Departures: drafts end
at decode.max_draft_length (the paper's limit is 40); the times of a forward do not grow with the context; the speed-up
of one generation length is that of the first so many tokens of the longer generations.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from decode.experiment import Experiment
from decode.policies import Entropy, FixedLength, Heuristic, Policy
from evaluation.contest import best_setting
from evaluation.costs.machine import costs_for
from evaluation.gain import Throughput
from evaluation.table import Table
from evaluation.times import Times
from evaluation.traces.recording import trace_folder
from evaluation.traces.replay import replay_settings
from evaluation.traces.trace import Trace

PUBLISHED = {"pythia": 0.4, "qwen2.5": 0.3, "llama-3": 0.3}
"""Part of the target's name -> the threshold that the paper chose for its pair."""
CHOICES = (0.2, 0.3, 0.4, 0.5)
HELD_OUT = 8
LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 6144, 8192)
"""Generation lengths; the paper prints those from 128 on, the shorter ones are for pairs that write little."""


def svip_tables(experiment: Experiment) -> list[Table]:
    """Both tables of this pair's sampling."""
    folder = trace_folder(experiment)
    folder.complete()
    traces, times = {dataset: folder.load(dataset) for dataset in experiment.datasets}, costs_for(experiment)
    threshold, why = threshold_for(Path(experiment.models.target.path).name, next(iter(traces.values())).dev, times)
    methods: dict[str, Policy] = {"Const.": FixedLength(5), "Heuristics": Heuristic(5), "SVIP": Entropy(threshold)}
    longest = experiment.decode.max_new_tokens
    lengths = [length for length in LENGTHS if length <= longest] or [longest]
    speeds: dict[str, dict[str, float]] = {name: {} for name in methods}
    by_length = []
    for dataset, trace in traces.items():
        cuts = {str(k): trace.test.select(range(len(trace.test.rows)), num_tokens=k) for k in lengths}
        prefix = f"{dataset}: " if len(traces) > 1 else ""
        for name, policy in methods.items():
            speeds[name] |= by_category(trace.test, policy, times, dataset)
            tokens_per_s = {k: times.tokens_per_s(replay_settings(cut, policy))[0] for k, cut in cuts.items()}
            cells = {k: f"{speed * times.t_target_s[0]:.2f}" for k, speed in tokens_per_s.items()}
            by_length.append({"Methods": f"{prefix}{name}"} | cells)
    first, second = (1, 6) if experiment.sampling.is_greedy else (5, 2)
    figures = f"replayed on test, predicted at {times.title}; h = {threshold:g} ({why})"
    return [
        Table(f"SVIP Table {first}: speed-up by category, {figures}", category_rows(speeds)),
        Table(f"SVIP Table {second}: speed-up by generation length, {figures}", by_length),
    ]


def threshold_for(target: str, dev: Trace, times: Times) -> tuple[float, str]:
    """The threshold max_sqrt_entropy, and its origin."""
    for name, threshold in PUBLISHED.items():
        if name in target.lower():
            return threshold, "the paper's"
    held_out = dev.select(range(min(HELD_OUT, len(dev.rows))))
    number, _ = best_setting(replay_settings(held_out, Entropy(np.array(CHOICES))), times)  # type: ignore[arg-type]
    return CHOICES[number], f"chosen on {len(held_out.rows)} dev prompts"


def by_category(trace: Trace, policy: Policy, times: Times, dataset: str) -> dict[str, float]:
    """Predicted speed-ups over the target alone by category of the prompts; a dataset without categories is one."""
    played = replay_settings(trace, policy)
    (tokens,), (seconds,) = played.counts.num_emitted, times.time_s(played)
    alone = Throughput(tokens, tokens * times.t_target_s[0])
    return speed_ups(Throughput(tokens, seconds), alone, [row.category or dataset for row in trace.rows])


def speed_ups(
    throughput: Throughput, alone: Throughput, columns: Sequence[str], total: str | None = None
) -> dict[str, float]:
    """Speed-ups over the target alone on the prompts of each column, columns in alphabetical order, and on all in a
    column `total`; `columns` has the column of each prompt, such as its category.
    """
    labels = np.array(columns)
    parts = {name: labels == name for name in sorted(set(columns))} | ({total: slice(None)} if total else {})
    return {name: float(throughput.at(at).tokens_per_s / alone.at(at).tokens_per_s) for name, at in parts.items()}


def category_rows(speeds: Mapping[str, Mapping[str, float]]) -> list[dict[str, str]]:
    """A column per category; the last is their mean, with SVIP's gain over the constant."""
    means = {name: np.mean(list(of_parts.values())) for name, of_parts in speeds.items()}
    gain = {"SVIP": f" ({means['SVIP'] / means['Const.'] - 1:+.1%})"}
    return [
        {"Methods": name}
        | {category: f"{speed:.2f}" for category, speed in of_parts.items()}
        | {"Avg.": f"{means[name]:.2f}{gain.get(name, '')}"}
        for name, of_parts in speeds.items()
    ]

"""How acceptance and the best setting depend on the position in a response: `python -m benchmarks.lengths
--experiment experiment.yaml`, on that experiment's trace.

Responses are cut into parts of a hundred tokens; a round belongs to the part in which it starts. In each part the dev
prompts choose the fixed length and the threshold that are fastest there, and the test prompts show what these gain over
the settings that dev chose for whole responses.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from configs.command import run
from evaluation import Evaluation, evaluate
from evaluation.contest import Result
from evaluation.report.frames import played_by_position
from evaluation.traces.trace import Trace

CHOSEN = ("fixed_length", "cumulative_token_prob")
"""Families whose best setting is looked for in each part."""
_LEAST_PROMPTS = 10
"""A part that fewer test prompts reach is left out."""


def result_in_parts(result: Result, trace: Trace, edges: Sequence[int], *, on_dev: bool = False) -> list[Result]:
    """One setting in each part between ascending edges, on the prompts of the trace that reach it."""
    assert result.arm is not None, "its settings were replayed"
    arm_played = result.arm.dev if on_dev else result.arm.test
    played = arm_played.select([result.number])
    lengths = np.diff(trace.offsets)
    parts = []
    for first, part in zip(edges, played_by_position(result.policy, played, [trace], np.array(edges)), strict=False):
        rows = (lengths > first).nonzero()[0]
        parts.append(replace(result, played=part.select([0], rows)))
    return parts


def rates_in_parts(trace: Trace, edges: Sequence[int]) -> list[float]:
    """The mean acceptance_rate of the positions of each part."""
    position = np.arange(trace.num_positions) - np.repeat(trace.offsets[:-1], np.diff(trace.offsets))
    part = np.searchsorted(edges, position, side="right") - 1
    rate = trace.positions["acceptance_rate"]
    return [float(rate[trace.is_drafted & (part == number)].mean()) for number in range(len(edges) - 1)]


def best_in_parts(evaluation: Evaluation, family: str, edges: Sequence[int]) -> list[Result]:
    """The setting of a family that is fastest on the dev prompts of each part, on the test prompts of that part."""
    result = evaluation.contest.results[family]
    traces = evaluation.replays[evaluation.contest.dataset].traces
    settings = [replace(result, number=number) for number in range(len(result.competitor.settings))]
    on_dev = [result_in_parts(at, traces.dev, edges, on_dev=True) for at in settings]
    best = []
    for part in range(len(edges) - 1):
        speeds = [parts[part].tokens_per_s for parts in on_dev]
        fastest = settings[speeds.index(max(speeds))]
        best.append(result_in_parts(fastest, traces.test, edges)[part])
    return best


def lengths(*, experiment: str, width: int = 100) -> None:
    """Print a table of the parts.

    Args:
        experiment: the YAML of an experiment, whose trace is recorded first if need be.
        width: tokens of a part.

    Raises:
        ValueError: an experiment with several datasets, or with fewer than ten test prompts.
    """
    evaluation = evaluate(experiment)
    contest = evaluation.contest
    if evaluation.pooled or contest.num_prompts < _LEAST_PROMPTS:
        raise ValueError(
            f"{experiment} has {len(evaluation.contests)} datasets and {contest.num_prompts} test prompts; this needs "
            f"one dataset and at least {_LEAST_PROMPTS} prompts: set decode.datasets and decode.num_test"
        )
    traces = evaluation.replays[contest.dataset].traces
    num_tokens = np.diff(traces.test.offsets)
    edges = list(range(0, int(np.sort(num_tokens)[-_LEAST_PROMPTS]) + width, width))
    chosen = {
        name: result_in_parts(result, traces.test, edges) for name, result in contest.results.items() if result.arm
    }
    best = {family: best_in_parts(evaluation, family, edges) for family in CHOSEN}
    print(f"{contest.times.title}; gains in percent over the best fixed length of whole responses")
    for number, rate in enumerate(rates_in_parts(traces.test, edges)):
        base = chosen[CHOSEN[0]][number]
        num_prompts = int((num_tokens > edges[number]).sum())
        print(f"tokens {edges[number]} to {edges[number + 1] - 1}, {num_prompts} prompts, acceptance_rate {rate:.3f}")
        for family in CHOSEN:
            here = best[family][number]
            print(f"  best {here.label}: {here.over(chosen[family][number]).text} over {chosen[family][0].label}")
        for name, parts in chosen.items():
            print(f"  {name}: {parts[number].over(base).text}")


if __name__ == "__main__":
    run({"lengths": lengths}, default="lengths")

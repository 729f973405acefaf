"""SpecDec++ (arXiv 2405.19715), Tables 1 and 3: throughputs of its own heads, replayed on the test prompts; Table 2
stands beside them.

As printed: K in {2, 4, …, 14}, h in {0.1, 0.3, 0.5, 0.7, 0.9} on raw probabilities, and each cell is the best *on
test*. `evaluation evaluate` chooses on dev and gives intervals. As in the paper a throughput is counts times forward
times. Its heads are fed-time and read the hidden state alone (`heads.specdec`); other heads are in no row.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from decode.experiment import Experiment
from decode.policies import FixedLength, HeadPolicy
from evaluation.contest.grids import family_of
from evaluation.costs.machine import costs_for
from evaluation.costs.model import CostModel
from evaluation.papers.forward_times import LENGTHS, THRESHOLDS, forward_times
from evaluation.sheet import Sheet
from evaluation.traces.recording import trace_folder
from evaluation.traces.replay import replay_settings
from evaluation.traces.trace import Trace
from heads.model.head import AcceptanceHead

_NEAR = 0.99
"""Table 3 sets throughputs in bold that are above this share of the largest of their dataset."""


class Best(NamedTuple):
    """The best of some settings on test."""

    tokens_per_s: float
    setting: float


def specdec_tables(experiment: Experiment) -> list[Sheet]:
    """Tables 1 to 3.

    Raises:
        ValueError: none of the heads is one of the paper's.
    """
    heads = {name: head for name, head in experiment.heads.items() if family_of(head) == "head_specdec"}
    if not heads:
        raise ValueError(
            f"none of {len(experiment.heads)} heads is fed-time on the hidden state alone, as SpecDec++'s are; train "
            "some with "
            "heads.specdec true and export them"
        )
    folder = trace_folder(experiment)
    folder.complete()
    tests, cost = {dataset: folder.load(dataset).test for dataset in experiment.datasets}, costs_for(experiment)
    plain = {dataset: best_length(test, cost) for dataset, test in tests.items()}
    best = {
        name: {dataset: best_threshold(head, test, cost) for dataset, test in tests.items()}
        for name, head in heads.items()
    }
    fastest = max(
        best,
        key=lambda name: sum(each.tokens_per_s / plain[dataset].tokens_per_s for dataset, each in best[name].items()),
    )
    return [
        throughput_sheet(plain, best, cost),
        forward_times(experiment, heads[fastest]),
        heads_sheet(heads, best, cost),
    ]


def best_length(trace: Trace, cost: CostModel) -> Best:
    """The fastest fixed length."""
    lengths = np.array([length for length in LENGTHS if length <= trace.max_draft_length] or [trace.max_draft_length])
    return _best(cost.tokens_per_s(replay_settings(trace, FixedLength(lengths))), lengths)  # type: ignore[arg-type]


def best_threshold(head: AcceptanceHead, trace: Trace, cost: CostModel) -> Best:
    """The fastest threshold of one head."""
    return _best(
        cost.tokens_per_s(replay_settings(trace, HeadPolicy(head, np.array(THRESHOLDS)))), np.array(THRESHOLDS)
    )


def throughput_sheet(plain: Mapping[str, Best], best: Mapping[str, Mapping[str, Best]], cost: CostModel) -> Sheet:
    """Table 1: the best throughputs by dataset, with the speed-up over the target alone that the paper gives in
    words.
    """

    def cells(of_dataset: Mapping[str, Best]) -> dict[str, str]:
        return {
            name: f"{each.tokens_per_s:.2f} ({each.tokens_per_s * cost.t_target_s[0]:.2f}x)"
            for name, each in of_dataset.items()
        }

    largest = {dataset: max(of_head[dataset] for of_head in best.values()) for dataset in plain}
    rows = [{"Dataset": "SpecDec++", **cells(largest)}, {"Dataset": "SpecDec (baseline)", **cells(plain)}]
    return Sheet(f"SpecDec++ Table 1: best tokens/s (speed-up), {described(cost)}", rows)


def heads_sheet(heads: Mapping[str, AcceptanceHead], best: Mapping[str, Mapping[str, Best]], cost: CostModel) -> Sheet:
    """Table 3: KL and best throughput of every head. KL is of raw probabilities, as printed; without the official
    code's sign slip.
    """
    ordered = sorted(heads, key=lambda name: (heads[name].provenance.reject_weight, heads[name].depth))
    largest = {dataset: max(of_head[dataset].tokens_per_s for of_head in best.values()) for dataset in best[ordered[0]]}
    rows = []
    for name in ordered:
        head = heads[name]
        row: dict[str, Any] = {"w_rej": f"{head.provenance.reject_weight:g}", "Depth D": head.depth}
        for column, metric in (("train/KL", "train_raw_kl"), ("eval/KL", "raw_kl")):
            row[column] = f"{head.provenance.metrics[metric]:.3f}" if metric in head.provenance.metrics else ""
        for dataset, (speed, threshold) in best[name].items():
            cell = f"{speed:.2f} (h = {threshold:g})"
            row[dataset] = f"[bold]{cell}[/bold]" if speed > _NEAR * largest[dataset] else cell
        rows.append(row)
    return Sheet(
        f"SpecDec++ Table 3: heads, and best tokens/s over h, {described(cost)}; bold: above 99 % of the largest", rows
    )


def described(cost: CostModel) -> str:
    """One line on the origin of a replayed figure."""
    return f"replayed on test, predicted at {cost.title}"


def _best(speeds: np.ndarray, settings: np.ndarray) -> Best:
    place = int(speeds.argmax())
    return Best(float(speeds[place]), float(settings[place]))

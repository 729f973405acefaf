"""SpecDec++ (arXiv 2405.19715): throughputs of its heads, replayed on the test prompts, and forward times, clocked.

Tables 1 and 3 as printed: K in {2, 4, …, 14}, h in {0.1, 0.3, 0.5, 0.7, 0.9} on raw probabilities, and each cell is the
best *on test*. `evaluate` chooses on dev, gives intervals, and draws Figure 4, the Pareto plot. As in the paper a
throughput is counts times forward times. Its heads are fed-time and read the hidden state alone (`heads.specdec`);
other heads are in no row.

Table 2 has forward times by regression, clocked per dataset:

    stand-alone   seconds on forwards, over generations by the draft alone and by the target alone
    SpecDec       seconds on (N_draft, N_target), over generations at every K of the paper
    SpecDec++     the same at every threshold of the paper, by one of its heads

Generations of all settings take turns, on a few prompts at several lengths, in the loop that is configured. Departure:
the first round of each, which reads the prompt, is left out.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd

from decode.experiment import Experiment
from decode.policies import FixedLength, HeadPolicy, Policy
from evaluation.competitor import family_of
from evaluation.contest import best_setting
from evaluation.costs.machine import costs_for, loop_of
from evaluation.families import SPECDEC
from evaluation.sources.clock import Arm, Clocked, clock_in_turns, generations_of
from evaluation.table import Table
from evaluation.traces.recording import trace_folder
from evaluation.traces.replay import replay_settings
from heads.model.head import AcceptanceHead

LENGTHS = (2, 4, 6, 8, 10, 12, 14)
THRESHOLDS = (0.1, 0.3, 0.5, 0.7, 0.9)
"""K and h of the paper."""
_NEAR = 0.99
"""Table 3 prints throughputs above this fraction of the dataset's largest in bold."""
_PROMPTS = 4
_FRACTIONS = (0.25, 0.5, 0.75, 1.0)
"""Fractions of decode.max_new_tokens, by prompt: a regression needs generations of several lengths."""
_TIMES = ["t_draft", "t_target"]

Best = tuple[float, float]
"""(tokens per second, setting) of the fastest of some settings on test."""


def specdec_tables(experiment: Experiment) -> list[Table]:
    """Tables 1 to 3; ValueError if none of the heads is one of the paper's."""
    heads = {name: head for name, head in experiment.heads.items() if family_of(head) == SPECDEC}
    if not heads:
        raise ValueError(
            f"none of {len(experiment.heads)} heads is fed-time and reads the hidden state alone, as SpecDec++'s are; "
            "train some with heads.specdec true and export them"
        )
    folder = trace_folder(experiment)
    folder.complete()
    tests = {dataset: folder.load(dataset).test for dataset in experiment.datasets}
    times = costs_for(experiment)
    longest = experiment.decode.max_draft_length
    lengths = [length for length in LENGTHS if length <= longest] or [longest]

    def best_on_test(kind: Callable[..., Policy], values: Sequence[int | float]) -> dict[str, Best]:
        best = {}
        for dataset, test in tests.items():
            number, tokens_per_s = best_setting(replay_settings(test, kind(np.array(values))), times)
            best[dataset] = tokens_per_s, float(values[number])
        return best

    plain = best_on_test(FixedLength, lengths)
    best = {name: best_on_test(partial(HeadPolicy, head), THRESHOLDS) for name, head in heads.items()}
    fastest = max(best, key=lambda name: sum(speed / plain[dataset][0] for dataset, (speed, _) in best[name].items()))
    largest = {dataset: max(of_head[dataset] for of_head in best.values()) for dataset in tests}
    where = f"replayed on test, predicted at {times.title}"
    first = [
        {"Dataset": label}
        | {name: f"{speed:.2f} ({speed * times.alone_s:.2f}x)" for name, (speed, _) in of_dataset.items()}
        for label, of_dataset in {"SpecDec++": largest, "SpecDec (baseline)": plain}.items()
    ]
    third = f"SpecDec++ Table 3: heads, and best tokens/s over h, {where}; *: above 99 % of the largest"
    return [
        Table(f"SpecDec++ Table 1: best tokens/s (speed-up), {where}", first),
        forward_times(experiment, heads[fastest]),
        Table(third, head_rows(heads, best, largest)),
    ]


def head_rows(
    heads: Mapping[str, AcceptanceHead], best: Mapping[str, Mapping[str, Best]], largest: Mapping[str, Best]
) -> list[dict[str, object]]:
    """Table 3: KL and best throughput of every head. KL is of raw probabilities, as printed; without the official
    code's sign slip.
    """
    rows = []
    for name, head in sorted(heads.items(), key=lambda item: (item[1].provenance.reject_weight, item[1].depth)):
        metrics = head.provenance.metrics
        row: dict[str, object] = {"w_rej": f"{head.provenance.reject_weight:g}", "Depth D": head.depth}
        for column, metric in (("train/KL", "train_raw_kl"), ("eval/KL", "raw_kl")):
            row[column] = f"{metrics[metric]:.3f}" if metric in metrics else ""
        for dataset, (speed, threshold) in best[name].items():
            cell = f"{speed:.2f} (h = {threshold:g})"
            row[dataset] = f"{cell} *" if speed > _NEAR * largest[dataset][0] else cell
        rows.append(row)
    return rows


def forward_times(experiment: Experiment, head: AcceptanceHead) -> Table:
    """Table 2; `head` stops the drafts of the rows of SpecDec++."""
    measured = []
    for dataset in experiment.datasets:
        generated = generations(experiment, experiment.prompt_ids(dataset, "test", num=_PROMPTS), head)
        (t_draft, draft_r2), (t_target, target_r2) = (regressed(generated.pop(name)) for name in ("draft", "target"))
        measured.append(("stand-alone", dataset, t_draft, t_target, f"{draft_r2:.4f} & {target_r2:.4f}"))
        for setting, written in generated.items():
            t_draft, t_target, r2 = regressed(written)
            measured.append((setting, dataset, t_draft, t_target, f"{r2:.4f}"))
    frame = pd.DataFrame(measured, columns=["Setting", "Dataset", *_TIMES, "R^2"])
    rows: list[dict[str, str]] = []
    for setting, group in frame.groupby("Setting", sort=False):
        rows += group.assign(**{name: group[name].map("{:.5f}".format) for name in _TIMES}).to_dict("records")
        spread = {name: f" ± {group[name].std():.5f}" if len(group) > 1 else "" for name in _TIMES}
        averages = {name: f"{group[name].mean():.5f}{spread[name]}" for name in _TIMES}
        rows.append({"Setting": str(setting), "Dataset": "average"} | averages)
    return Table("SpecDec++ Table 2: forward times in seconds by regression, clocked", rows)


def generations(experiment: Experiment, prompts: Sequence[list[int]], head: AcceptanceHead) -> dict[str, list[Clocked]]:
    """Generations of every setting over the prompts, in turns, none ended by an EOS."""
    loop = loop_of(experiment)
    decode = experiment.decode
    of_draft = replace(loop, pair=replace(loop.pair, target=loop.pair.draft))
    decoders = {
        "draft": [of_draft.decoder(FixedLength(0))],
        "target": [loop.decoder(FixedLength(0))],
        "SpecDec": [loop.decoder(FixedLength(length)) for length in LENGTHS],
        "SpecDec++": [loop.decoder(HeadPolicy(head, threshold)) for threshold in THRESHOLDS],
    }

    arms: dict[str, Arm] = {}
    for name, members in decoders.items():
        arms |= {f"{name} {number}": generations_of(member) for number, member in enumerate(members)}
    requests = {}
    for number, prompt in enumerate(prompts):
        fraction = _FRACTIONS[number % len(_FRACTIONS)]
        requests[str(number)] = prompt, max(2, round(decode.max_new_tokens * fraction)), decode.seed
    runs = clock_in_turns(arms, requests, desc="forward times", warm_up=requests["0"])
    return {
        name: [run for number in range(len(members)) for run in runs[f"{name} {number}"]]
        for name, members in decoders.items()
    }


def regressed(generated: Sequence[Clocked]) -> tuple[float, ...]:
    """(seconds of a draft forward, if there are any; of a target forward; R²): least squares over generations without
    intercept, the rounds that read prompts left out. The seconds are those of drafts and verifications.
    """
    later = [run.later for run in generated if run.later is not None]
    forwards = np.array([(run.counts.num_draft_forwards, run.counts.num_target) for run in later], dtype=float)
    seconds = np.array([run.drafting_s + run.verifying_s for run in later])
    counted = forwards[:, forwards.any(0)]
    times, *_ = np.linalg.lstsq(counted, seconds, rcond=None)
    residual = seconds - counted @ times
    return *times.tolist(), float(1 - residual @ residual / ((seconds - seconds.mean()) ** 2).sum())

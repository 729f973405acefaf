"""Every policy in continuous batches of several sizes: settings chosen on dev at each size and set of times, reported
on test (laws 4.10, 4.13).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from decode.experiment import Experiment
from decode.policies.batch import BatchAuto
from evaluation.batches.curves import BatchTimes, kept_curves, setups_of
from evaluation.batches.load import Load, load_at, queue_of, step_through
from evaluation.competitor import head_in
from evaluation.contest import Replays, best_heads, fastest_on_dev
from evaluation.families import BASELINE, BOUNDS, HEADS_OF, PERFECT, families, family
from evaluation.table import Table, say
from evaluation.times import Times
from evaluation.traces.bounds import ScoreHead
from evaluation.traces.replay import replay_rounds
from evaluation.traces.trace import CONFIDENCE, Trace
from evaluation.tuning.rule import batch_auto_for
from heads.measures.histogram import observe
from heads.measures.scores import fit_logistic
from heads.model.head import AcceptanceHead, Timing
from store.progress import Bar

Row = dict[str, Any]
"""A row of batches.csv."""
_SETUP = ("dataset", "ratio", "costs", "verify_share")


def in_batches(
    experiment: Experiment, every: Mapping[str, Replays], every_times: Sequence[Times], sizes: Sequence[int] | None
) -> list[Row]:
    """Print a table for each dataset, set of times and size of batch, as soon as it is known; rows of batches.csv.

    Args:
        experiment: whose measured curves of batches are used, if there are any.
        every: replays of each dataset, one sequence at a time.
        every_times: the first decide which head of each family competes.
        sizes: sequences in a batch; None or empty: no batches.
    """
    if not sizes:
        return []
    rows, setups = [], setups_of(every_times, experiment.decode.verify_shares, kept_curves(experiment))
    for dataset, replays in every.items():
        num_rows = len(replays.traces.test.rows)
        if max(sizes) > num_rows:
            say(
                f"{dataset}: a batch of more than {num_rows} has some of its {num_rows} test responses twice; raise "
                "decode.num_test"
            )
        for setup, batch_rows in contests_of(replays, setups, sizes):
            times = setup.times
            where = dict(zip(_SETUP, (dataset, times.ratio, times.origin, setup.verify_share), strict=True))
            new = [where | row for row in batch_rows]
            for table in batch_tables(new, setup.title):
                table.print()
            rows += new
    return rows


def contests_of(
    replays: Replays, setups: Sequence[BatchTimes], sizes: Sequence[int]
) -> Iterator[tuple[BatchTimes, list[Row]]]:
    """Rows of every setup in turn, all sizes and families: the setting that is fastest on dev, on test."""
    dev, test = replays.traces
    # a bound knows of no other sequence, and bounds nothing in a batch; a perfect head in the batch's rule does
    results = fastest_on_dev(replays.arms, setups[0].times)
    competitors = [result.competitor for name, result in results.items() if name not in BOUNDS]
    rounds = {entry.family: [replay_rounds(trace, entry.policy) for trace in (dev, test)] for entry in competitors}
    members = [(entry, size) for entry in competitors for size in sizes]
    loads = {
        (entry.family, size): [
            load_at(rounds[entry.family][0], number, len(dev.rows), size) for number in range(len(entry.settings))
        ]
        for entry, size in Bar(members, desc="batches: replay on dev", unit="loads")
    }
    for setup in setups:
        rows = []
        for size in Bar(sizes, desc=f"batches: ratio {setup.times.ratio:.3g}", unit="sizes"):
            batch_rows: list[Row] = []
            for entry in competitors:
                curves = setup.curves(entry.policy.stop_kind)
                speeds = [load.throughput(curves).tokens_per_s for load in loads[entry.family, size]]
                number = speeds.index(max(speeds))
                load = load_at(rounds[entry.family][1], number, len(test.rows), size)
                setting = ", ".join(f"{key}={value}" for key, value in entry.settings[number].items())
                batch_rows.append(
                    {"family": entry.family, "name": entry.name, "setting": setting, **_throughput(load, curves)}
                )
            for name, rule in rules_of(replays, setup, size).items():
                load = step_through(test, rule, queue_of(len(test.rows), size), size)
                batch_rows.append({"family": name, "name": name, "setting": "", **_throughput(load, rule.costs)})
            baseline = next(row["tokens_per_s"] for row in batch_rows if row["family"] == BASELINE)
            rows += [
                {"batch_size": size, **row, "gain": row["tokens_per_s"] / baseline - 1, "request_s": row["request_s"]}
                for row in batch_rows
            ]
        yield setup, rows


def _throughput(load: Load, curves: Any) -> Row:
    throughput = load.throughput(curves)
    return {"tokens_per_s": throughput.tokens_per_s, "gain": 0.0, "request_s": throughput.request_s}


def rules_of(replays: Replays, setup: BatchTimes, size: int) -> dict[str, BatchAuto]:
    """The batch's rule, with a head of each timing: lambda from dev, or learned online with the head; then with the
    draft's own confidence where it has one, last with a perfect head.
    """
    dev, rules = replays.traces.dev, {}

    def rule_for(head: Any) -> BatchAuto:
        kind = BatchAuto(head, setup.curves("")).stop_kind if isinstance(head, AcceptanceHead) else ""
        return batch_auto_for(head, dev, setup.curves(kind), size)

    for timing, heads in _rivals(replays, setup.times).items():
        fastest = max(map(rule_for, heads), key=lambda rule: rule.throughput or 0.0)
        rules[f"auto_{timing}"] = fastest
        if fastest.can_learn:
            rules[f"auto_{timing}_learning"] = _learning(fastest)
    if CONFIDENCE in dev.drafts:
        rules["auto_confidence"] = rule_for(ScoreHead("confidence"))
        rules["auto_confidence_learning"] = _learning(rules["auto_confidence"])
    if dev.block_size is not None:
        rules["auto_max_prob"] = rule_for(estimator_of(dev))
        rules["auto_max_prob_learning"] = _learning(rules["auto_max_prob"])
    if any(arm.competitor.family == PERFECT for arm in replays.arms):
        rules[PERFECT] = rule_for(ScoreHead("perfect", "drawn"))
    return rules


def _rivals(replays: Replays, times: Times) -> dict[Timing, list[AcceptanceHead]]:
    """Two heads of each timing: the fastest for one sequence, and the fastest of the cheapest, since in a batch a head
    gains less.
    """
    best, rivals = best_heads(fastest_on_dev(replays.arms, times)), {}
    for timing, names in HEADS_OF.items():
        arms = [arm for arm in replays.arms if arm.competitor.family in names]
        if arms:
            stops_s = [times.stop_s(arm.competitor.policy.stop_kind) for arm in arms]
            cheap = [arm for arm, stop_s in zip(arms, stops_s, strict=True) if stop_s <= min(stops_s)]
            heads = dict.fromkeys([best[timing], *best_heads(fastest_on_dev(cheap, times)).values()])
            rivals[timing] = [replays.heads[name] for name in heads]
    return rivals


def estimator_of(trace: Trace) -> ScoreHead:
    """The estimator of logit(max q), fitted to all that verification reveals on a trace of blocks."""
    assert trace.num_passing is not None, "blocks are a feature draft's"
    drafts = slice(trace.num_positions, None)
    is_revealed = torch.from_numpy(trace.depths <= np.repeat(trace.num_passing, trace.branch_lengths))
    logit = torch.from_numpy(trace.logit(ScoreHead("max_prob"))[drafts])[is_revealed]
    prob = torch.from_numpy(trace.signal("acceptance_prob")[drafts])[is_revealed]
    slope, offset = map(float, fit_logistic(observe(logit[None], prob[None])))
    return ScoreHead("max_prob", calibration_shift=offset / slope, temperature=1.0 / slope)


def _learning(rule: BatchAuto) -> BatchAuto:
    """The rule that learns lambda and its head's calibration while it decodes."""
    return replace(rule, throughput=None, is_learning=True)


def batch_tables(rows: Sequence[Mapping[str, Any]], title: str) -> list[Table]:
    """A table for each size of batch of one dataset at one setup."""
    names = list(families())
    lacks = "" if any(row["family"] == PERFECT for row in rows) else "; no perfect head: decode.perfect_head is false"
    note = (
        "settings chosen on dev at this size; tokens/s of the whole batch; gain: over the best fixed length. Predicted "
        "from the seconds of a batch's rounds (law 4.13 of docs/laws.md). No oracle: it ignores the other sequences, "
        f"so it bounds nothing in a batch{lacks}"
    )
    tables = []
    for size in dict.fromkeys(row["batch_size"] for row in rows):
        of_size = sorted((row for row in rows if row["batch_size"] == size), key=lambda row: names.index(row["family"]))
        cells = [
            {
                "policy": family(row["family"]).label,
                "setting": ": ".join(filter(None, (head_in(row["name"]), row["setting"]))),
                "tokens/s": f"{row['tokens_per_s']:.1f}",
                "gain": "" if row["family"] == BASELINE else f"{row['gain']:+.1%}",
                "seconds per request": f"{row['request_s']:.3g}",
            }
            for row in of_size
        ]
        tables.append(Table(f"{of_size[0]['dataset']} in batches of {size}; {title}", cells, note, names=2))
    return tables

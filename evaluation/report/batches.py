"""Every policy in continuous batches of several sizes: settings chosen on dev at each size and set of times, reported
on test (laws 4.10, 4.13).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from decode.experiment import Experiment
from decode.policies import HeadPolicy
from decode.policies.base import Head
from decode.policies.batch import BatchAuto, BatchCosts, Curve
from decode.policies.scores import ScoreHead
from evaluation.batches.load import NUM_QUEUES, BatchThroughput, load_at, queue_of, resampled_queues, step_through
from evaluation.competitor import ONLINE, Competitor, head_in, words_of
from evaluation.contest import Replays, fastest_heads, fastest_on_dev
from evaluation.costs.machine import kept_curves
from evaluation.families import AUTO, BASELINE, BOUNDS, HEADS_OF, PERFECT, families, family
from evaluation.gain import Gain, gain_of_resamples
from evaluation.table import Table, flat
from evaluation.times import MEASURED, RECORDED, Times
from evaluation.traces.replay import Rounds, replay_rounds
from evaluation.traces.trace import CONFIDENCE, Trace
from evaluation.tuning.rule import batch_auto_for
from heads.measures.histogram import observe
from heads.measures.scores import fit_logistic
from heads.model.head import TIMING_LABELS
from store.progress import Bar

Row = dict[str, Any]
"""A row of batches.csv."""


def in_batches(
    experiment: Experiment, every: Mapping[str, Replays], every_times: Sequence[Times], sizes: Sequence[int]
) -> tuple[list[Row], list[Table]]:
    """Rows of batches.csv, and a table for each dataset, set of times and size of batch. Curves that were measured are
    used; the first times decide which head of each family competes.
    """
    rows, tables = list[Row](), list[Table]()
    measured = kept_curves(experiment)
    setups = setups_of(every_times, experiment.decode.verify_shares, measured)
    for dataset, replays in every.items():
        every_rows = contests_of(replays, [times for times, _ in setups], sizes)
        for (times, share), of_setup in zip(setups, every_rows, strict=True):
            where = {"dataset": dataset, "ratio": times.ratio, "costs": times.origin, "verify_share": share}
            new = [where | row for row in of_setup]
            title = f"curves of {'one sequence' if measured is None else 'batches'}"
            if share is not None:
                title = f"a verified token costs {share:g} t_draft"
            tables += batch_tables(new, f"{times.title}; {title}")
            rows += map(flat, new)
    return rows, tables


def setups_of(
    every_times: Iterable[Times], verify_shares: Sequence[float], measured: BatchCosts | None = None
) -> list[tuple[Times, float | None]]:
    """Times of batches, each with what a further verified token takes over a draft step: all times with every share;
    measured or recorded times, and those of a target's curve, once with None: with the `measured` curves if there are
    any, else with that of one sequence. ValueError if there are none.
    """
    setups: list[tuple[Times, float | None]] = []
    for times in every_times:
        if times.origin not in (MEASURED, RECORDED) and times.is_flat:
            for share in verify_shares:
                setups.append((replace(times, target=Curve.line(times.alone_s, share * times.t_draft_s)), share))
        elif measured is None:
            setups.append((times, None))
        else:
            setups.append((replace(times, draft=measured.draft, target=measured.target), None))
    if not setups:
        raise ValueError(
            "decode.verify_shares is empty, and no times here say what verifying a batch takes; give a share, such as "
            "0.2, or decode.t_target_ms by number of tokens"
        )
    return setups


def contests_of(replays: Replays, every_times: Sequence[Times], sizes: Sequence[int]) -> Iterator[list[Row]]:
    """Rows at each of several times of batches, all sizes and families: the setting that is fastest on dev, on test."""
    test = replays.traces.test
    # a bound knows of no other sequence, and bounds nothing in a batch; a perfect head in the batch's rule does
    results = fastest_on_dev(replays.arms, every_times[0])
    competitors = [result.competitor for name, result in results.items() if name not in BOUNDS]
    played: dict[tuple[int, int], list[tuple[Row, BatchThroughput, Float[np.ndarray, " queue"]]]] = {}
    for entry in Bar(competitors, desc="batches: replay", unit="families"):
        for cell, member in _played_family(entry, replays, every_times, sizes):
            played.setdefault(cell, []).append(member)
    for number, times in enumerate(every_times):
        rows = []
        for size in Bar(sizes, desc=f"batches: ratio {times.ratio:.3g}", unit="sizes"):
            members = played[number, size]
            _, base, base_queues = next(member for member in members if member[0]["family"] == BASELINE)
            for named, throughput, of_queues in members:
                value = throughput.tokens_per_s / base.tokens_per_s - 1
                gain = gain_of_resamples(value, of_queues / base_queues - 1, test.num_prompts)
                rows.append(_row(size, named, throughput, gain))
            for named, rule in rules_of(replays, times, size):
                load = step_through(test, rule, queue_of(len(test.rows), size), size)
                throughput = load.throughput(rule.costs)
                gain = Gain(throughput.tokens_per_s / base.tokens_per_s - 1, None, None, None)
                rows.append(_row(size, named, throughput, gain))
        yield rows


def _row(size: int, named: Row, throughput: BatchThroughput, gain: Gain) -> Row:
    speed = {"tokens_per_s": throughput.tokens_per_s, "gain": gain, "request_s": throughput.request_s}
    return {"batch_size": size, **named, **speed}


def _played_family(
    entry: Competitor, replays: Replays, every_times: Sequence[Times], sizes: Sequence[int]
) -> Iterator[tuple[tuple[int, int], tuple[Row, BatchThroughput, Float[np.ndarray, " queue"]]]]:
    """(number of the times, size) -> what a family reaches on test at the setting that is fastest on dev, and its speed
    on resampled queues. The rounds of all settings are those of one family on dev; on test only choices are replayed.
    """
    dev, test = replays.traces
    curves = [times.costs(entry.policy.stop_kind) for times in every_times]
    rounds = dict[int, Rounds]()
    for size, chosen in _fastest_settings(entry, dev, curves, sizes).items():
        queues = resampled_queues(test.prompt_of_row, size)
        for at_times, number in enumerate(chosen):
            if number not in rounds:
                rounds[number] = replay_rounds(test, entry.policy_at(number))
            on_test = partial(load_at, rounds[number], 0, len(test.rows), size)
            of_queues = np.array([on_test(queue).throughput(curves[at_times]).tokens_per_s for queue in queues])
            setting = ", ".join(f"{key}={value}" for key, value in entry.settings[number].items())
            named = {"family": entry.family, "name": entry.name, "setting": setting}
            yield (at_times, size), (named, on_test().throughput(curves[at_times]), of_queues)


def _fastest_settings(
    entry: Competitor, dev: Trace, curves: Sequence[BatchCosts], sizes: Sequence[int]
) -> dict[int, list[int]]:
    """Size -> the number of the setting that is fastest on dev at each of several times, the first of equals."""
    rounds = replay_rounds(dev, entry.policy)
    chosen = {}
    for size in sizes:
        speeds = []
        for number in range(len(entry.settings)):
            load = load_at(rounds, number, len(dev.rows), size)
            speeds.append([load.throughput(costs).tokens_per_s for costs in curves])
        chosen[size] = np.argmax(speeds, axis=0).tolist()
    return chosen


def rules_of(replays: Replays, times: Times, size: int) -> Iterator[tuple[Row, BatchAuto]]:
    """The batch's rule with a head of each timing, with the draft's own confidence where it has one, and with a perfect
    head: lambda of dev, or learned online with the head. With each rule, what its row says of it.

    Of each timing there are two rivals: the head that is fastest for one sequence, and the fastest of the cheapest,
    since in a batch a head gains less.
    """
    dev = replays.traces.dev
    heads: dict[str, Sequence[Head]] = {}
    for timing, head in fastest_heads(fastest_on_dev(replays.arms, times)).items():
        arms = [arm for arm in replays.arms if arm.competitor.family in HEADS_OF[timing]]
        stops_s = [times.stop_s(arm.competitor.policy.stop_kind) for arm in arms]
        cheap = (arm for arm, stop_s in zip(arms, stops_s, strict=True) if stop_s <= min(stops_s))
        cheapest = fastest_heads(fastest_on_dev(cheap, times))[timing]
        heads[f"{TIMING_LABELS[timing]} head"] = list(dict.fromkeys([head, cheapest]))
    if CONFIDENCE in dev.drafts:
        heads["DSpark's confidence"] = [ScoreHead("confidence")]
    if dev.block_size is not None:
        heads["largest probability (vLLM)"] = [estimator_of(dev)]
    for label, rivals in heads.items():
        rule = _fastest_rule(rivals, dev, times, size)
        yield {"family": AUTO, "name": AUTO, "setting": f"{label}, {words_of(ONLINE, value=False)}"}, rule
        if not rule.scores_late:
            setting = f"{label}, {words_of(ONLINE, value=True)} with the head"
            yield {"family": AUTO, "name": AUTO, "setting": setting}, replace(rule, throughput=None, is_learning=True)
    if any(arm.competitor.family == PERFECT for arm in replays.arms):
        rule = _fastest_rule([ScoreHead("perfect", "drawn")], dev, times, size)
        yield {"family": PERFECT, "name": PERFECT, "setting": ""}, rule


def _fastest_rule(heads: Sequence[Head], dev: Trace, times: Times, size: int) -> BatchAuto:
    rules = [batch_auto_for(head, dev, times.costs(HeadPolicy(head).stop_kind), size) for head in heads]
    return max(rules, key=lambda rule: rule.throughput or 0.0)


def estimator_of(trace: Trace) -> ScoreHead:
    """The estimator of logit(max q), fitted to all that verification reveals on a trace of blocks."""
    assert trace.num_passing is not None, "blocks are a feature draft's"
    drafts = slice(trace.num_positions, None)
    is_revealed = torch.from_numpy(trace.depths <= np.repeat(trace.num_passing, trace.branch_lengths))
    logit = torch.from_numpy(trace.logit(ScoreHead("max_prob"))[drafts])[is_revealed]
    prob = torch.from_numpy(trace.signal("acceptance_prob")[drafts])[is_revealed]
    slope, offset = map(float, fit_logistic(observe(logit[None], prob[None])))
    return ScoreHead("max_prob", calibration_shift=offset / slope, temperature=1.0 / slope)


def batch_tables(rows: Sequence[Mapping[str, Any]], title: str) -> list[Table]:
    """A table for each size of batch of one dataset at one set of times."""
    tables, names = [], list(families())
    lacks = "" if any(row["family"] == PERFECT for row in rows) else "; no perfect head: decode.perfect_head is false"
    note = (
        "settings chosen on dev at this size; tokens/s of the whole batch; gain: over the best fixed length, with its "
        f"95 % interval from {NUM_QUEUES} resampled queues of prompts (rules of the whole batch have none). Predicted "
        "from the seconds of a batch's rounds (law 4.13 of docs/laws.md). No oracle: it ignores the other sequences, "
        f"so it bounds nothing in a batch{lacks}"
    )
    for size in dict.fromkeys(row["batch_size"] for row in rows):
        of_size = sorted((row for row in rows if row["batch_size"] == size), key=lambda row: names.index(row["family"]))
        cells = [
            {
                "policy": family(row["family"]).label,
                "setting": ": ".join(filter(None, (head_in(row["name"]), row["setting"]))),
                "tokens/s": f"{row['tokens_per_s']:.1f}",
                "gain": "" if row["family"] == BASELINE else row["gain"].text,
                "seconds per request": f"{row['request_s']:.3g}",
            }
            for row in of_size
        ]
        tables.append(Table(f"{of_size[0]['dataset']} in batches of {size}; {title}", cells, note, names=2))
    return tables

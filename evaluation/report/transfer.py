"""Transfer: heads and settings chosen on one set's dev prompts, judged on the test prompts of another.

    transferred      chosen on the source set's dev (head, threshold, index of the rule), reported on the transfer set
    tuned on TARGET  chosen on the transfer set's own dev, reported on the same test prompts

Gains are over the best fixed length that the transfer set's dev chose, leads over its best training-free policy.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from decode.experiment import Experiment
from decode.policies.registry import AUTO_TOKEN_PROB
from evaluation.competitor import Competitor, competes
from evaluation.contest import Contest, Replays, hold_each, replay_dataset
from evaluation.families import AUTO, BOUND, PERFECT, TRAINING_FREE, family
from evaluation.report.tables import records_of
from evaluation.table import Table, flat
from evaluation.times import Times
from evaluation.traces.recording import trace_folder
from evaluation.traces.replay import replay_settings


def with_transferred(target: Contest, source: Contest, replays: Replays) -> Contest:
    """The target set's contest, with every family but the bounds at the setting that the source set's dev chose;
    `replays` are the target set's, so that nothing is replayed again.
    """
    known = {(arm.competitor.family, arm.competitor.name): arm.test for arm in replays.arms}
    results = {}
    for name, result in source.results.items():
        kind, same = family(name).kind, known.get((name, result.competitor.name))
        if kind == BOUND:
            continue
        if same is not None and kind != AUTO:
            played = same.select([result.number])
        else:
            played = replay_settings(replays.traces.test, result.policy)
        results[name] = replace(result, played=played, arm=None, times=target.times)
    return replace(target, source=source, transferred=results)


def transfer_table(target: Contest) -> Table:
    """Gains on the source set, transferred, and tuned on the target set, side by side."""
    source = target.source
    assert source is not None, "there is no table of a contest without transferred settings"
    free = target.leaders[TRAINING_FREE]
    tuned = f"tuned on {target.dataset}"
    setting = f"setting from {source.dataset}"
    rows = []
    for name in (*target.transferred, PERFECT):
        gains = [f"{one.gain(name).value:+.1%}" if name in one.results else "" for one in (source, target)]
        row = {"policy": family(name).label, setting: tuned, f"on {source.dataset}": gains[0], "transferred": ""}
        row[tuned] = gains[1]
        if result := target.transferred.get(name):
            row[setting] = result.label
            row["transferred"] = result.over(target.baseline).text
            row["transferred over tuned"] = result.over(target.results[name]).text if name in target.results else ""
            row["lead"] = result.over(free).text
        rows.append(row)
    return Table(
        f"from {source.dataset} to {target.dataset}; {target.times.title}",
        rows,
        "gain over the best fixed length of the set, with 95 % intervals. transferred: head and setting chosen on the "
        f"dev prompts of {source.dataset}; {tuned}: on its own; lead: of the transferred setting over the best "
        f"training-free policy of {target.dataset} ({family(free.family).label})",
        names=2,
    )


def transfer_records(target: Contest) -> list[dict[str, Any]]:
    """Rows of results.csv: the target set's, chosen on the source set, with their gain over the same family tuned on
    the target set.
    """
    if target.source is None:
        return []
    results = target.transferred
    rows = records_of(results, target, chosen_on=target.source.dataset)
    return [
        row | flat({"over_tuned": result.over(target.results[name])} if name in target.results else {})
        for row, (name, result) in zip(rows, results.items(), strict=True)
    ]


def source_contests(
    directory: str, experiment: Experiment, competitors: Sequence[Competitor], every_times: Sequence[Times]
) -> dict[str, Contest]:
    """Title of each set of times -> the contest on the first dataset of the evaluation in `directory`, under that
    evaluation's sampling.

    Raises:
        FileNotFoundError: no whole trace of this config's prompts there.
    """
    other = experiment.with_trace(directory)
    name = next(iter(other.datasets))
    traces = trace_folder(other).load(name)
    replays = replay_dataset(
        traces,
        competitors,
        perfect_head=other.decode.perfect_head,
        name=f"transfer from {name}",
        has_token_rule=competes(AUTO_TOKEN_PROB, other),
    )
    dataset = f"{name} (temperature {other.sampling.temperature:g})"
    return {contest.times.title: contest for contest in hold_each(replays, every_times, dataset=dataset)}

"""python -m evaluation evaluate: every policy and every threshold from one trace, chosen on dev, reported on test."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from json import dumps as to_json
from json import loads
from pathlib import Path
from typing import Any

import pandas as pd

from configs.flag_types import Sizes, sizes_of
from configs.load import accepts_yaml
from configs.paths import check_local
from configs.schema import Config
from decode.experiment import Experiment
from evaluation.clock import check_clock, clock_table
from evaluation.families import BOUNDS
from evaluation.report.against import against_table, compare_with, read_prompts
from evaluation.report.evaluated import Evaluation, clocked, evaluated
from evaluation.report.page import folder_of, write_csv, write_report, write_tables
from evaluation.report.tables import brief_table, result_table, stage_table
from evaluation.report.transfer import transfer_table
from evaluation.report.verdict import publish_verdict, sentence_at, tell
from evaluation.table import announce, flat, printing, say
from store.shards import write_atomic


@accepts_yaml
def evaluate(
    config: Config,
    *,
    batch: Sizes | None = None,
    clock: int = 0,
    repeats: int = 3,
    transfer_from: str | None = None,
    against: str | None = None,
    all: bool = False,
    json: bool = False,
) -> Evaluation:
    """Run `acceptance-heads evaluate`; `configs.measuring` documents its flags. Returns what it printed and wrote."""
    check_local(transfer_from, "--transfer_from")
    other = None if against is None else read_prompts(against)
    check_clock(clock, repeats, as_recorded=config.decode.as_recorded)
    sizes = sizes_of(batch)
    with printing(json) as publish:
        experiment = Experiment(config)
        directory = folder_of(experiment)
        evaluation = evaluated(experiment, sizes=sizes or (), transfer_from=transfer_from)
        compared = {} if other is None else {"against": _against(evaluation, other, against or "")}
        _print_tables(evaluation, has_all=all)
        written = write_tables(evaluation, directory)
        written += publish_verdict(evaluation.verdict, experiment, directory)
        if sizes:
            written.append(write_csv(directory / "batches.csv", evaluation.batches))
        if clock:  # after everything else is on disk, because it takes long and may fail
            predicted = evaluation.verdict
            evaluation = clocked(evaluation, num_prompts=clock, repeats=repeats)
            written.append(_publish_clocks(evaluation, directory))
            if evaluation.verdict is not predicted:
                publish_verdict(evaluation.verdict, experiment, directory)
        write_report(evaluation, directory)
        # in `all`, tuning writes the model cards again, and names them
        paths = announce(path for path in written if not (experiment.is_step and path.name == "README.md"))
        costs = asdict(evaluation.times)
        publish({"costs": costs, "verdict": evaluation.verdict, **_document(evaluation, paths), **compared})
        _tell_all(evaluation)
    return evaluation


def _against(evaluation: Evaluation, other: pd.DataFrame, directory: str) -> list[dict[str, Any]]:
    """Print every family here and in another evaluation of the trace; the rows for JSON."""
    contests = {dataset: contests[0] for dataset, contests in evaluation.contests.items()}
    records = compare_with(other, directory, contests, evaluation.replays)
    for dataset in contests:
        of_dataset = [record for record in records if record["dataset"] == dataset]
        if of_dataset:
            against_table(of_dataset, directory, evaluation.times.title).print()
    changed = [record for record in records if record["gain"].value and record["family"] not in BOUNDS]
    for record in changed:
        say(f"{record['dataset']}: {record['conclusion']}.")
    if not changed:
        say(f"Every policy does here what it does in {directory}.")
    return list(map(flat, records))


def _print_tables(evaluation: Evaluation, *, has_all: bool) -> None:
    """Print the stages of each contest and perhaps every policy's row; in `all`, brief ones of the verdict's contest
    alone; then the batches.
    """
    if evaluation.experiment.is_step:
        brief_table(evaluation.contest).print()
        return
    for contest in evaluation.all_contests:
        stage_table(contest).print()
        if has_all and contest is not evaluation.pooled:
            result_table(contest).print()
        if contest.source is not None:
            transfer_table(contest).print()
    largest = max((row["batch_size"] for row in evaluation.batches), default=0)
    for dataset, replays in evaluation.replays.items():
        num_rows = len(replays.traces.test.rows)
        if largest > num_rows:
            say(
                f"{dataset}: a batch of more than {num_rows} has some of its {num_rows} test responses twice; raise "
                "decode.num_test"
            )
    for table in evaluation.batch_tables:
        table.print()


def _publish_clocks(evaluation: Evaluation, directory: Path) -> Path:
    for report in evaluation.clocks:
        clock_table(report).print()
    path = directory / "clock.json"
    write_atomic(path, to_json(_clocks_in_json(evaluation), indent=1, allow_nan=False).encode())
    return path


def _tell_all(evaluation: Evaluation) -> None:
    """Print the sentences of all contests, and at last the verdict; nothing in `all`, where tuning ends with it."""
    experiment = evaluation.experiment
    if experiment.is_step:
        return
    for dataset, contests in evaluation.contests.items():
        for contest in contests:
            if contest is not contests[0] or dataset != evaluation.verdict["dataset"]:
                say(f"\n{sentence_at(contest)}")
    tell(evaluation.verdict, experiment)


def _document(evaluation: Evaluation, written: Sequence[str]) -> dict[str, Any]:
    def in_json(records: Sequence[Mapping[str, Any]]) -> Any:
        return loads(pd.DataFrame(records).to_json(orient="records"))

    contests = [contest for of_dataset in evaluation.contests.values() for contest in of_dataset]
    if evaluation.pooled is not None:
        contests.insert(0, evaluation.pooled)
    return {
        "results": in_json(evaluation.records),
        "written": written,
        "verdicts": [
            {"dataset": contest.dataset, "costs": contest.times.title, "verdict": sentence_at(contest)}
            for contest in contests
        ],
        "stages": in_json(evaluation.stages),
        "batches": evaluation.batches,
        "clock": _clocks_in_json(evaluation),
    }


def _clocks_in_json(evaluation: Evaluation) -> list[dict[str, Any]]:
    return [report.as_dict() for report in evaluation.clocks]

"""python -m evaluation evaluate: every policy and every threshold from one trace, chosen on dev, reported on test."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from json import dumps as to_json
from json import loads
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from configs.flag_types import Sizes, sizes_of
from configs.load import accepts_yaml
from configs.paths import check_local
from configs.schema import Config
from decode.experiment import Experiment
from decode.policies.registry import AUTO_TOKEN_PROB
from evaluation.clock import check_clock, clock_dataset, clock_table
from evaluation.competitor import Arm, competes, competitors_with, make_competitor
from evaluation.contest import Contest, hold_each, replay_dataset
from evaluation.costs.machine import costs_for
from evaluation.families import LENGTH_HEAD
from evaluation.keys import made
from evaluation.report.batches import in_batches
from evaluation.report.conclusion import Verdict, conclude
from evaluation.report.page import Page, folder_of, write_csv, write_files, write_report
from evaluation.report.stale import contradicted
from evaluation.report.tables import brief_table, records_of, result_table, stage_table
from evaluation.report.transfer import source_contests, transfer_records, transfer_table, transferred
from evaluation.report.verdict import (
    Record,
    generate_command,
    publish_verdict,
    record_by_the_clock,
    record_of,
    sentence_at,
    tell,
    together,
    verdict_sets,
)
from evaluation.table import Table, announce, flat, printing, say
from evaluation.times import Times
from evaluation.traces.lengths import PredictedLength, fit_length, predict_length
from evaluation.traces.recording import trace_folder
from evaluation.tuning.calibration import calibrated_on
from store.shards import write_atomic


@accepts_yaml
def evaluate(
    config: Config,
    *,
    batch: Sizes | None = None,
    clock: int = 0,
    repeats: int = 3,
    transfer_from: str | None = None,
    all: bool = False,
    json: bool = False,
) -> None:
    """Run `acceptance-heads evaluate`; `configs.measuring` documents its flags."""
    check_local(transfer_from, "--transfer_from")
    check_clock(clock, repeats, as_recorded=config.decode.as_recorded)
    sizes = sizes_of(batch)
    with printing(json) as publish:
        experiment = Experiment(config)
        competitors, folder = competitors_with(experiment, experiment.heads), trace_folder(experiment)
        folder.refuse_other()
        directory = folder_of(experiment, competitors)
        times = costs_for(experiment)
        every_times = times.at_ratios(experiment.decode.ratios)
        sources = source_contests(transfer_from, config, competitors, every_times) if transfer_from else {}
        folder.complete()  # may take hours, so heads, competitors and times were made, and checked, before it
        page = Page(about=about(experiment, times), directory=directory, made=made(experiment))
        compare_all(experiment, every_times, sources=sources, page=page, tables=_tables(experiment, has_all=all))
        verdict = record_of(conclude_sets(experiment, page, is_brief=config.is_step), experiment)
        written = [*write_files(page), *publish_verdict(verdict, experiment, directory)]
        if sizes:
            written.append(_batched(experiment, page, every_times, sizes))
        if clock:
            written.append(_clocked(experiment, page, num_prompts=clock, repeats=repeats))
            verdict = _following_clock(experiment, page, verdict)
        write_report(page, verdict, command=generate_command(experiment))
        publish({"costs": asdict(times), "verdict": verdict, **_document(page, _announced(written, experiment))})
        _tell_all(page, verdict, experiment)


def _tables(experiment: Experiment, *, has_all: bool) -> list[Callable[[Contest], Table]]:
    """What is printed of each contest: the stages, and perhaps every policy's row; in `all`, nothing."""
    if experiment.is_step:
        return []
    return [stage_table, result_table] if has_all else [stage_table]


def compare_all(
    experiment: Experiment,
    every_times: Sequence[Times],
    *,
    sources: dict[str, Contest],
    page: Page,
    tables: Sequence[Callable[[Contest], Table]],
) -> None:
    """Print every dataset of a complete trace at all times, and put it on the page.

    Args:
        sources: title of times -> the contest whose choices are transferred; empty: that of the first dataset, to all
            sets that no head was trained on.
        page: where everything is put.
        tables: what is printed of each contest, with a table of what is transferred; empty: nothing.
    """
    folder, has_sources = trace_folder(experiment), bool(sources)
    dev = folder.load(next(iter(experiment.datasets))).dev
    competitors = competitors_with(experiment, {**experiment.heads, **calibrated_on(dev, experiment.heads)})
    if (length_head := fit_length(dev)) is not None:
        grid = {"extra": np.linspace(-3, dev.longest.max(), 41).tolist()}
        competitors.append(make_competitor(LENGTH_HEAD, LENGTH_HEAD, grid, kind=PredictedLength))
    for dataset in experiment.datasets:
        traces = folder.load(dataset)
        if length_head is not None:
            for trace in traces:
                predict_length(trace, length_head)
        replays = replay_dataset(
            traces,
            competitors,
            perfect_head=experiment.decode.perfect_head,
            name=dataset,
            has_token_rule=competes(AUTO_TOKEN_PROB, experiment),
        )
        contests = hold_each(replays, every_times, dataset=dataset)
        for contest in contests:
            for table in tables:
                table(contest).print()
            page.records.extend(records_of(contest.results, contest))
            source = sources.setdefault(contest.times.title, contest)
            if has_sources or not experiment.is_training_set(dataset):
                results = transferred(source, contest, replays)
                if tables:
                    transfer_table(results, source, contest).print()
                page.records.extend(transfer_records(results, source, contest))
        page.replays[dataset], page.contests[dataset] = replays, contests


def conclude_sets(experiment: Experiment, page: Page, *, is_brief: bool = False) -> Verdict:
    """The verdict of the training sets at the evaluation's own times. Several have one more table, of all prompts;
    `is_brief`: the only table is a brief one of the verdict's contest.
    """
    first, *others = verdict_sets(experiment)
    contest = page.contests[first][0]
    arms: Sequence[Arm] = page.replays[first].arms
    if others:
        contest, arms = together({name: page.replays[name] for name in (first, *others)}, contest.times)
        page.pooled.append(contest)
        page.records.extend(records_of(contest.results, contest))
    if is_brief:
        brief_table(contest).print()
    elif others:
        stage_table(contest).print()
    return conclude(contest, arms)


def _tell_all(page: Page, verdict: Record, experiment: Experiment) -> None:
    """Print the sentences of all contests, and at last the verdict; nothing in `all`, where tuning ends with it."""
    if experiment.is_step:
        return
    dataset = verdict["dataset"]
    for contest in chain(*page.contests.values()):
        is_own = contest.dataset == dataset and contest is page.contests[dataset][0]
        if not is_own:
            say(f"\n{sentence_at(contest)}")
    tell(verdict, experiment)


def _announced(written: Sequence[Path], experiment: Experiment) -> list[str]:
    """Print which files were written; in `all`, tuning writes the model cards again, and names them."""
    return announce(path for path in written if not (experiment.is_step and path.name == "README.md"))


def _batched(experiment: Experiment, page: Page, every_times: Sequence[Times], sizes: Sequence[int]) -> Path:
    """Replay every dataset in batches, and print and write what comes of it."""
    rows, tables = in_batches(experiment, page.replays, every_times, sizes)
    page.batches.extend(rows)
    page.batch_tables.extend(tables)
    return write_csv(page.directory / "batches.csv", rows)


def _clocked(experiment: Experiment, page: Page, *, num_prompts: int, repeats: int) -> Path:
    """Time every dataset, and print and write what the clock measured."""
    for dataset, replays in page.replays.items():
        contest, test = page.contests[dataset][0], replays.traces.test
        page.clocks.append(clock_dataset(experiment, contest, test, num_prompts=num_prompts, repeats=repeats))
        clock_table(page.clocks[-1]).print()
    path = page.directory / "clock.json"
    write_atomic(path, to_json(_clock_in_json(page), indent=1).encode())
    return path


def _following_clock(experiment: Experiment, page: Page, predicted: Record) -> Record:
    """The verdict after a clock: that of the clocked gains, which is published, where it contradicts the predicted."""
    report = next(filter(contradicted, page.clocks), None)
    if report is None:
        return predicted
    verdict = record_by_the_clock(page.contests[report["dataset"]][0], report, experiment)
    publish_verdict(verdict, experiment, page.directory)
    return verdict


def _document(page: Page, written: Sequence[str]) -> dict[str, Any]:
    def in_json(records: Sequence[Mapping[str, Any]]) -> Any:
        return loads(pd.DataFrame(records).to_json(orient="records"))

    return {
        "results": in_json(page.records),
        "written": written,
        "verdicts": [
            {"dataset": contest.dataset, "costs": contest.times.title, "verdict": sentence_at(contest)}
            for contest in chain(page.pooled, *page.contests.values())
        ],
        "stages": in_json(page.stages),
        "batches": page.batches,
        "clock": _clock_in_json(page),
    }


def _clock_in_json(page: Page) -> list[dict[str, Any]]:
    return [{**report, "rows": [flat(row) for row in report["rows"]]} for report in page.clocks]


def about(experiment: Experiment, times: Times) -> str:
    """One line on what was evaluated."""
    names = " / ".join(Path(source.path).name for source in (experiment.models.target, experiment.models.draft))
    decode = experiment.decode
    return (
        f"{names}; {experiment.sampling.text}; responses up to {decode.max_new_tokens} tokens, drafts up to "
        f"{decode.max_draft_length}; t_draft {1e3 * times.t_draft_s:.2f} ms, t_target {1e3 * times.t_target_s[0]:.2f} "
        f"ms, {times.origin}; {times.stop_origin}"
    )

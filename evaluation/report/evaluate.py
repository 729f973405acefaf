"""python -m evaluation evaluate: every policy and every threshold from one trace, chosen on dev, reported on test."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from json import dumps as to_json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from configs.paths import check_local
from configs.schema import Config
from decode.experiment import Experiment
from evaluation.clock import check_clock, clock_dataset
from evaluation.competitor import competitors_with, make_competitor
from evaluation.contest import Contest, Replays, hold_each, replay_dataset
from evaluation.costs.machine import costs_for
from evaluation.families import LENGTH_HEAD
from evaluation.flag_types import Sizes, sizes_of
from evaluation.report.batches import in_batches
from evaluation.report.files import folder_of, records, stage_frame, write, write_csv, write_plots
from evaluation.report.page import RATIOS, Page, write_report
from evaluation.report.plots import all_plots, speed_up_bars, verification_curve
from evaluation.report.recommended import pooled, recommend, write_verdict
from evaluation.report.results import contest_frame
from evaluation.report.transfer import source_contests, transfer_frame, transfer_table, transferred
from evaluation.report.verdict import answer_of
from evaluation.table import announce, printing, say
from evaluation.times import Times
from evaluation.traces.lengths import PredictedLength, fit_length, predict_length
from evaluation.traces.recording import trace_folder
from evaluation.tuning.calibration import calibrated_on, is_of_other_sampling
from store.shards import write_atomic


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
    """Replay every policy and threshold on the trace (recorded first, if need be); table, CSV, Parquet, report.

    Args:
        config: of the experiment.
        batch: also replay every policy in continuous batches of these sizes: 1,4,16,64.
        clock: number of test prompts to generate for real and time, next to the prediction; every family runs at its
            best setting, in turns; 0: none.
        repeats: number of timed generations per prompt; the median counts.
        transfer_from: decode.dir of an evaluation under another sampling; the settings chosen on its first dataset are
            also judged on every dataset of this one.
        all: also print one row per policy.
        json: print everything as one JSON document on stdout; tables and sentences then go to stderr.
    """
    check_local(transfer_from, "--transfer_from")
    check_clock(clock, repeats, as_recorded=config.decode.as_recorded)
    sizes = sizes_of(batch)
    with printing(aside=json):
        experiment = Experiment(config)
        competitors, folder = competitors_with(experiment, experiment.heads), trace_folder(experiment)
        folder.refuse_other()
        directory = folder_of(experiment, competitors)
        times = costs_for(experiment)
        every_times = times.at_ratios(experiment.decode.ratios)
        sources = source_contests(transfer_from, config, competitors, every_times) if transfer_from else {}
        folder.complete()  # may take hours, so heads, competitors and times were made, and checked, before it
        page = Page(about=about(experiment, times), directory=directory, plots=verification_curve(times))
        every, results = compare_all(experiment, every_times, sources=sources, page=page, has_all=all)
        verdict = recommend(overall(page, every), experiment)
        written = [*write(page, results, every), str(write_verdict(verdict, directory))]
        page.batches.extend(in_batches(experiment, every, every_times, sizes))
        written += [write_csv(directory / "batches.csv", pd.DataFrame(page.batches))] if sizes else []
        written += clocked(experiment, every, page=page, num_prompts=clock, repeats=repeats) if clock else []
        write_report(page)
        announce(map(Path, written))
        _tell(page, verdict["sentence"])
    if json:
        figures = {"costs": asdict(times), "verdict": verdict, "results": records(results), "written": written}
        print(to_json(figures | _document(page)))


def _tell(page: Page, last: str) -> None:
    for dataset, answers in page.answers.items():
        for answer in answers[::-1]:  # those at the evaluation's own times last
            say(f"\n{f'{dataset}. ' * (len(page.answers) > 1)}{answer.verdict}")
    say(f"\n{last}")


def _document(page: Page) -> dict[str, Any]:
    answers = [answer for group in page.answers.values() for answer in group]
    verdicts = [
        {"dataset": answer.contest.dataset, "costs": answer.contest.times.title, "verdict": answer.verdict}
        for answer in answers
    ]
    clocks = [report.as_dict() for report in page.clocks]
    return {"verdicts": verdicts, "stages": records(stage_frame(answers)), "batches": page.batches, "clock": clocks}


def overall(page: Page, every: Mapping[str, Replays]) -> Contest:
    """The contest over all datasets at the evaluation's first times."""
    first, *others = (answers[0].contest for answers in page.answers.values())
    return pooled(list(every.values()), first.times) if others else first


def compare_all(
    experiment: Experiment, every_times: Sequence[Times], *, sources: dict[str, Contest], page: Page, has_all: bool
) -> tuple[dict[str, Replays], pd.DataFrame]:
    """Every dataset at all times, printed and put on the page: (replays by dataset, rows of results.csv).

    Args:
        experiment: what is compared, its trace complete.
        every_times: the first decide what is plotted.
        sources: title of times -> the contest whose choices are transferred; empty: that of the first dataset, to all
            sets that no head was trained on.
        page: of the report.
        has_all: whether every policy's row is printed, below the stages.
    """
    heads, folder, has_sources = experiment.heads, trace_folder(experiment), bool(sources)
    dev = folder.load(next(iter(experiment.datasets))).dev
    if any(is_of_other_sampling(head, experiment.sampling) for head in heads.values()):
        heads = heads | calibrated_on(dev, heads)
    competitors, perfect = competitors_with(experiment, heads), experiment.decode.perfect_head
    if (length_head := fit_length(dev)) is not None:
        grid = {"extra": np.linspace(-3, dev.longest.max(), 41).tolist()}
        competitors.append(make_competitor(LENGTH_HEAD, LENGTH_HEAD, grid, kind=PredictedLength))
    every: dict[str, Replays] = {}
    frames: list[pd.DataFrame] = []
    for dataset in experiment.datasets:
        traces = folder.load(dataset)
        if length_head is not None:
            for trace in traces:
                predict_length(trace, length_head)
        replays = replay_dataset(traces, competitors, heads=heads, perfect_head=perfect, name=dataset)
        every[dataset] = replays
        contests = hold_each(replays, every_times, dataset=dataset)
        page.answers[dataset] = [answer_of(contest, heads=heads) for contest in contests]
        for answer in page.answers[dataset]:
            for table in answer.printed(has_all=has_all):
                table.print()
            frames.append(contest_frame(answer.contest))
            source = sources.setdefault(answer.contest.times.title, answer.contest)
            if has_sources or not experiment.is_training_set(dataset):
                frames.append(_transfer(source, answer.contest, replays))
        plots = [
            *map(speed_up_bars, contests),
            *all_plots(replays, contests[0], shown=page.answers[dataset][0].deciding),
        ]
        page.plots.extend([plot.of(dataset) for plot in plots] if len(experiment.datasets) > 1 else plots)
        page.rankings[dataset] = at_ratios(contests, replays)
    return every, pd.concat(frames)


def _transfer(source: Contest, target: Contest, replays: Replays) -> pd.DataFrame:
    results = transferred(source, target, replays)
    transfer_table(results, source, target).print()
    return transfer_frame(results, source, target)


def at_ratios(contests: Sequence[Contest], replays: Replays) -> list[Contest]:
    """The first contest and one at every ratio of the page, by ratio."""
    first, known = contests[0], {contest.times.title: contest for contest in contests[1:]}
    _, *others = first.times.at_ratios(RATIOS)
    new = [times for times in others if times.title not in known]
    every = [first, *(known[times.title] for times in others if times.title in known)]
    every += hold_each(replays, new, dataset=first.dataset, is_online=(False,))
    return sorted(every, key=lambda contest: contest.times.ratio)


def about(experiment: Experiment, times: Times) -> str:
    """One line on what was evaluated."""
    t_draft_ms, t_target_ms = (f"{1e3 * seconds:.2f}" for seconds in (times.t_draft_s, times.t_target_s[0]))
    names = " / ".join(Path(source.path).name for source in (experiment.models.target, experiment.models.draft))
    decode, origins = experiment.decode, f"{times.origin}; {times.stop_origin}"
    return (
        f"{names}; {experiment.sampling.text}; responses up to {decode.max_new_tokens} tokens, drafts up to "
        f"{decode.max_draft_length}; t_draft {t_draft_ms} ms, t_target {t_target_ms} ms, "
        f"{origins}"
    )


def clocked(
    experiment: Experiment, every: Mapping[str, Replays], *, page: Page, num_prompts: int, repeats: int
) -> list[str]:
    """Time every dataset; what the clock measured, printed and written, and the page with it."""
    for dataset, replays in every.items():
        contest = page.answers[dataset][0].contest
        report = clock_dataset(experiment, contest, replays.traces.test, num_prompts=num_prompts, repeats=repeats)
        page.clocks.append(report)
        report.table.print()
    path = page.directory / "clock.json"
    write_atomic(path, to_json([report.as_dict() for report in page.clocks], indent=1).encode())
    write_plots(page.directory / "plots", [report.plot for report in page.clocks])
    return [str(path)]

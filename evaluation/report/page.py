"""What an evaluation writes: report.html, a page that works offline, and tables, plots and counts beside it. Everything
on the page is computed here; its slider switches between tables that are already there, one for each ratio of times.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment

from decode.experiment import Experiment
from evaluation.clock import Report, clock_table
from evaluation.competitor import Arm, Competitor
from evaluation.contest import Contest, Replays, hold_each
from evaluation.families import family
from evaluation.report.plots import all_plots, stage_plot
from evaluation.report.tables import result_table, stage_table, stages_of
from evaluation.report.verdict import Record, sentence_at
from evaluation.table import Table, flat, say
from store.shards import write_atomic

RATIOS = (1.5, 2.0, 3.0, 4.0, 5.0, 8.0, 12.0, 20.0, 30.0, 40.0)
"""t_target / t_draft of the slider's steps, beside that of the evaluation."""


@dataclass(frozen=True, kw_only=True)
class Page:
    """What an evaluation found, by dataset, for the page and the files beside it."""

    about: str
    """One line under the title."""
    directory: Path
    """Folder of all files."""
    made: Mapping[str, str] = field(default_factory=dict)
    """When, where, by which command and versions: the footer."""
    replays: dict[str, Replays] = field(default_factory=dict)
    contests: dict[str, list[Contest]] = field(default_factory=dict)
    """The contest at each of the evaluation's times, the first of this machine or as given."""
    pooled: list[Contest] = field(default_factory=list)
    """The contest over all prompts of several training sets, whose verdict is the evaluation's; empty for one set."""
    records: list[dict[str, Any]] = field(default_factory=list)
    """The rows of results.csv."""
    clocks: list[Report] = field(default_factory=list)
    batches: list[dict[str, Any]] = field(default_factory=list)
    """The rows of batches.csv."""
    batch_tables: list[Table] = field(default_factory=list)

    @property
    def stages(self) -> list[dict[str, Any]]:
        """The rows of stages.csv."""
        return [
            {"dataset": contest.dataset, "costs": contest.times.title, **flat(stage)}
            for contest in chain(*self.contests.values(), self.pooled)
            for stage in stages_of(contest)
        ]


def folder_of(experiment: Experiment, competitors: Sequence[Competitor]) -> Path:
    """Folder of everything that is written: decode.dir, or a folder in it if no heads compete now and the report there
    has some, which is kept.
    """
    directory = experiment.directory
    if any(competitor.head for competitor in competitors):
        return directory
    lacking = "decode.policies names no head" if experiment.heads else f"No trained heads in {experiment.exported}"
    say(
        f"{lacking}: only policies that need no training are compared. `acceptance-heads export` makes "
        "heads of a training run (`acceptance-heads train` before it); decode.heads names others."
    )
    results = directory / "results.csv"
    if not (results.exists() and any(family(name).needs_training for name in pd.read_csv(results)["family"])):
        return directory
    without = directory / "no-heads"
    say(f"{directory / 'report.html'} compares heads and is kept; this report goes to {without / 'report.html'}.")
    return without


def write_files(page: Page) -> list[Path]:
    """Write tables and the counts of each dataset's replays; the paths, after those that `write_report` writes to."""
    directory = page.directory
    written = [write_csv(directory / "results.csv", page.records), write_csv(directory / "stages.csv", page.stages)]
    written += [_write_counts(directory / f"counts-{name}.parquet", of.arms) for name, of in page.replays.items()]
    return [directory / "report.html", directory / "plots", *written]


def write_csv(path: Path, records: Sequence[Mapping[str, Any]]) -> Path:
    """Write a table; its path."""
    write_atomic(path, pd.DataFrame(records).to_csv(index=False).encode())
    return path


def _write_counts(path: Path, arms: Sequence[Arm]) -> Path:
    """Totals of every setting of every competitor on both splits."""
    rows = [
        {
            "family": arm.competitor.family,
            "name": arm.competitor.name,
            "setting": json.dumps(dict(setting), default=float),
            "split": split,
            **{key: value for key, value in vars(played.total(number)).items() if "micro" not in key},
            "rounds_by_length": played.lengths[number].sum(0).tolist(),
        }
        for arm in arms
        for split, played in (("dev", arm.dev), ("test", arm.test))
        for number, setting in enumerate(arm.competitor.settings)
    ]
    pd.DataFrame(rows).to_parquet(path, index=False)
    return path


def at_ratios(contests: Sequence[Contest], replays: Replays) -> list[Contest]:
    """The first contest of a dataset and one at every ratio of the page, by ratio."""
    first = contests[0]
    others = hold_each(replays, first.times.at_ratios(RATIOS)[1:], dataset=first.dataset, is_online=(False,))
    return sorted([first, *others], key=lambda contest: contest.times.ratio)


def write_report(page: Page, verdict: Record, *, command: str) -> None:
    """Write report.html, and every plot as a file; `command` runs the policy of the verdict."""
    is_several = len(page.contests) > 1
    datasets = []
    for name, contests in page.contests.items():
        plots = [*map(stage_plot, contests), *all_plots(page.replays[name], contests[0])]
        if is_several:
            plots = [plot.of(name) for plot in plots]
        for plot in plots:
            write_atomic(page.directory / "plots" / f"{plot.name}.svg", plot.svg.encode())
        tables = map(stage_table, contests)
        answers = list(zip(map(sentence_at, contests), tables, plots[: len(contests)], strict=True))
        datasets.append({"name": name, "answers": answers, "contests": contests, "plots": plots[len(contests) :]})
    clocks = [
        clock_table(report)._replace(title=f"{report['dataset']}: {report['about']}", note=report["verdict"])
        for report in page.clocks
    ]
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(Path(__file__).with_suffix(".html").read_text(encoding="utf-8"))
    text = template.render(
        page=page,
        verdict=verdict,
        command=command,
        datasets=datasets,
        pooled=list(map(stage_table, page.pooled)),
        steps=_steps(page),
        clocks=clocks,
    )
    write_atomic(page.directory / "report.html", text.encode())


def _steps(page: Page) -> list[dict[str, object]]:
    """Each step of the slider: its label, whether it is that of the evaluation, and the ranking of each dataset."""
    times = next(iter(page.contests.values()))[0].times
    steps = []
    for contests in zip(*(at_ratios(page.contests[name], of) for name, of in page.replays.items()), strict=True):
        tables = [result_table(contest)._replace(note="") for contest in contests]
        is_here = contests[0].times is times
        label = f"{contests[0].times.ratio:.3g} draft forwards{', as in this evaluation' if is_here else ''}"
        steps.append({"label": label, "is_here": is_here, "tables": tables})
    return steps

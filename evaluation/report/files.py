"""What an evaluation writes: tables as CSV and JSON, plots, counts; and the folder of it all."""

from collections.abc import Mapping, Sequence
from json import loads
from pathlib import Path
from typing import Any

import pandas as pd

from decode.experiment import Experiment
from evaluation.competitor import Competitor
from evaluation.contest import Replays
from evaluation.figure import Plot
from evaluation.report.page import Page, has_heads
from evaluation.report.results import write_counts
from evaluation.report.verdict import Answer
from evaluation.table import say
from store.shards import write_atomic


def folder_of(experiment: Experiment, competitors: Sequence[Competitor]) -> Path:
    """Folder of everything that is written: decode.dir, or a folder in it if no heads compete now and the report there
    has some, which is kept. Prints why no heads compete, and how they are made.
    """
    if any(competitor.head for competitor in competitors):
        return experiment.directory
    report, without = experiment.directory / "report.html", experiment.directory / "no-heads"
    lacking = "decode.policies names no head" if experiment.heads else f"No trained heads in {experiment.exported}"
    say(
        f"{lacking}: only policies that need no training are compared. `acceptance-heads export --config …` makes "
        "heads of a training run (`acceptance-heads train` before it); decode.heads names others."
    )
    if not (report.exists() and has_heads(report)):
        return experiment.directory
    say(f"{report} compares heads and is kept; this report goes to {without / 'report.html'}.")
    return without


def write(page: Page, results: pd.DataFrame, every: Mapping[str, Replays]) -> list[str]:
    """Write tables, plots and counts of the contests; the names of all files."""
    directory, answers = page.directory, [answer for group in page.answers.values() for answer in group]
    tables = {directory / "results.csv": results, directory / "stages.csv": stage_frame(answers)}
    for path, frame in tables.items():
        write_csv(path, frame)
    is_one = len(page.answers) == 1
    pictures = [answer.picture if is_one else answer.picture.of(answer.contest.dataset) for answer in answers]
    write_plots(directory / "plots", [*pictures, *page.plots])
    counts = {directory / f"counts-{dataset}.parquet": replays.arms for dataset, replays in every.items()}
    for path, arms in counts.items():
        write_counts(path, arms)
    return [str(path) for path in (directory / "report.html", directory / "plots", *tables, *counts)]


def stage_frame(answers: Sequence[Answer]) -> pd.DataFrame:
    """Where the oracle's gain goes, a row for each stage of each dataset at each set of times."""
    return pd.DataFrame(
        {"dataset": answer.contest.dataset, "costs": answer.contest.times.title, **stage.as_dict()}
        for answer in answers
        for stage in answer.stages
    )


def write_csv(path: Path, frame: pd.DataFrame) -> str:
    """Write a table; its name."""
    write_atomic(path, frame.to_csv(index=False).encode())
    return str(path)


def write_plots(directory: Path, plots: Sequence[Plot]) -> None:
    """Every plot as an SVG file."""
    for plot in plots:
        write_atomic(directory / f"{plot.name}.svg", plot.svg.encode())


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows as JSON has them."""
    return list(loads(frame.to_json(orient="records")))

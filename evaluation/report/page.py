"""What an evaluation writes: report.html, a page that works offline, and tables, plots and counts beside it. Everything
on the page is computed here; its slider switches between tables that are already there, one for each ratio of times.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment

from decode.experiment import Experiment
from evaluation.clock import clock_table
from evaluation.competitor import Arm, competes
from evaluation.contest import Contest, Replays, hold_each
from evaluation.families import family
from evaluation.keys import made
from evaluation.report.against import PROMPTS, write_prompts
from evaluation.report.evaluated import Evaluation
from evaluation.report.tables import result_table, stage_table
from evaluation.report.verdict import generate_command, sentence_at
from evaluation.table import say
from evaluation.times import Times
from store.shards import write_atomic

RATIOS = (1.5, 2.0, 3.0, 4.0, 5.0, 8.0, 12.0, 20.0, 30.0, 40.0)
"""t_target / t_draft of the slider's steps, beside that of the evaluation."""


def folder_of(experiment: Experiment) -> Path:
    """Folder of everything that is written: decode.dir, or a folder in it if no heads compete now and the report there
    has some, which is kept.
    """
    directory = experiment.directory
    if experiment.heads and competes("head", experiment):
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


def write_tables(evaluation: Evaluation, directory: Path) -> list[Path]:
    """Write tables and the counts of each dataset's replays; the paths, after those that `write_report` writes to."""
    written = [
        write_csv(directory / "results.csv", evaluation.records),
        write_csv(directory / "stages.csv", evaluation.stages),
    ]
    for name, replays in evaluation.replays.items():
        written.append(_write_counts(directory / f"counts-{name}.parquet", replays.arms))
    contests = {name: contests[0] for name, contests in evaluation.contests.items()}
    written.append(write_prompts(directory / PROMPTS, contests, evaluation.replays))
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


def _at_ratios(contests: Sequence[Contest], replays: Replays) -> list[Contest]:
    """The first contest of a dataset and one at every ratio of the page, by ratio."""
    first = contests[0]
    others = hold_each(replays, first.times.at_ratios(RATIOS)[1:], dataset=first.dataset, is_online=(False,))
    return sorted([first, *others], key=lambda contest: contest.times.ratio)


def write_report(evaluation: Evaluation, directory: Path) -> None:
    """Write report.html, and every plot as a file; plots of earlier evaluations are removed."""
    from evaluation.report.plots import all_plots, stage_plot  # matplotlib takes long to import

    is_several = len(evaluation.contests) > 1
    datasets = []
    outdated = set((directory / "plots").glob("*.svg"))
    for name, contests in evaluation.contests.items():
        plots = [*map(stage_plot, contests), *all_plots(evaluation.replays[name], contests[0])]
        if is_several:
            plots = [plot.of(name) for plot in plots]
        for plot in plots:
            path = directory / "plots" / f"{plot.name}.svg"
            write_atomic(path, plot.svg.encode())
            outdated.discard(path)
        tables = map(stage_table, contests)
        answers = list(zip(map(sentence_at, contests), tables, plots[: len(contests)], strict=True))
        datasets.append({"name": name, "answers": answers, "contests": contests, "plots": plots[len(contests) :]})
    for path in outdated:
        path.unlink()
    clocks = [
        clock_table(report)._replace(title=f"{report.dataset}: {report.about}", note=report.verdict)
        for report in evaluation.clocks
    ]
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(Path(__file__).with_suffix(".html").read_text(encoding="utf-8"))
    experiment = evaluation.experiment
    text = template.render(
        about=about(experiment, evaluation.times),
        made=made(experiment),
        verdict=evaluation.verdict,
        command=generate_command(experiment),
        datasets=datasets,
        pooled=[] if evaluation.pooled is None else [stage_table(evaluation.pooled)],
        steps=_steps(evaluation),
        batch_tables=evaluation.batch_tables,
        clocks=clocks,
    )
    write_atomic(directory / "report.html", text.encode())


def about(experiment: Experiment, times: Times) -> str:
    """One line on what was evaluated, under the title."""
    names = " / ".join(Path(source.path).name for source in (experiment.models.target, experiment.models.draft))
    decode = experiment.decode
    return (
        f"{names}; {experiment.sampling.text}; responses up to {decode.max_new_tokens} tokens, drafts up to "
        f"{decode.max_draft_length}; t_draft {1e3 * times.t_draft_s:.2f} ms, t_target {1e3 * times.alone_s:.2f} "
        f"ms, {times.origin}; {times.stop_origin}"
    )


def _steps(evaluation: Evaluation) -> list[dict[str, object]]:
    """Each step of the slider: its label, whether it is that of the evaluation, and the ranking of each dataset."""
    of_datasets = [_at_ratios(evaluation.contests[name], replays) for name, replays in evaluation.replays.items()]
    steps = []
    for contests in zip(*of_datasets, strict=True):
        tables = [result_table(contest)._replace(note="") for contest in contests]
        is_here = contests[0].times is next(iter(evaluation.contests.values()))[0].times
        label = f"{contests[0].times.ratio:.3g} draft forwards"
        if is_here:
            label += ", as in this evaluation"
        steps.append({"label": label, "is_here": is_here, "tables": tables})
    return steps

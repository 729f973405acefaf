"""python -m evaluation evaluate: every policy and every threshold from one trace, chosen on dev, reported on test."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from json import dumps as to_json
from json import loads
from pathlib import Path
from typing import Any

import pandas as pd

from configs.paths import check_local
from configs.schema import Config, SamplingConfig
from data_gen.store.manifest import read_manifest
from decode.experiment import Experiment
from evaluation.batches.curves import kept_curves
from evaluation.clock.results import check_clock, clock_dataset
from evaluation.competitor import Competitor, competitors_with
from evaluation.contest.arms import Replays, picks_of, replay_dataset
from evaluation.contest.in_batches import compare_in_batches, setups_of, sizes_of
from evaluation.contest.recommended import recommend, write_verdict
from evaluation.contest.results import results_of, yardstick_of
from evaluation.contest.tables import ordered, result_frame, result_sheet, write_counts
from evaluation.contest.travel import Judged, calibrated_on, is_of_other_sampling, travel, travel_frame, travel_sheet
from evaluation.costs.machine import costs_for
from evaluation.families import ALONE
from evaluation.figure import Plot
from evaluation.flag_types import Sizes
from evaluation.report.gains import speed_up_bars, verification_curve
from evaluation.report.page import RATIOS, Page, Ranking, has_heads, write_report
from evaluation.report.plots import all_plots
from evaluation.report.verdict import Answer, answer_of, best_runnable
from evaluation.table import announce, printing, say
from evaluation.times import Times
from evaluation.traces.recording import trace_folder
from store.progress import Bar
from store.shards import write_atomic


def evaluate(
    config: Config,
    *,
    batch: Sizes | None = None,
    clock: int = 0,
    repeats: int = 3,
    home: str | None = None,
    all: bool = False,
    json: bool = False,
) -> None:
    """Replay every policy and threshold on the trace (recorded first, if need be); table, CSV, Parquet, report.

    Args:
        config: of the experiment.
        batch: also replay every policy in continuous batches of so many sequences: 1,4,16,64.
        clock: also time real generations of so many test prompts, with all their turns, every family at its best
            setting, beside what is predicted; 0: none.
        repeats: of each timed generation; medians count.
        home: decode.dir of an evaluation under another sampling; what is chosen on its first dataset travels to every
            dataset of this one.
        all: print every policy's row too, below the stages to the oracle.
        json: print everything as one JSON document on stdout; tables and sentences then go to stderr.
    """
    check_local(home, "--home")
    check_clock(clock, repeats, as_recorded=config.decode.as_recorded)
    sizes = sizes_of(batch)
    with printing(aside=json):
        experiment = Experiment(config)
        grids, folder = competitors_with(experiment, experiment.heads), trace_folder(experiment)
        folder.refuse_other()
        into = folder_of(experiment, grids)
        cost = costs_for(experiment)
        costs = cost.at_ratios(experiment.decode.ratios)
        homes = homes_at(home, config, grids, costs) if home else {}
        folder.complete()  # may take hours, so heads, grids and times were made, and checked, before it
        curve = [verification_curve(cost)] if len(cost.t_target_s) > 1 else []
        page = Page(about=about(experiment, cost), cost=cost, directory=into, plots=curve)
        every, results = compare_all(experiment, costs, homes=homes, page=page, has_all=all)
        verdict = recommend(list(every.values()), cost, experiment)
        written = [*write(results, every, page=page), str(write_verdict(verdict, page.directory))]
        written += in_batches(experiment, every, costs, page=page, sizes=sizes) if sizes else []
        written += clocked(experiment, every, cost, page=page, num_prompts=clock, repeats=repeats) if clock else []
        write_report(page)
        tell(page, written)
        say(f"\n{verdict['sentence']}")
    if json:
        figures = {"costs": asdict(cost), "verdict": verdict, "results": records(results), "written": written}
        print(document(figures, page))


def tell(page: Page, written: Sequence[str]) -> None:
    """Say which files were written, and the verdicts, each dataset's on this machine's times last."""
    announce(map(Path, written))
    for answer in (answer for answers in page.answers.values() for answer in answers[::-1]):
        say(f"\n{answer.sentence(is_one_of_several=len(page.answers) > 1)}")


def folder_of(experiment: Experiment, grids: Sequence[Competitor]) -> Path:
    """Folder of everything that is written: decode.dir, or a folder in it where no heads compete now and the report
    there has some, which is kept.

    Says so at once where there are no heads, and how they are made.
    """
    if any(grid.head for grid in grids):
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


def document(figures: Mapping[str, Any], page: Page) -> str:
    """Everything that was found, as one line of JSON."""
    clocks = [report.as_dict() for report in page.clocks]
    verdicts = [
        {"dataset": answer.dataset, "costs": answer.costs, "verdict": answer.verdict}
        for answers in page.answers.values()
        for answer in answers
    ]
    stages = records(stage_frame(page))
    return to_json({**figures, "verdicts": verdicts, "stages": stages, "batches": page.batches, "clock": clocks})


def stage_frame(page: Page) -> pd.DataFrame:
    """Where the oracle's gain goes, a row each stage of each dataset at each cost."""
    return pd.DataFrame(
        {"dataset": answer.dataset, "costs": answer.costs, **stage.as_dict()}
        for answers in page.answers.values()
        for answer in answers
        for stage in answer.stages
    )


def compare_all(
    experiment: Experiment, costs: Sequence[Times], *, homes: dict[str, Judged], page: Page, has_all: bool
) -> tuple[dict[str, Replays], pd.DataFrame]:
    """Every dataset at every cost, printed and put on the page: (replays by dataset, all results).

    Args:
        experiment: what is compared, its trace complete.
        costs: the first decides what is plotted.
        homes: title of a cost -> the set on which what travels is chosen, the first one; where there are some already,
            all datasets are away from home.
        page: of the report.
        has_all: whether every policy's row is printed, below the stages.
    """
    heads, is_away = experiment.heads, bool(homes)
    folder = trace_folder(experiment)
    if any(is_of_other_sampling(head, experiment.sampling) for head in heads.values()):
        heads = heads | calibrated_on(folder.load(next(iter(experiment.datasets))).dev, heads)
    grids, perfect = competitors_with(experiment, heads), experiment.decode.perfect_head
    every: dict[str, Replays] = {}
    frames: list[pd.DataFrame] = []
    for dataset in experiment.datasets:
        traces = folder.load(dataset)
        replays = replay_dataset(traces, grids, heads=heads, perfect_head=perfect, name=dataset)
        every[dataset] = replays
        # heads are trained on a home set, so that nothing travels to it
        is_home = experiment.is_home(dataset) and not is_away
        page.answers[dataset], bars, at_costs = [], [], [judge(dataset, replays, cost) for cost in costs]
        for cost, judged in zip(costs, at_costs, strict=True):
            home = None if is_home else homes.get(cost.title)
            homes.setdefault(cost.title, judged)
            answer = answer_of(judged, cost, heads=heads, num_prompts=replays.traces.test.num_prompts)
            page.answers[dataset].append(answer)
            frames.append(compare_at(answer, judged, cost, home=home, replays=replays, has_all=has_all))
            bars.append(speed_up_bars(judged.results, cost, best=answer.best))
        show(page, at_costs[0], replays, costs[0], bars=bars, is_one_of_several=len(experiment.datasets) > 1)
    return every, pd.concat(frames)


def show(
    page: Page, judged: Judged, replays: Replays, cost: Times, *, bars: Sequence[Plot], is_one_of_several: bool
) -> None:
    """Put a dataset's arms and plots on the page; `bars` are those of every cost."""
    dataset = judged.dataset
    plots = [*bars, *all_plots(replays, judged.picks, cost, shown=page.answers[dataset][0].deciding)]
    page.plots.extend([plot.of(dataset) for plot in plots] if is_one_of_several else plots)
    page.rankings[dataset], page.picks[dataset] = rankings(judged, replays, cost), judged.picks


def rankings(here: Judged, replays: Replays, cost: Times) -> list[Ranking]:
    """Every policy of a dataset at these costs and at every ratio of the page, by ratio."""
    at = [(cost, here)]
    _, *others = cost.at_ratios(RATIOS)
    for other in Bar(others, desc=f"evaluate: {here.dataset} at other times", unit="ratios"):
        at.append((other, judge(here.dataset, replays, other, is_online=(False,))))
    num_prompts = replays.traces.test.num_prompts
    found = []
    for times, judged in at:
        sheet = result_sheet(judged.results, times, dataset=here.dataset, num_prompts=num_prompts)._replace(note="")
        families = [ALONE, *(result.family for result in judged.results)]
        found.append(Ranking(times.ratio, sheet, families, best_runnable(judged, times), is_here=times is cost))
    return sorted(found, key=lambda ranking: ranking.ratio)


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows as JSON has them."""
    return list(loads(frame.to_json(orient="records")))


def compare_at(
    answer: Answer, judged: Judged, cost: Times, *, home: Judged | None, replays: Replays, has_all: bool
) -> pd.DataFrame:
    """Print the table of one dataset at one cost; the same as numbers.

    Args:
        answer: of the dataset at this cost.
        judged: the same as figures.
        cost: what everything was judged at.
        home: the set on which what travels is chosen; None: nothing travels to this one.
        replays: of the dataset.
        has_all: whether every policy's row is printed, below the stages.
    """
    frame = result_frame(judged.results, cost, dataset=judged.dataset, chosen_on=judged.dataset)
    for sheet in answer.printed(has_all=has_all):
        sheet.print()
    if home is not None:
        travelled = travel(home, judged, test=replays.traces.test, cost=cost)
        travel_sheet(travelled, home, judged, cost).print()
        frame = pd.concat([frame, travel_frame(travelled, home, judged, cost)])
    return frame


def judge(dataset: str, replays: Replays, cost: Times, *, is_online: Sequence[bool] = (False, True)) -> Judged:
    """Every family of one dataset at one cost; `is_online`: the forms of `auto` that compete."""
    arms = [*replays.arms, *replays.auto_arms(cost, is_online=is_online), replays.oracle_arm(cost)]
    picks = picks_of(arms, cost)
    yardstick = yardstick_of(picks, cost)
    results = ordered(results_of(picks, cost, yardstick))
    return Judged(dataset=dataset, arms=arms, picks=picks, yardstick=yardstick, results=results)


def homes_at(directory: str, config: Config, grids: Sequence[Competitor], costs: Sequence[Times]) -> dict[str, Judged]:
    """Title of each cost -> what its best settings are on the first dataset of the evaluation in `directory`, under its
    own sampling.

    Raises:
        FileNotFoundError: no whole trace of this config's prompts there.
    """
    sampling = read_manifest(Path(directory) / "trace", command="trace", keys=["sampling"])["sampling"]
    pair = replace(config.pair, sampling=SamplingConfig(**sampling))
    experiment = Experiment(
        replace(config, pair=pair, decode=replace(config.decode, dir=directory, allow_foreign_heads=True))
    )
    name = next(iter(experiment.datasets))
    heads, traces = experiment.heads, trace_folder(experiment).load(name)
    replays = replay_dataset(traces, grids, heads=heads, perfect_head=config.decode.perfect_head, name=f"home {name}")
    dataset = f"{name} (temperature {experiment.sampling.temperature:g})"
    return {cost.title: judge(dataset, replays, cost) for cost in costs}


def about(experiment: Experiment, cost: Times) -> str:
    """One line on what was evaluated."""
    names = " / ".join(Path(source.path).name for source in (experiment.models.target, experiment.models.draft))
    measured = (
        f"t_draft {cost.t_draft_s * 1e3:.2f} ms, t_target {cost.t_target_s[0] * 1e3:.2f} ms ({cost.origin}; "
        f"{cost.stop_origin})"
    )
    limits = (
        f"responses up to {experiment.decode.max_new_tokens} tokens, drafts up to {experiment.decode.max_draft_length}"
    )
    return f"{names}; {experiment.sampling.text}; {limits}; {measured}"


def write(results: pd.DataFrame, every: Mapping[str, Replays], *, page: Page) -> list[str]:
    """Write everything but batches and clock; the names of all files."""
    directory = page.directory
    tables = {directory / "results.csv": results, directory / "stages.csv": stage_frame(page)}
    for path, frame in tables.items():
        write_atomic(path, frame.to_csv(index=False).encode())
    pictures = [
        answer.picture if len(every) == 1 else answer.picture.of(dataset)
        for dataset, answers in page.answers.items()
        for answer in answers
    ]
    write_plots(directory / "plots", [*pictures, *page.plots])
    counts = [directory / f"counts-{dataset}.parquet" for dataset in every]
    for path, replays in zip(counts, every.values(), strict=True):
        write_counts(path, replays.arms)
    return [str(path) for path in (directory / "report.html", directory / "plots", *tables, *counts)]


def in_batches(
    experiment: Experiment,
    every: Mapping[str, Replays],
    costs: Sequence[Times],
    *,
    page: Page,
    sizes: Sequence[int],
) -> list[str]:
    """Print and write the results of batches, and the page with them; the names of files."""
    setups = setups_of(costs, experiment.decode.verify_shares, kept_curves(experiment))
    frame, path = compare_in_batches(every, setups, sizes), page.directory / "batches.csv"
    write_atomic(path, frame.to_csv(index=False).encode())
    page.batches.extend(records(frame))
    return [str(path)]


def clocked(
    experiment: Experiment, every: Mapping[str, Replays], cost: Times, *, page: Page, num_prompts: int, repeats: int
) -> list[str]:
    """Time every dataset; what the clock said, printed and written, and the page with it."""
    for dataset, replays in every.items():
        picks, test = page.picks[dataset], replays.traces.test
        page.clocks.append(clock_dataset(experiment, picks, test, cost, num_prompts=num_prompts, repeats=repeats))
        page.clocks[-1].sheet.print()
    path = page.directory / "clock.json"
    write_atomic(path, to_json([report.as_dict() for report in page.clocks], indent=1).encode())
    write_plots(page.directory / "plots", [report.plot for report in page.clocks])
    return [str(path)]


def write_plots(directory: Path, plots: Sequence[Plot]) -> None:
    """Every plot as an SVG file."""
    for plot in plots:
        write_atomic(directory / f"{plot.name}.svg", plot.svg.encode())

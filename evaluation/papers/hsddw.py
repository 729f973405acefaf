"""HSDDW, Tables 1 to 4, clocked: decoded on the test prompts in turns, with the paper's window of 10 at every level and
no choice on dev.

    Table 1   speed-up of HSDDW over the target alone (AT), by dataset, EAGLE's and PEARL's; the paper quotes other
              methods
    Table 2   pre-verify and self-verify, alone and together, by dataset
    Table 3   all prompts, those on mathematics, and the rest, where categories name mathematics
    Table 4   sigma, eta and speed-up

EAGLE takes its turns beside the others where a directory of an EAGLE draft is given: as EAGLE-2's tree and as
a chain, each also at the fixed length that is fastest on dev, and under stops
(`evaluation.papers.drafts`).

PEARL works on two devices: it is decoded here, with gamma the nearest to t_target / t_draft, and its speed-up is
predicted from its steps and the times fitted over the other generations, each step taking as long as the slower of the
two models, the exchange between them free.

`evaluation hierarchy` compares more competitors at their best settings. Generations are stored and shared with it
(`evaluation.hierarchies.runs`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import compress
from json import dumps

import torch

from data_gen.store.manifest import digest
from decode.drafters.factory import PairModels
from decode.experiment import Experiment
from evaluation.gain import Spent
from evaluation.hierarchies.built import Competitor
from evaluation.hierarchies.configurations import NO_DRAFT, WINDOW, competitors_of
from evaluation.hierarchies.runs import MICRO_ALONE, Candidate, resumable_loop, trio_times
from evaluation.hierarchies.times import TrioTimes, redundancy, target_utilisation
from evaluation.keys import models_key
from evaluation.papers.drafts import Contest, DraftModels, Kind, contest_of, eagle_2, lengths_of, stops_of
from evaluation.papers.gains import by_key, finalists_of, gain_cells, joined, lines_of, shown_speed_up, stop_verdict
from evaluation.table import Table
from lm.features.eagle import Eagle

RunsByName = dict[str, Candidate]
"""competitor -> what it did on the prompts of one dataset."""
_ABLATION = {
    "sd": ("", "", ""),
    "sd + pre-verify": ("x", "", ""),
    "sd + self-verify": ("", "x", ""),
    "sd + pre-verify + self-verify": ("x", "x", ""),
    "HSDDW": ("", "", "x"),
}
_MODELS = {
    "target-draft": "sd",
    "target-micro": MICRO_ALONE,
    "Pre+Self-verify": "sd + pre-verify + self-verify",
    "HSDDW": "HSDDW",
}
_CLOCKED = "clocked, against the target alone (AT)"


def hsddw_tables(
    experiment: Experiment, *, eagle: str | None, specs: Sequence[str], repeats: int, tree: tuple[int, int]
) -> list[Table]:
    """Tables 1 to 4.

    Raises:
        ValueError: no test prompts; with EAGLE, no dev prompts, or a draft that is not for this target.
    """
    trio = PairModels(lambda: experiment.pair)
    names = [NO_DRAFT, *dict.fromkeys([*_ABLATION, *_MODELS.values()])]
    competitors = [at_window(competitor) for competitor in competitors_of(trio) if competitor.name in names]
    kinds = (eagle_2(*tree), Kind("EAGLE, chain"))
    finalists = eagle_finalists(experiment, trio, eagle, specs, kinds) if eagle else []
    arms = [*competitors, *(competitor for finalist in finalists for competitor in finalist.competitors)]
    runs: dict[str, RunsByName] = {}
    played: list[list[Candidate]] = []
    pearl: dict[str, str] = {}
    categories: dict[str, list[str]] = {}
    for dataset in experiment.datasets:
        encoded = experiment.encoded(dataset, "test")
        if not encoded:
            raise ValueError("there are no test prompts to decode; raise decode.num_test")
        categories[dataset] = [prompt.category for prompt, _ in encoded]
        played.append(
            resumable_loop(experiment, dataset, trio).play(arms, [ids for _, ids in encoded], repeats=repeats)
        )
        trio_runs = played[-1][: len(competitors)]
        runs[dataset] = {run.competitor.name: run for run in trio_runs}
        pearl[dataset] = f"{pearl_speed_up(experiment, trio, [ids for _, ids in encoded], trio_times(trio_runs)):.2f}x"
    rows, note = first_table(dict(zip(runs, played, strict=True)), finalists)
    return [
        Table(
            f"HSDDW Table 1: speed-up at T = {experiment.sampling.temperature:g}, {_CLOCKED}",
            [*rows, {"": _PEARL, **pearl}],
            note,
        ),
        Table(f"HSDDW Table 2: ablation, speed-up, {_CLOCKED}", ablation_rows(runs)),
        *(
            Table(f"HSDDW Table 3: {name}, speed-up, {_CLOCKED}", rows)
            for name, rows in mathematics(runs, categories).items()
        ),
        *(
            Table(f"HSDDW Table 4: {name}, {_CLOCKED}", utilisation_rows(of_dataset))
            for name, of_dataset in runs.items()
        ),
    ]


_METHODS = {"AT": NO_DRAFT, "HSDDW": "HSDDW"}
_PEARL = "PEARL, two devices, predicted"


def eagle_finalists(
    experiment: Experiment, trio: PairModels, path: str, specs: Sequence[str], kinds: Sequence[Kind]
) -> list[Contest]:
    """The EAGLE draft as a tree and as a chain, at the settings that all dev prompts together choose."""
    beside = experiment.with_feature_draft(path)
    if not isinstance(beside.pair.drafting, Eagle):
        raise ValueError(f"--eagle is {path}, a {type(beside.pair.drafting).__name__} draft; give an EAGLE's directory")
    stops, lengths, models = stops_of(beside, specs), lengths_of(beside, kinds), DraftModels(beside)
    version = digest(dumps(models_key(beside, "draft"), sort_keys=True))[:8]
    contests = [contest_of(kind, stops, models, lengths=lengths, version=version) for kind in kinds]
    loops = [
        (resumable_loop(experiment, dataset, trio), experiment.prompt_ids(dataset, "dev"))
        for dataset in experiment.datasets
    ]
    competitors = [competitor for contest in contests for competitor in contest.competitors]
    dev = [
        run
        for competitor in competitors
        for run in joined([loop.play([competitor], prompts) for loop, prompts in loops if prompts])
    ]
    return [finalists_of(contest, dev) for contest in contests]


def first_table(
    played: Mapping[str, Sequence[Candidate]], finalists: Sequence[Contest]
) -> tuple[list[dict[str, str]], str]:
    """Table 1 with intervals over prompts, and whether a stop pays."""
    lines = [line for finalist in finalists for line in lines_of(finalist, by_key(joined(list(played.values()))))]
    spent: dict[str, dict[str, Spent]] = {}
    for dataset, runs in played.items():
        spent[dataset] = {
            line.family: line.spent for finalist in finalists for line in lines_of(finalist, by_key(runs))
        }
        for method, name in _METHODS.items():
            spent[dataset][method] = next(run.measured for run in runs if run.competitor.name == name)
    rows = {line.family: {"setting": line.setting, **gain_cells(line)} for line in lines}
    shown = [
        {
            "": method,
            **{dataset: shown_speed_up(of_dataset["AT"], of_dataset[method]) for dataset, of_dataset in spent.items()},
            **rows.get(method, {"setting": ""}),
        }
        for method in ("AT", *rows, "HSDDW")
    ]
    return shown, stop_verdict(lines, finalists)


def pearl_speed_up(experiment: Experiment, trio: PairModels, prompts: Sequence[list[int]], times: TrioTimes) -> float:
    """PEARL's speed-up over the target alone, predicted from the steps that it takes on these prompts."""
    gamma = max(1, round(times.t_target_s / times.t_draft_s))
    decoder = trio.pearl(gamma, sampling=experiment.sampling)
    generator = torch.Generator().manual_seed(experiment.decode.seed)
    steps = [
        step
        for ids in prompts
        for step in decoder.generate(ids, experiment.decode.max_new_tokens, generator=generator).rounds
    ]
    seconds = sum(max(times.t_draft_s * len(step.drafted), times.t_target_s) for step in steps)
    return sum(len(step.emitted) for step in steps) * times.t_target_s / seconds


def at_window(competitor: Competitor) -> Competitor:
    """The competitor with the paper's window, where it has several settings."""
    at = tuple(setting for setting in competitor.settings if setting.label == f"K={WINDOW}")
    return replace(competitor, settings=at or competitor.settings)


def speed_up(runs: RunsByName, name: str) -> str:
    """Speed-up over the target alone, by the clock."""
    return f"{runs[name].measured.tokens_per_s / runs[NO_DRAFT].measured.tokens_per_s:.2f}x"


def ablation_rows(runs: Mapping[str, RunsByName]) -> list[dict[str, str]]:
    """Rows of Table 2, the ablation."""
    columns = ("Pre-verify", "Self-verify", "HSDDW")
    return [
        {
            **dict(zip(columns, marks, strict=True)),
            **{dataset: speed_up(of_dataset, name) for dataset, of_dataset in runs.items()},
        }
        for name, marks in _ABLATION.items()
    ]


def mathematics(
    runs: Mapping[str, RunsByName], categories: Mapping[str, Sequence[str]]
) -> dict[str, list[dict[str, str]]]:
    """Table 3 of each dataset in which some categories, and not all, are mathematics."""
    tables = {}
    for dataset, of_dataset in runs.items():
        is_math = ["math" in category.lower() for category in categories[dataset]]
        if 0 < sum(is_math) < len(is_math):
            columns = {"All": {True, False}, "only Math": {True}, "rm Math": {False}}
            parts = {
                column: {name: _part(run, [math in kept for math in is_math]) for name, run in of_dataset.items()}
                for column, kept in columns.items()
            }
            tables[dataset] = [
                {"": row, **{column: speed_up(part, arm) for column, part in parts.items()}}
                for row, arm in {"AT": NO_DRAFT, "SD": "sd", "HSDDW": "HSDDW"}.items()
            ]
    return tables


def utilisation_rows(runs: RunsByName) -> list[dict[str, str]]:
    """Rows of Table 4, the utilisation."""
    return [
        {
            "Model": label,
            "σ (%)": f"{100 * redundancy(runs[name].counts):.2f}",
            "η (%)": f"{100 * target_utilisation(runs[name].counts):.2f}",
            "Speedup": speed_up(runs, name),
        }
        for label, name in _MODELS.items()
    ]


def _part(run: Candidate, chosen: Sequence[bool]) -> Candidate:
    """The run over some of its prompts."""
    return replace(run, decoded=tuple(compress(run.decoded, chosen)))

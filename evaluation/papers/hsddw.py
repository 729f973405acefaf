"""HSDDW, Tables 1 to 4, clocked: decoded on the test prompts in turns, with the paper's window of 10 at every level and
no choice on dev.

    Table 1   speed-up of HSDDW over the target alone (AT), by dataset, EAGLE's and PEARL's; the paper quotes other
              methods
    Table 2   pre-verify and self-verify, alone and together, by dataset
    Table 3   all prompts, those on mathematics, and the rest, where categories name mathematics
    Table 4   sigma, eta and speed-up

With --eagle an EAGLE draft takes its turns beside the others: as EAGLE-2's tree and as a chain, each also at the fixed
length that is fastest on dev, and under stops (`evaluation.papers.drafts`).

PEARL needs two devices: it is decoded here, with gamma the nearest to t_target / t_draft, and its speed-up is predicted
from its steps and the times fitted over the other generations. Each step takes as long as the slower of the two models,
and the exchange between them is free.

`hierarchy` compares more drafters at their best settings, and shares its stored generations with these tables.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from json import dumps

import numpy as np
import torch

from data_gen.store.manifest import digest
from decode.drafters.factory import PairModels
from decode.experiment import Experiment
from evaluation.gain import Spent, gain_over
from evaluation.hierarchies.configurations import (
    BOTH,
    HSDDW,
    MICRO_ALONE,
    NO_DRAFT,
    PLAIN,
    PRE,
    SELF,
    WINDOW,
    configurations_of,
)
from evaluation.hierarchies.decoded import Run, StoredLoop
from evaluation.hierarchies.times import TrioTimes, fit_times, redundancy
from evaluation.keys import models_key
from evaluation.papers import drafts
from evaluation.table import Table
from lm.features.eagle import Eagle

_ABLATION = {PLAIN: ("", "", ""), PRE: ("x", "", ""), SELF: ("", "x", ""), BOTH: ("x", "x", ""), HSDDW: ("", "", "x")}
_MODELS = {"target-draft": PLAIN, "target-micro": MICRO_ALONE, "Pre+Self-verify": BOTH, "HSDDW": HSDDW}
_CLOCKED = "clocked, against the target alone (AT)"
_PEARL = "PEARL, two devices, predicted"


def hsddw_tables(
    experiment: Experiment, *, eagle: str | None, specs: Sequence[str], repeats: int, tree: tuple[int, int]
) -> list[Table]:
    """Tables 1 to 4.

    Raises:
        ValueError: no test prompts; with EAGLE, no dev prompts, or a draft that is not for this target.
    """
    trio, fixed = PairModels(lambda: experiment.pair), f"K={WINDOW}"
    names = {NO_DRAFT, *_ABLATION, *_MODELS.values()}
    members = [
        one
        for one in configurations_of(trio)
        if one.name in names and (one.setting == fixed or not one.setting.startswith("K="))
    ]
    loops = {dataset: StoredLoop(experiment, dataset, trio) for dataset in experiment.datasets}
    finalists = _eagle_finalists(experiment, loops, eagle, specs, tree) if eagle else []
    both = [*members, *(one for finalist in finalists for one in finalist.all)]
    played: dict[str, list[Run]] = {}
    runs: dict[str, dict[str, Run]] = {}
    pearl: dict[str, str] = {}
    is_math: dict[str, np.ndarray] = {}
    for dataset, loop in loops.items():
        encoded = experiment.encoded(dataset, "test")
        if not encoded:
            raise ValueError("there are no test prompts to decode; raise decode.num_test")
        prompts = [ids for _, ids in encoded]
        played[dataset] = loop.play(both, prompts, repeats=repeats)
        of_trio = played[dataset][: len(members)]
        runs[dataset] = {run.configuration.name: run for run in of_trio}
        pearl[dataset] = f"{pearl_speed_up(experiment, trio, prompts, fit_times(of_trio)):.2f}x"
        is_math[dataset] = np.array(["math" in prompt.category.lower() for prompt, _ in encoded])
    rows, note = first_table(played, finalists)
    title = f"HSDDW Table 1: speed-up at T = {experiment.sampling.temperature:g}, {_CLOCKED}"
    ablation = [
        dict(zip(("Pre-verify", "Self-verify", "HSDDW"), marks, strict=True))
        | {dataset: speed_up(of_dataset, name) for dataset, of_dataset in runs.items()}
        for name, marks in _ABLATION.items()
    ]
    return [
        Table(title, [*rows, {"": _PEARL, **pearl}], note),
        Table(f"HSDDW Table 2: ablation, speed-up, {_CLOCKED}", ablation),
        *mathematics(runs, is_math),
        *(Table(f"HSDDW Table 4: {name}, {_CLOCKED}", _utilisation(of_dataset)) for name, of_dataset in runs.items()),
    ]


def _eagle_finalists(
    experiment: Experiment,
    loops: Mapping[str, StoredLoop],
    path: str,
    specs: Sequence[str],
    tree: tuple[int, int],
) -> list[drafts.Finalists]:
    """The EAGLE draft as a tree and as a chain, at the settings that all dev prompts together choose."""
    beside, kinds = experiment.with_feature_draft(path), (drafts.eagle_2(*tree), drafts.Draft("EAGLE, chain"))
    if not isinstance(beside.pair.drafting, Eagle):
        raise ValueError(f"--eagle is {path}, a {type(beside.pair.drafting).__name__} draft; give an EAGLE's directory")
    stops, lengths = drafts.stops_of(beside, specs), drafts.lengths_of(beside, kinds)
    models = PairModels(lambda: beside.pair, holds_trees=True)
    version = digest(dumps(models_key(beside, "draft"), sort_keys=True))[:8]
    prompts = {dataset: experiment.prompt_ids(dataset, "dev") for dataset in loops}
    play_dev = partial(drafts.play, loops, prompts)
    return [
        drafts.chosen(kind, drafts.configurations_of(kind, stops, models, lengths=lengths, version=version), play_dev)
        for kind in kinds
    ]


def first_table(
    played: Mapping[str, Sequence[Run]], finalists: Sequence[drafts.Finalists]
) -> tuple[list[dict[str, str]], str]:
    """Table 1 with intervals over prompts, and whether a stop pays."""
    together = drafts.joined(list(played.values()))
    lines = [line for finalist in finalists for line in drafts.lines_of(finalist, together)]
    spent: dict[str, dict[str, Spent]] = {}
    for dataset, runs in played.items():
        by_name = {run.configuration.name: run.measured for run in runs}
        spent[dataset] = {"AT": by_name[NO_DRAFT], "HSDDW": by_name[HSDDW]}
        spent[dataset] |= {
            line.method: line.run.measured for finalist in finalists for line in drafts.lines_of(finalist, runs)
        }
    more: dict[str, dict[str, str]] = {"AT": {"setting": ""}}
    for line in lines:
        gains = {f"over {rival}": line.gain(rival) for rival in (drafts.PUBLISHED, drafts.BEST)}
        more[line.method] = {"setting": line.run.configuration.setting, **gains}
    more["HSDDW"] = {"setting": ""}
    rows = [
        {"": method, **{name: _shown(of_set["AT"], of_set[method]) for name, of_set in spent.items()}, **cells}
        for method, cells in more.items()
    ]
    return rows, drafts.stop_verdict(lines)


def _shown(alone: Spent, drafted: Spent) -> str:
    """Speed-up over the target alone, with its interval."""
    gain = gain_over(alone, drafted)
    return f"{1 + gain.value:.2f}x ({1 + gain.low:.2f}, {1 + gain.high:.2f})"


def pearl_speed_up(experiment: Experiment, trio: PairModels, prompts: Sequence[list[int]], times: TrioTimes) -> float:
    """PEARL's speed-up over the target alone, predicted from the steps that it takes on these prompts."""
    gamma = max(1, round(times.t_target_s / times.t_draft_s))
    decoder = trio.pearl(gamma, sampling=experiment.sampling)
    generator, num_tokens = torch.Generator().manual_seed(experiment.decode.seed), experiment.decode.max_new_tokens
    steps = [step for ids in prompts for step in decoder.generate(ids, num_tokens, generator=generator).rounds]
    seconds = sum(max(times.t_draft_s * len(step.drafted), times.t_target_s) for step in steps)
    return sum(len(step.emitted) for step in steps) * times.t_target_s / seconds


def speed_up(runs: Mapping[str, Run], name: str, part: np.ndarray | None = None) -> str:
    """Speed-up over the target alone on some prompts, by the clock; `part` None: on all."""
    part = np.full(len(runs[name].decoded), True) if part is None else part
    spent = (runs[name].measured, runs[NO_DRAFT].measured)
    one, alone = (Spent(each.tokens[part], each.seconds[part]).tokens_per_s for each in spent)
    return f"{one / alone:.2f}x"


def mathematics(runs: Mapping[str, Mapping[str, Run]], is_math: Mapping[str, np.ndarray]) -> Iterator[Table]:
    """Table 3 of each dataset in which some prompts, and not all, are on mathematics."""
    for dataset, of_dataset in runs.items():
        math = is_math[dataset]
        if math.any() and not math.all():
            parts = {"All": math | ~math, "only Math": math, "rm Math": ~math}
            rows = [
                {"": row} | {column: speed_up(of_dataset, name, part) for column, part in parts.items()}
                for row, name in {"AT": NO_DRAFT, "SD": PLAIN, "HSDDW": HSDDW}.items()
            ]
            yield Table(f"HSDDW Table 3: {dataset}, speed-up, {_CLOCKED}", rows)


def _utilisation(runs: Mapping[str, Run]) -> list[dict[str, str]]:
    """Rows of Table 4."""
    return [
        {
            "Model": label,
            "σ (%)": f"{100 * redundancy(runs[name].counts):.2f}",
            "η (%)": f"{100 * runs[name].counts.verification_rate:.2f}",
            "Speedup": speed_up(runs, name),
        }
        for label, name in _MODELS.items()
    ]

"""HSDDW, Tables 1 to 4, clocked: decoded on the test prompts in turns, with the paper's window of 10 at every level and
no choice on dev.

    Table 1   speed-up of HSDDW over the target alone (AT), by dataset, EAGLE's and PEARL's; the paper quotes other
              methods
    Table 2   pre-verify and self-verify, alone and together, by dataset
    Table 3   all prompts, those on mathematics, and the rest, where categories name mathematics
    Table 4   sigma, eta and speed-up

EAGLE is EAGLE-2's tree at its published six levels, by the draft of --eagle; `tables --paper svip-trees` compares its
lengths and stops. PEARL needs two devices: it is decoded here, with gamma the nearest to t_target / t_draft, and its
speed-up is predicted from its steps and the times fitted over the other generations. Each step takes as long as the
slower of the two models, and the exchange between them is free.

`hierarchy` compares more drafters at their best settings, and shares its stored generations with these tables.
"""

from collections.abc import Mapping, Sequence
from json import dumps

import torch

from data_gen.store.manifest import digest
from decode.drafters.factory import PairModels
from decode.drafters.pearl import PearlDecoder
from decode.experiment import Experiment
from evaluation.competitor import Competitor
from evaluation.contest import Result
from evaluation.gain import Gain
from evaluation.keys import models_key
from evaluation.table import Table
from evaluation.times import Times
from lm.features.eagle import Eagle
from papers.hierarchies.configurations import BOTH, HSDDW, NO_DRAFT, PLAIN, PRE, SELF, hierarchies_of
from papers.hierarchies.decoded import MICRO_ALONE, StoredLoop
from papers.hierarchies.times import fit_times, redundancy
from papers.svip import EAGLE_2, competitor_of, fixed, lengths_of, speed_ups

_ABLATION = {PLAIN: ("", "", ""), PRE: ("x", "", ""), SELF: ("", "x", ""), BOTH: ("x", "x", ""), HSDDW: ("", "", "x")}
_MODELS = {"target-draft": PLAIN, "target-micro": MICRO_ALONE, "Pre+Self-verify": BOTH, "HSDDW": HSDDW}
_CLOCKED = "clocked, against the target alone (AT)"
_PEARL = "PEARL, two devices, predicted"


def hsddw_tables(experiment: Experiment, *, eagle: str | None, repeats: int) -> list[Table]:
    """Tables 1 to 4; ValueError for no test prompts, or if --eagle is no EAGLE draft for this target."""
    trio = PairModels(lambda: experiment.pair)
    # the last of their lengths is the paper's window
    by_name = {entry.family: entry.at(-1) for entry in hierarchies_of(experiment, trio, {})}
    members = [by_name[name] for name in dict.fromkeys((NO_DRAFT, *_ABLATION, *_MODELS.values()))]
    rivals = [_eagle(experiment, eagle)] if eagle else []
    methods = {"AT": NO_DRAFT, **{entry.family: entry.family for entry in rivals}, "HSDDW": HSDDW}
    first = {method: {"": method} for method in (*methods, _PEARL)}
    marks = ("Pre-verify", "Self-verify", "HSDDW")
    ablation = {name: dict(zip(marks, marked, strict=True)) for name, marked in _ABLATION.items()}
    third = []
    fourth = []
    for dataset in experiment.datasets:
        encoded = experiment.encoded(dataset, "test")
        played = StoredLoop(experiment, dataset).play([*members, *rivals], "test", repeats=repeats)
        results = {entry.competitor.family: entry.result() for entry in played}
        gains = {name: result.over(results[NO_DRAFT]) for name, result in results.items()}
        speeds = {name: f"{1 + gain.value:.2f}x" for name, gain in gains.items()}
        for method, name in methods.items():
            first[method][dataset] = f"{speeds[name]}{_interval_of(gains[name])}"
        pearl = pearl_speed_up(experiment, trio, [ids for _, ids in encoded], fit_times(played[: len(members)])[0])
        first[_PEARL][dataset] = f"{pearl:.2f}x"
        for name, row in ablation.items():
            row[dataset] = speeds[name]
        third += mathematics(dataset, results, [prompt.category for prompt, _ in encoded])
        counts = {entry.competitor.family: entry.played.total() for entry in played}
        rows = [
            {
                "Model": model,
                "σ (%)": f"{100 * redundancy(counts[name]):.2f}",
                "η (%)": f"{100 * counts[name].verification_rate:.2f}",
                "Speedup": speeds[name],
            }
            for model, name in _MODELS.items()
        ]
        fourth.append(Table(f"HSDDW Table 4: {dataset}, {_CLOCKED}", rows))
    title = f"HSDDW Table 1: speed-up at T = {experiment.sampling.temperature:g}, {_CLOCKED}"
    second = Table(f"HSDDW Table 2: ablation, speed-up, {_CLOCKED}", list(ablation.values()))
    return [Table(title, list(first.values())), second, *third, *fourth]


def _interval_of(gain: Gain) -> str:
    return "" if gain.low is None or gain.high is None else f" ({1 + gain.low:.2f}, {1 + gain.high:.2f})"


def _eagle(experiment: Experiment, path: str) -> Competitor:
    beside = experiment.with_feature_draft(path)
    if not isinstance(beside.pair.drafting, Eagle):
        raise ValueError(f"--eagle is {path}, a {type(beside.pair.drafting).__name__} draft; give an EAGLE's directory")
    lengths_of(beside, [EAGLE_2])  # refuses a decode.max_draft_length below the published one
    # stored beside the trio's generations, whose manifest does not name this draft
    version = digest(dumps(models_key(beside, "draft"), sort_keys=True))[:8]
    models = PairModels(lambda: beside.pair, holds_trees=True)
    return competitor_of(experiment, models, EAGLE_2, fixed([EAGLE_2.published], version=version))


def pearl_speed_up(experiment: Experiment, trio: PairModels, prompts: Sequence[list[int]], times: Times) -> float:
    """PEARL's speed-up over the target alone, predicted from the steps that it takes on these prompts."""
    t_target_s = times.alone_s
    decoder = PearlDecoder(
        trio.target,
        trio.draft,
        gamma=max(1, round(t_target_s / times.t_draft_s)),
        sampling=experiment.sampling,
        eos_ids=trio.pair.eos_ids,
    )
    generator = torch.Generator().manual_seed(experiment.decode.seed)
    num_tokens = experiment.decode.max_new_tokens
    steps = [step for ids in prompts for step in decoder.generate(ids, num_tokens, generator=generator).rounds]
    seconds = sum(max(times.t_draft_s * len(step.drafted), t_target_s) for step in steps)
    return sum(len(step.emitted) for step in steps) * t_target_s / seconds


def mathematics(dataset: str, results: Mapping[str, Result], categories: Sequence[str]) -> list[Table]:
    """Table 3 of a dataset in which some prompts, and not all, are on mathematics."""
    columns = ["only Math" if "math" in category.lower() else "rm Math" for category in categories]
    if len(set(columns)) < 2:
        return []
    rows = []
    for row, name in {"AT": NO_DRAFT, "SD": PLAIN, "HSDDW": HSDDW}.items():
        throughput = results[name].throughput
        alone = results[NO_DRAFT].throughput
        cells = speed_ups(throughput, alone, ["All"] * len(columns)) | speed_ups(throughput, alone, columns)
        rows.append({"": row} | {column: f"{speed:.2f}x" for column, speed in cells.items()})
    return [Table(f"HSDDW Table 3: {dataset}, speed-up, {_CLOCKED}", rows)]

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

from collections.abc import Iterator, Mapping, Sequence
from json import dumps

import numpy as np
import torch

from data_gen.store.manifest import digest
from decode.drafters.factory import PairModels
from decode.drafters.pearl import PearlDecoder
from decode.experiment import Experiment
from decode.policies import FixedLength
from evaluation.competitor import Competitor
from evaluation.contest import Result
from evaluation.hierarchies.configurations import BOTH, HSDDW, NO_DRAFT, PLAIN, PRE, SELF, WINDOW, hierarchies_of
from evaluation.hierarchies.decoded import MICRO_ALONE, StoredLoop
from evaluation.hierarchies.times import fit_times, redundancy
from evaluation.keys import models_key
from evaluation.papers.trees import eagle_2, lengths_of
from evaluation.table import Table
from evaluation.times import Times
from lm.features.eagle import Eagle

_ABLATION = {PLAIN: ("", "", ""), PRE: ("x", "", ""), SELF: ("", "x", ""), BOTH: ("x", "x", ""), HSDDW: ("", "", "x")}
_MODELS = {"target-draft": PLAIN, "target-micro": MICRO_ALONE, "Pre+Self-verify": BOTH, "HSDDW": HSDDW}
_CLOCKED = "clocked, against the target alone (AT)"
_PEARL = "PEARL, two devices, predicted"


def hsddw_tables(experiment: Experiment, *, eagle: str | None, repeats: int, tree: tuple[int, int]) -> list[Table]:
    """Tables 1 to 4.

    Raises:
        ValueError: no test prompts, or --eagle is no EAGLE draft for this target.
    """
    trio = PairModels(lambda: experiment.pair)
    by_name = {
        entry.family: entry.at(entry.settings.index(at) if (at := {"k": WINDOW}) in entry.settings else -1)
        for entry in hierarchies_of(experiment, trio, {})
    }
    members = [by_name[name] for name in dict.fromkeys((NO_DRAFT, *_ABLATION, *_MODELS.values()))]
    rivals = [_eagle(experiment, eagle, tree)] if eagle else []
    results: dict[str, dict[str, Result]] = {}
    pearl: dict[str, str] = {}
    is_math: dict[str, np.ndarray] = {}
    for dataset in experiment.datasets:
        encoded = experiment.encoded(dataset, "test")
        if not encoded:
            raise ValueError("there are no test prompts to decode; raise decode.num_test")
        prompts = [ids for _, ids in encoded]
        played = StoredLoop(experiment, dataset).play([*members, *rivals], prompts, repeats=repeats)
        results[dataset] = {entry.competitor.family: entry.result() for entry in played}
        times, _ = fit_times(played[: len(members)])
        pearl[dataset] = f"{pearl_speed_up(experiment, trio, prompts, times):.2f}x"
        is_math[dataset] = np.array(["math" in prompt.category.lower() for prompt, _ in encoded])
    methods = {"AT": NO_DRAFT, **{entry.family: entry.family for entry in rivals}, "HSDDW": HSDDW}
    first = [
        {"": method} | {dataset: _with_interval(of_dataset, name) for dataset, of_dataset in results.items()}
        for method, name in methods.items()
    ]
    ablation = [
        dict(zip(("Pre-verify", "Self-verify", "HSDDW"), marks, strict=True))
        | {dataset: speed_up(of_dataset, name) for dataset, of_dataset in results.items()}
        for name, marks in _ABLATION.items()
    ]
    title = f"HSDDW Table 1: speed-up at T = {experiment.sampling.temperature:g}, {_CLOCKED}"
    return [
        Table(title, [*first, {"": _PEARL, **pearl}]),
        Table(f"HSDDW Table 2: ablation, speed-up, {_CLOCKED}", ablation),
        *mathematics(results, is_math),
        *(
            Table(f"HSDDW Table 4: {name}, {_CLOCKED}", _utilisation(of_dataset))
            for name, of_dataset in results.items()
        ),
    ]


def _eagle(experiment: Experiment, path: str, tree: tuple[int, int]) -> Competitor:
    beside, draft = experiment.with_feature_draft(path), eagle_2(*tree)
    if not isinstance(beside.pair.drafting, Eagle):
        raise ValueError(f"--eagle is {path}, a {type(beside.pair.drafting).__name__} draft; give an EAGLE's directory")
    lengths_of(beside, [draft])  # refuses a decode.max_draft_length below the published one
    # stored beside the trio's generations, whose manifest does not name this draft
    version = digest(dumps(models_key(beside, "draft"), sort_keys=True))[:8]
    models, length = PairModels(lambda: beside.pair, holds_trees=True), draft.lengths([draft.published])
    return draft.competitor(experiment, models, FixedLength(0), length, version=version)


def _with_interval(results: Mapping[str, Result], name: str) -> str:
    """Speed-up over the target alone, with its interval over prompts."""
    gain = results[name].over(results[NO_DRAFT])
    return f"{1 + gain.value:.2f}x ({1 + gain.low:.2f}, {1 + gain.high:.2f})"


def pearl_speed_up(experiment: Experiment, trio: PairModels, prompts: Sequence[list[int]], times: Times) -> float:
    """PEARL's speed-up over the target alone, predicted from the steps that it takes on these prompts."""
    t_target_s = times.t_target_s[0]
    gamma = max(1, round(t_target_s / times.t_draft_s))
    models = trio.target, trio.draft
    decoder = PearlDecoder(*models, gamma=gamma, sampling=experiment.sampling, eos_ids=trio.pair.eos_ids)
    generator, num_tokens = torch.Generator().manual_seed(experiment.decode.seed), experiment.decode.max_new_tokens
    steps = [step for ids in prompts for step in decoder.generate(ids, num_tokens, generator=generator).rounds]
    seconds = sum(max(times.t_draft_s * len(step.drafted), t_target_s) for step in steps)
    return sum(len(step.emitted) for step in steps) * t_target_s / seconds


def speed_up(results: Mapping[str, Result], name: str, part: np.ndarray | None = None) -> str:
    """Speed-up over the target alone on some prompts, by the clock; `part` None: on all."""
    drafter, alone = (results[method].throughput for method in (name, NO_DRAFT))
    part = np.full(len(drafter.tokens), True) if part is None else part
    return f"{drafter.at(part).tokens_per_s / alone.at(part).tokens_per_s:.2f}x"


def mathematics(results: Mapping[str, Mapping[str, Result]], is_math: Mapping[str, np.ndarray]) -> Iterator[Table]:
    """Table 3 of each dataset in which some prompts, and not all, are on mathematics."""
    for dataset, of_dataset in results.items():
        math = is_math[dataset]
        if math.any() and not math.all():
            parts = {"All": math | ~math, "only Math": math, "rm Math": ~math}
            rows = [
                {"": row} | {column: speed_up(of_dataset, name, part) for column, part in parts.items()}
                for row, name in {"AT": NO_DRAFT, "SD": PLAIN, "HSDDW": HSDDW}.items()
            ]
            yield Table(f"HSDDW Table 3: {dataset}, speed-up, {_CLOCKED}", rows)


def _utilisation(results: Mapping[str, Result]) -> list[dict[str, str]]:
    counts = {name: result.played.total() for name, result in results.items() if result.played}
    return [
        {
            "Model": label,
            "σ (%)": f"{100 * redundancy(counts[name]):.2f}",
            "η (%)": f"{100 * counts[name].verification_rate:.2f}",
            "Speedup": speed_up(results, name),
        }
        for label, name in _MODELS.items()
    ]

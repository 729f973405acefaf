"""HSDDW, Tables 1 to 4, clocked: decoded on the test prompts in turns, with the paper's window of 10 at every level and no choice on dev.

    Table 1   speed-up of HSDDW over the target alone (AT), by dataset, and PEARL's; the other methods there are other papers' figures
    Table 2   pre-verify and self-verify, alone and together, by dataset
    Table 3   all prompts, those on mathematics, and the rest, where categories name mathematics
    Table 4   sigma, eta and speed-up

PEARL works on two devices: it is decoded here, with gamma the nearest to t_target / t_draft, and its speed-up is predicted from its steps
and the times fitted over the other generations, each step taking as long as the slower of the two models, the exchange between them free.

`decode hierarchy` compares more contenders at their best settings. Generations are stored and shared with it (`decode.hierarchies.runs`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from decode.experiment import Experiment
from decode.hierarchies.contenders import WINDOW, Contender, contenders_of
from decode.hierarchies.runs import MICRO_ALONE, Run, resumable_loop, times_of
from decode.hierarchies.times import Times, redundancy, target_utilisation
from decode.hierarchies.trio import Trio
from decode.papers.sheet import Sheet
from decode.parallel.pearl import PearlDecoder

Runs = dict[str, Run]
"""contender -> what it did on the prompts of one dataset."""
_ALONE = "target alone"
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


def hsddw_tables(experiment: Experiment) -> list[Sheet]:
    """Tables 1 to 4.

    Raises:
        ValueError: no test prompts.
    """
    trio = Trio(lambda: experiment.pair)
    names = [_ALONE, *dict.fromkeys([*_ABLATION, *_MODELS.values()])]
    contenders = [at_window(each) for each in contenders_of(trio) if each.name in names]
    runs: dict[str, Runs] = {}
    pearl: dict[str, str] = {}
    categories: dict[str, list[str]] = {}
    for dataset in experiment.datasets:
        encoded = experiment.encoded(dataset, "test")
        if not encoded:
            raise ValueError("there are no test prompts to decode; raise decode.num_test")
        categories[dataset] = [prompt.category for prompt, _ in encoded]
        played = resumable_loop(experiment, dataset, trio).play(contenders, [ids for _, ids in encoded])
        runs[dataset] = {run.contender.name: run for run in played}
        pearl[dataset] = f"{pearl_speed_up(experiment, trio, [ids for _, ids in encoded], times_of(played)):.2f}x"
    temperature = f"T = {experiment.sampling.temperature:g}"
    first = [{"": name, **{dataset: speed_up(each, arm) for dataset, each in runs.items()}} for name, arm in _METHODS.items()]
    first.append({"": "PEARL, two devices, predicted", **pearl})
    return [
        Sheet(f"HSDDW Table 1: speed-up at {temperature}, {_CLOCKED}", first),
        Sheet(f"HSDDW Table 2: ablation, speed-up, {_CLOCKED}", ablation_rows(runs)),
        *(Sheet(f"HSDDW Table 3: {name}, speed-up, {_CLOCKED}", rows) for name, rows in mathematics(runs, categories).items()),
        *(Sheet(f"HSDDW Table 4: {name}, {_CLOCKED}", utilisation_rows(each)) for name, each in runs.items()),
    ]


_METHODS = {"AT": _ALONE, "HSDDW": "HSDDW"}


def pearl_speed_up(experiment: Experiment, trio: Trio, prompts: Sequence[list[int]], times: Times) -> float:
    """Over the target alone, predicted from the steps that PEARL takes on these prompts."""
    gamma = max(1, round(times.t_target_s / times.t_draft_s))
    decoder = PearlDecoder(trio.target, trio.draft, gamma=gamma, sampling=experiment.sampling, eos_ids=trio.pair.eos_ids)
    generator = torch.Generator().manual_seed(experiment.decode.seed)
    steps = [step for ids in prompts for step in decoder.generate(ids, experiment.decode.max_new_tokens, generator=generator).rounds]
    seconds = sum(max(times.t_draft_s * len(step.drafted), times.t_target_s) for step in steps)
    return sum(len(step.emitted) for step in steps) * times.t_target_s / seconds


def at_window(contender: Contender) -> Contender:
    """With the paper's window, where a contender has several settings."""
    at = tuple(setting for setting in contender.settings if setting.label == f"K={WINDOW}")
    return replace(contender, settings=at or contender.settings)


def speed_up(runs: Runs, name: str) -> str:
    """Over the target alone, by the clock."""
    return f"{runs[name].measured.tokens_per_s / runs[_ALONE].measured.tokens_per_s:.2f}x"


def ablation_rows(runs: Mapping[str, Runs]) -> list[dict[str, str]]:
    """Table 2."""
    columns = ("Pre-verify", "Self-verify", "HSDDW")
    return [
        {**dict(zip(columns, marks, strict=True)), **{dataset: speed_up(each, name) for dataset, each in runs.items()}}
        for name, marks in _ABLATION.items()
    ]


def mathematics(runs: Mapping[str, Runs], categories: Mapping[str, Sequence[str]]) -> dict[str, list[dict[str, str]]]:
    """Table 3 of each dataset in which some categories, and not all, are mathematics."""
    tables = {}
    for dataset, each in runs.items():
        is_math = ["math" in category.lower() for category in categories[dataset]]
        if 0 < sum(is_math) < len(is_math):
            columns = {"All": [True] * len(is_math), "only Math": is_math, "rm Math": [not one for one in is_math]}
            parts = {column: {name: _part(run, chosen) for name, run in each.items()} for column, chosen in columns.items()}
            arms = {"AT": _ALONE, "SD": "sd", "HSDDW": "HSDDW"}
            tables[dataset] = [{"": row, **{column: speed_up(part, arm) for column, part in parts.items()}} for row, arm in arms.items()]
    return tables


def utilisation_rows(runs: Runs) -> list[dict[str, str]]:
    """Table 4."""
    return [
        {
            "Model": label,
            "σ (%)": f"{100 * redundancy(runs[name].counts):.2f}",
            "η (%)": f"{100 * target_utilisation(runs[name].counts):.2f}",
            "Speedup": speed_up(runs, name),
        }
        for label, name in _MODELS.items()
    ]


def _part(run: Run, chosen: Sequence[bool]) -> Run:
    """The run over some of its prompts."""
    return Run(run.contender, run.setting, tuple(one for one, is_chosen in zip(run.decoded, chosen, strict=True) if is_chosen))

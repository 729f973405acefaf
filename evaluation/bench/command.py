"""python -m evaluation bench: wall clock of every policy family beside transformers' assisted generation, in turns on
every prompt (`evaluation.bench.race`), or with `--batch` in continuous batches (`evaluation.bench.batch_sizes`).
"""

import platform
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Literal

import torch

from configs.flag_types import RaceRules, Sizes, sizes_of
from configs.load import accepts_yaml
from configs.schema import Config
from data_gen.store.manifest import git_commit
from decode.experiment import Experiment
from decode.policies import FixedLength, Policy
from evaluation.bench.batch_sizes import measure_sizes, size_table, size_verdict
from evaluation.bench.race import Race
from evaluation.bench.results import Cell, cell_table, gain_tables, in_json, race_sentence
from evaluation.costs.machine import keep_curves
from evaluation.costs.measure import Loop
from evaluation.table import announce, printing, say

_WIDTH = 240


@accepts_yaml
def bench(
    config: Config,
    *,
    batch: Sizes | None = None,
    samplings: tuple[Literal["greedy", "sampled", "nucleus", "own"], ...] = ("greedy", "sampled", "nucleus"),
    policies: tuple[str, ...] = (),
    families: tuple[str, ...] = (),
    constants: tuple[int, ...] = (),
    race: RaceRules = RaceRules(),  # noqa: B008  # frozen
    lengths: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 8, 10),
    num_prompts: int = 16,
    num_tokens: int = 64,
    json: bool = False,
) -> dict[str, object]:
    """Run `acceptance-heads bench`; `configs.measuring` documents its flags."""
    sizes = sizes_of(batch)
    counts = {"num_prompts": num_prompts, "num_tokens": num_tokens}
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"--{name} is {value}; at least 1 is timed")
    document: dict[str, object] = {"where": where(config), **counts}
    with printing(json) as publish:
        if sizes is None:
            chosen = Race(config, race, policies=policies, families=families, constants=constants, **counts)
            document["cells"] = _raced(chosen, samplings)
        else:
            document |= _in_batches(Experiment(config), sizes, policies, lengths=lengths, **counts)
        publish(document)
    return document


def _raced(race: Race, samplings: Sequence[str]) -> list[dict[str, object]]:
    cells: list[Cell] = []
    print("bench: every policy and schedule in turns; finished cells are stored", flush=True)
    for cell in race.cells(samplings):
        cells.append(cell)
        cell_table(cell).print(_WIDTH)
    for table in gain_tables(cells) if len(cells) > 1 else ():
        table.print(_WIDTH)
    announce([race.store.path])
    for cell in cells:
        say(f"\n{race_sentence(cell)}")
    return list(map(in_json, cells))


def _in_batches(
    experiment: Experiment,
    sizes: Sequence[int],
    specs: Sequence[str],
    *,
    lengths: Sequence[int],
    num_prompts: int,
    num_tokens: int,
) -> dict[str, object]:
    policies: dict[str, Policy] = {f"fixed_length:k={k}": FixedLength(k) for k in (0, *lengths)}
    policies |= {spec: experiment.policy(spec) for spec in specs}
    loop = Loop.of(
        experiment,
        prompts=experiment.prompt_ids(next(iter(experiment.datasets)), "test", num=num_prompts),
        max_draft_length=max([experiment.decode.max_draft_length, *lengths]),
        max_new_tokens=num_tokens,
    )
    rows, curves = measure_sizes(loop, policies, sizes)
    size_table(rows).print()
    announce([keep_curves(experiment, curves)])
    say(f"\n{size_verdict(rows)} `evaluate --batch` predicts every policy from these curves.")
    in_json = [row | row["gain"].interval for row in rows]
    return {"batches": in_json, "curves": {name: asdict(curve) for name, curve in curves._asdict().items()}}


def where(config: Config) -> dict[str, object]:
    """Models, hardware, versions, commit, date."""
    return {
        "target": config.pair.target.path,
        "draft": config.pair.draft.path,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": git_commit(),
        "machine": platform.machine(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
    }

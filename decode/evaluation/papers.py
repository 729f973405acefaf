"""python -m decode tables --paper NAME: a paper's tables, laid out as printed there, for the pair of a config.

    specdec++   (arXiv 2405.19715) Table 1: tokens/s and speed-up of the target alone, the best fixed length and the head; Table 2: the
                two times by regression, with R²; Table 3: KL of every head by depth and reject weight. Figure 4 is the Pareto plot that
                `evaluate` writes.
    svip        (arXiv 2411.18462) Table 1: speed-up of a constant length 5, the heuristic and SVIP, by category of the prompts
    hsddw       Tables 2 and 4, sigma and eta among them: those of `python -m decode hierarchy`, which has further options

Departure: throughputs are those of replay under the cost model (law 4.9), from measured or given times; `python -m decode bench` measures
wall clock. SpecDec++'s rows use its own head, fed-time, chosen on dev with its threshold.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from rich.table import Table

from configs.schema import Config
from decode.console import wide_console
from decode.costs.machine import costs_for, times_of
from decode.costs.model import CostModel
from decode.evaluation.arms import replay_dataset
from decode.evaluation.grids import grids_of
from decode.evaluation.results import Result, results_of, yardstick_of
from decode.experiment import Experiment
from decode.hierarchies.command import hierarchy
from decode.policies import Entropy, FixedLength, Heuristic, Policy
from decode.traces.recording import trace_folder
from decode.traces.replay import replay_settings
from decode.traces.trace import Trace
from heads.model.head import AcceptanceHead

SPECDEC = {"SpecDec (best fixed K)": "fixed_length", "SpecDec++": "head_fed", "drawn-time head": "head_drawn", "oracle": "oracle"}
SVIP: dict[str, Policy] = {"const 5": FixedLength(5), "heuristic": Heuristic(5), "SVIP": Entropy(0.3)}
"""As in the paper: the heuristic starts at 5; SVIP's threshold is its official default."""


class Paper(NamedTuple):
    """One table of a paper, and the same as rows."""

    table: Table
    rows: list[dict[str, Any]]


def tables(config: Config, *, paper: Literal["specdec++", "svip", "hsddw"]) -> None:
    """A paper's tables for this pair.

    Args:
        config: the experiment.
        paper: specdec++, svip, or hsddw (which decodes; no trace can be replayed for three models).
    """
    if paper == "hsddw":
        hierarchy(config)
        return
    experiment = Experiment(config)
    if paper == "specdec++":
        made = specdec_tables(experiment)
    else:
        folder = trace_folder(experiment)
        folder.complete()
        tests = {dataset: folder.load(dataset).test for dataset in experiment.datasets}
        made = [svip_table(tests, costs_for(experiment))]
    for each in made:
        wide_console().print(each.table)
    print(json.dumps({"paper": paper, "tables": [each.rows for each in made]}))


def specdec_tables(experiment: Experiment) -> list[Paper]:
    """Tables 1 to 3 of SpecDec++."""
    decode, heads = experiment.decode, experiment.heads
    grids = grids_of(decode.grid, heads, max_draft_length=decode.max_draft_length)
    folder = trace_folder(experiment)
    folder.complete()
    cost = costs_for(experiment)
    results = {}
    for dataset in experiment.datasets:
        replays = replay_dataset(folder.load(dataset), grids, heads=heads, cost=cost, perfect_head=decode.perfect_head, name=dataset)
        results[dataset] = {each.family: each for each in results_of(replays.arms, cost, yardstick_of(replays.arms, cost))}
    measured = times_of(experiment, {}) if cost.origin == "measured" else None
    return [throughput_table(results, cost), times_table(cost, measured), kl_table(heads)]


def throughput_table(results: Mapping[str, Mapping[str, Result]], cost: CostModel) -> Paper:
    """Table 1: tokens/s (speed-up) by dataset."""
    rows = []
    for dataset, families in results.items():
        alone = 1 / cost.t_target_s[0]
        row: dict[str, Any] = {"dataset": dataset, "target alone": f"{alone:.2f}"}
        for label, family in SPECDEC.items():
            if family in families:
                row[label] = f"{families[family].tokens_per_s:.2f} ({families[family].speed_up:.2f}x)"
        rows.append(row)
    return Paper(_table("SpecDec++ Table 1: tokens/s (speed-up), replayed", rows), rows)


def times_table(cost: CostModel, measured: Mapping[str, Any] | None) -> Paper:
    """Table 2: seconds per forward; by regression over generations and as bare forwards too, where `measured` knows them."""
    rows = [_times(cost.origin, cost.t_draft_s, cost.t_target_s[0])]
    if measured is not None:
        fit = measured["fit"]
        rows.append(_times("regression", fit["t_draft_s"], fit["t_target_s"]) | {"R2": f"{fit['r2']:.4f}"})
    if measured is not None and "standalone" in measured:
        bare = measured["standalone"]
        rows.append(_times(bare["origin"], bare["t_draft_s"], bare["t_target_s"][0]))
    return Paper(_table("SpecDec++ Table 2: forward times", rows), rows)


def _times(how: str, t_draft_s: float, t_target_s: float) -> dict[str, Any]:
    return {"how": how, "t_draft_s": f"{t_draft_s:.5f}", "t_target_s": f"{t_target_s:.5f}", "R2": ""}


def kl_table(heads: Mapping[str, AcceptanceHead]) -> Paper:
    """Table 3: binary KL on dev by depth (rows) and reject weight (columns); raw, as the paper's, but without its sign slip."""
    fed = [head for head in heads.values() if head.timing == "fed" and "raw_kl" in head.provenance.metrics]
    weights = sorted({head.provenance.reject_weight for head in fed})
    rows = []
    for depth in sorted({head.depth for head in fed}):
        row: dict[str, Any] = {"depth": depth}
        for weight in weights:
            kls = [h.provenance.metrics["raw_kl"] for h in fed if h.depth == depth and h.provenance.reject_weight == weight]
            row[f"w_rej = {weight:g}"] = f"{min(kls):.3f}" if kls else ""
        rows.append(row)
    return Paper(_table("SpecDec++ Table 3: KL of fed-time heads on dev", rows), rows)


def svip_table(traces: Mapping[str, Trace], cost: CostModel) -> Paper:
    """SVIP's Table 1: speed-up over the target alone by category, and over all prompts of each dataset."""
    rows = []
    for name, trace in traces.items():
        for category in sorted({row.category for row in trace.rows if row.category}):
            members = [index for index, row in enumerate(trace.rows) if row.category == category]
            rows.append({"prompts": category, **_speed_ups(trace.select(members), cost)})
        rows.append({"prompts": f"{name}, all", **_speed_ups(trace, cost)})
    return Paper(_table(f"SVIP Table 1: speed-up at t_target/t_draft = {cost.ratio:.2f}, replayed", rows), rows)


def _speed_ups(trace: Trace, cost: CostModel) -> dict[str, Any]:
    alone_s = trace.num_positions * cost.t_target_s[0]
    speed_ups = {name: f"{alone_s / cost.time_s(replay_settings(trace, policy)).sum():.2f}" for name, policy in SVIP.items()}
    return {"num": len(trace.rows), **speed_ups}


def _table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title=title)
    columns = list(dict.fromkeys(column for row in rows for column in row))
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*(str(row.get(column, "")) for column in columns))
    return table

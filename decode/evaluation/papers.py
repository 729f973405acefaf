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
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.table import Table

from configs.schema import Config
from decode.console import wide_console
from decode.costs.command import costs_for
from decode.costs.model import CostModel
from decode.evaluation.command import replay_dataset
from decode.evaluation.grids import load_heads
from decode.evaluation.results import Result, results_of
from decode.hierarchies.command import hierarchy
from decode.policies import Entropy, FixedLength, Heuristic, Policy
from decode.traces.command import datasets_of, load_trace, record
from decode.traces.replay import replay_settings
from decode.traces.trace import Trace
from heads.model.head import AcceptanceHead

SPECDEC = {"SpecDec (best fixed K)": "fixed_length", "SpecDec++": "head_fed", "drawn-time head": "head_drawn", "oracle": "oracle"}
SVIP: dict[str, Policy] = {"const 5": FixedLength(5), "heuristic": Heuristic(5), "SVIP": Entropy(0.3)}
"""As in the paper: the heuristic starts at 5; SVIP's threshold is its official default."""


def tables(config: Config, *, paper: Literal["specdec++", "svip", "hsddw"]) -> None:
    """A paper's tables for this pair.

    Args:
        config: the experiment.
        paper: specdec++, svip, or hsddw (which decodes; no trace can be replayed for three models).
    """
    if paper == "hsddw":
        hierarchy(config)
        return
    record(config)
    cost = costs_for(config)
    made = specdec_tables(config, cost) if paper == "specdec++" else [svip_table(config, cost)]
    for table, _ in made:
        wide_console().print(table)
    print(json.dumps({"paper": paper, "tables": [rows for _, rows in made]}))


_Made = tuple[Table, list[dict[str, Any]]]


def specdec_tables(config: Config, cost: CostModel) -> list[_Made]:
    """Tables 1 to 3 of SpecDec++."""
    results = {name: {r.family: r for r in results_of(replay_dataset(config, name, cost).arms, cost)} for name in datasets_of(config)}
    return [throughput_table(results, cost), times_table(config, cost), kl_table(load_heads(config))]


def throughput_table(results: Mapping[str, Mapping[str, Result]], cost: CostModel) -> _Made:
    """Table 1: tokens/s (speed-up) by dataset."""
    rows = []
    for dataset, families in results.items():
        alone = 1 / cost.t_target_s[0]
        row: dict[str, Any] = {"dataset": dataset, "target alone": f"{alone:.2f}"}
        for label, family in SPECDEC.items():
            if family in families:
                row[label] = f"{families[family].tokens_per_s:.2f} ({families[family].speed_up:.2f}x)"
        rows.append(row)
    return _table("SpecDec++ Table 1: tokens/s (speed-up), replayed", rows), rows


def times_table(config: Config, cost: CostModel) -> _Made:
    """Table 2: seconds per forward, by regression over generations."""
    path = Path(config.decode.dir) / "costs.json"
    rows = [{"how": cost.origin, "t_draft_s": f"{cost.t_draft_s:.5f}", "t_target_s": f"{cost.t_target_s[0]:.5f}", "R2": ""}]
    if cost.origin == "measured" and path.is_file():
        kept = json.loads(path.read_text())
        fit = kept["fit"]
        times = {name: f"{fit[name]:.5f}" for name in ("t_draft_s", "t_target_s")}
        rows.append({"how": "regression", **times, "R2": f"{fit['r2']:.4f}"})
        if "standalone" in kept:
            bare = CostModel(**kept["standalone"])
            rows.append({"how": bare.origin, "t_draft_s": f"{bare.t_draft_s:.5f}", "t_target_s": f"{bare.t_target_s[0]:.5f}", "R2": ""})
    return _table("SpecDec++ Table 2: forward times", rows), rows


def kl_table(heads: Mapping[str, AcceptanceHead]) -> _Made:
    """Table 3: binary KL on dev by depth (rows) and reject weight (columns); raw, as the paper's, but without its sign slip."""
    fed = [head for head in heads.values() if head.timing == "fed" and "raw_kl" in head.provenance.metrics]
    weights = sorted({head.provenance.reject_weight for head in fed})
    rows = []
    for depth in sorted({head.depth for head in fed}):
        row: dict[str, Any] = {"depth": depth}
        for weight in weights:
            found = [h.provenance.metrics["raw_kl"] for h in fed if h.depth == depth and h.provenance.reject_weight == weight]
            row[f"w_rej = {weight:g}"] = f"{min(found):.3f}" if found else ""
        rows.append(row)
    return _table("SpecDec++ Table 3: KL of fed-time heads on dev", rows), rows


def svip_table(config: Config, cost: CostModel) -> _Made:
    """SVIP's Table 1: speed-up over the target alone by category, and over all prompts."""
    rows = []
    for name in datasets_of(config):
        trace = load_trace(config, name, "test")
        categories = sorted({row.category for row in trace.rows if row.category})
        for category in categories:
            rows.append({"prompts": category, **_speed_ups(trace.select(_of_category(trace, category)), cost)})
        rows.append({"prompts": f"{name}, all", **_speed_ups(trace, cost)})
    return _table(f"SVIP Table 1: speed-up at t_target/t_draft = {cost.ratio:.2f}, replayed", rows), rows


def _of_category(trace: Trace, category: str) -> list[int]:
    return [index for index, row in enumerate(trace.rows) if row.category == category]


def _speed_ups(trace: Trace, cost: CostModel) -> dict[str, Any]:
    tokens = trace.num_positions
    seconds = {name: float(np.sum(cost.time_s(replay_settings(trace, policy)))) for name, policy in SVIP.items()}
    found = {name: tokens * cost.t_target_s[0] / total_s for name, total_s in seconds.items()}
    return {"num": len(trace.rows), **{name: f"{value:.2f}" for name, value in found.items()}}


def _table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title=title)
    columns = list(dict.fromkeys(column for row in rows for column in row))
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*(str(row.get(column, "")) for column in columns))
    return table

"""python -m decode costs: the times of this machine, three ways side by side.

*In the loop* are medians over rounds of real generations, with everything that a draft step and a verification do: what evaluations use.
*By regression* over the same generations, with its R² (SpecDec++, arXiv 2405.19715, Table 2). *Standalone* are bare forwards. Below,
what a head adds to a draft step; evaluations do not count it.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich.table import Table

from configs.schema import Config
from decode.console import wide_console
from decode.costs.machine import Workload, keep_costs, measure, read_costs, workload_of
from decode.costs.measure import head_cost, time_forwards
from decode.experiment import Experiment
from heads.model.head import AcceptanceHead

_SHOWN = (0, 1, 2, 5, 10, 20)
"""k of t_target(k) in the table."""


def costs(config: Config, *, again: bool = False) -> None:
    """Forward times of this machine: in the loop, by regression with R², standalone; and what a head adds.

    Args:
        config: the experiment; decode.t_draft_s and decode.t_target_s are ignored.
        again: measure once more, and replace the times in DIR/costs.json that evaluations use.
    """
    experiment = Experiment(config)
    times = None if again else read_costs(experiment.directory)
    heads = deepest(experiment.heads)
    if times is None or not {"standalone", "heads"} <= set(times) or not set(heads) <= set(times["heads"]):
        print("costs: timing forwards and generations on this machine", flush=True)
        workload = workload_of(experiment)
        times = (measure(workload) if times is None else times) | standalone(workload, heads)
        keep_costs(experiment.directory, times)
    wide_console().print(table_of(times))
    for name, (step_s, head_s) in times["heads"].items():
        print(f"head {name}: {1e6 * head_s:+.0f} us on a draft step of {1e6 * step_s:.0f} us ({head_s / step_s:+.1%})")
    print(json.dumps(times))


def standalone(workload: Workload, heads: Mapping[str, AcceptanceHead]) -> dict[str, Any]:
    """Bare forwards, and (seconds of a draft step without a head, seconds that it adds) for each head."""
    pair, prompt = workload.pair, workload.prompts[0]
    bare = time_forwards(pair, prompt, max_draft_length=workload.max_draft_length, repeats=5)
    return {"standalone": asdict(bare), "heads": {name: head_cost(pair, head, prompt, repeats=20) for name, head in heads.items()}}


def deepest(heads: Mapping[str, AcceptanceHead]) -> dict[str, AcceptanceHead]:
    """The deepest head of each timing, if there are any: what a head adds depends on little else."""
    names = {head.timing: name for name, head in sorted(heads.items(), key=lambda entry: entry[1].depth)}  # the last of a timing stays
    return {name: heads[name] for name in sorted(names.values())}


def table_of(times: Mapping[str, Any]) -> Table:
    """Times in ms, one row per way of measuring."""
    lengths = [k for k in _SHOWN if k < len(times["t_target_s"])]
    table = Table(title="milliseconds per forward; evaluations use those of the loop")
    for name in ("", "t_draft", *(f"t_target({k})" for k in lengths), "R²"):
        table.add_column(name, justify="right" if name else "left")
    for name, row in (("in the loop", times), ("standalone", times["standalone"])):
        table.add_row(name, *(f"{1e3 * value:.3f}" for value in (row["t_draft_s"], *(row["t_target_s"][k] for k in lengths))), "")
    fit = times["fit"]
    blanks = [""] * (len(lengths) - 1)
    table.add_row("by regression", f"{1e3 * fit['t_draft_s']:.3f}", f"{1e3 * fit['t_target_s']:.3f}", *blanks, f"{fit['r2']:.4f}")
    return table

"""The times of this machine, measured once and kept in DIR/costs.json, so that a second evaluation agrees with the first."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data_gen.store.shards import write_atomic
from decode.costs.measure import costs_of, fit_costs, time_generations
from decode.costs.model import CostModel
from lm import Pair, Sampling


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is timed."""

    pair: Pair
    prompts: Sequence[list[int]]
    sampling: Sampling
    max_draft_length: int
    max_new_tokens: int


def measured_once(directory: Path, workload: Callable[[], Workload]) -> CostModel:
    """The kept times; where there are none, those of the workload, which are then kept."""
    times = read_kept(directory)
    if times is None:
        print("costs: timing generations on this machine", flush=True)
        times = measure(workload())
        keep(directory, times)
    return CostModel(times["t_draft_s"], tuple(times["t_target_s"]), times["origin"])


def measure(workload: Workload) -> dict[str, Any]:
    """t_draft and t_target(k) inside the real loop, and the regression over the same generations.

    Raises:
        ValueError: there is no prompt to generate from.
    """
    if not workload.prompts:
        raise ValueError("there are no dev prompts to time forwards on; give decode.t_draft_s and decode.t_target_s")
    generations = time_generations(
        workload.pair,
        workload.sampling,
        workload.prompts,
        max_draft_length=workload.max_draft_length,
        max_new_tokens=workload.max_new_tokens,
    )
    return {**asdict(costs_of(generations, workload.max_draft_length)), "fit": fit_costs(generations)._asdict()}


def read_kept(directory: Path) -> dict[str, Any] | None:
    """DIR/costs.json, if it was written."""
    path = directory / "costs.json"
    return dict(json.loads(path.read_text())) if path.is_file() else None


def keep(directory: Path, times: dict[str, Any]) -> None:
    """Write DIR/costs.json."""
    write_atomic(directory / "costs.json", json.dumps(times, indent=1).encode())

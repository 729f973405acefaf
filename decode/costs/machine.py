"""The times of this machine, measured once and kept in DIR/costs.json, so that a second evaluation agrees with the first."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data_gen.store.shards import write_atomic
from decode.costs.measure import costs_of, fit_costs, time_generations
from decode.costs.model import CostModel, check_ratio
from decode.experiment import Experiment
from lm import Pair, Sampling

_PROMPTS = 4
_TOKENS = 96


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is timed."""

    pair: Pair
    prompts: Sequence[list[int]]
    sampling: Sampling
    max_draft_length: int
    max_new_tokens: int


def costs_for(experiment: Experiment, ratio: float | None = None) -> CostModel:
    """Times that the YAML gives, or else those of this machine.

    Args:
        experiment: whose costs they are.
        ratio: t_target / t_draft of other hardware, in place of theirs.

    Raises:
        ValueError: one of the two times given without the other; a ratio that is not positive.
    """
    if ratio is not None:
        check_ratio(ratio)
        return costs_for(experiment).with_ratio(ratio)
    draft_s, target_s = experiment.decode.t_draft_s, experiment.decode.t_target_s
    if draft_s is not None and target_s is not None:
        return CostModel.constant(draft_s, target_s)
    if (draft_s, target_s) != (None, None):
        raise ValueError("decode.t_draft_s and decode.t_target_s go together: give both, or neither to measure them")
    times = read_costs(experiment.directory)
    if times is None:
        print("costs: timing generations on this machine", flush=True)
        times = measure(workload_of(experiment))
        keep_costs(experiment.directory, times)
    return CostModel(times["t_draft_s"], tuple(times["t_target_s"]), times["origin"])


def workload_of(experiment: Experiment) -> Workload:
    """A few dev prompts of the first dataset."""
    num = max(experiment.decode.num_dev, _PROMPTS)
    return Workload(
        pair=experiment.pair,
        prompts=experiment.prompt_ids(next(iter(experiment.datasets)), "dev", num=num)[:_PROMPTS],
        sampling=experiment.sampling,
        max_draft_length=experiment.decode.max_draft_length,
        max_new_tokens=min(experiment.decode.max_new_tokens, _TOKENS),
    )


def measure(workload: Workload) -> dict[str, Any]:
    """t_draft and t_target(k) inside the real loop, and the regression over the same generations."""
    generations = time_generations(
        workload.pair,
        workload.sampling,
        workload.prompts,
        max_draft_length=workload.max_draft_length,
        max_new_tokens=workload.max_new_tokens,
    )
    return {**asdict(costs_of(generations, workload.max_draft_length)), "fit": fit_costs(generations)._asdict()}


def read_costs(directory: Path) -> dict[str, Any] | None:
    """DIR/costs.json, if it was written."""
    path = directory / "costs.json"
    return dict(json.loads(path.read_text())) if path.is_file() else None


def keep_costs(directory: Path, times: dict[str, Any]) -> None:
    """Write DIR/costs.json."""
    write_atomic(directory / "costs.json", json.dumps(times, indent=1).encode())

"""The costs of a run: given in the YAML, else measured once on this machine and kept in DIR/costs.json."""

import json
from dataclasses import asdict
from pathlib import Path

from configs.schema import Config
from data_gen.shards import write_atomic
from decode.cost import CostModel
from decode.cost_measure import Fit, costs_of, fit_costs, time_generations
from decode.record import datasets_of, load_trace
from lm import Sampling, load_pair

_PROMPTS = 4
_TOKENS = 96


def costs_for(config: Config) -> CostModel:
    """Times that the YAML gives, or those of this machine; what is measured is kept, so that a second evaluation agrees with the first.

    Raises:
        ValueError: one of the two times given without the other.
    """
    given = config.decode.t_draft_s, config.decode.t_target_s
    if given[0] is not None and given[1] is not None:
        return CostModel.constant(given[0], given[1])
    if given != (None, None):
        raise ValueError("decode.t_draft_s and decode.t_target_s go together: give both, or neither to measure them")
    path = Path(config.decode.dir) / "costs.json"
    if path.is_file():
        kept = json.loads(path.read_text())
        return CostModel(kept["t_draft_s"], tuple(kept["t_target_s"]), kept["origin"])
    cost, fit = measure(config)
    write_atomic(path, json.dumps({**asdict(cost), "fit": fit._asdict()}, indent=1).encode())
    return cost


def measure(config: Config) -> tuple[CostModel, Fit]:
    """t_draft and t_target(k) inside the real loop, and the regression over the same generations."""
    print("costs: timing generations on this machine", flush=True)
    pair = load_pair(config.pair)
    rows = load_trace(config, next(iter(datasets_of(config))), "dev").rows
    longest = sorted(rows, key=lambda row: -len(row.response_ids))[:_PROMPTS]
    generations = time_generations(
        pair,
        Sampling(**vars(config.pair.sampling)),
        [list(row.prompt_ids) for row in longest],
        max_draft_length=config.decode.max_draft_length,
        max_new_tokens=min(config.decode.max_new_tokens, _TOKENS),
    )
    return costs_of(generations, config.decode.max_draft_length), fit_costs(generations)

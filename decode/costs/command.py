"""The costs of a run: given in the YAML, else measured once on this machine and kept in DIR/costs.json.

`python -m decode costs` shows the kept times three ways side by side: *in the loop* (medians over rounds of real generations, with
everything that a draft step and a verification do: what evaluations use), *by regression* over the same generations with its R²
(SpecDec++, arXiv 2405.19715, Table 2), and *standalone* (bare forwards). What a head adds to a draft step stands below; evaluations leave
it out.
"""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from configs.schema import Config
from data_gen.prompts.pool import load_prompts
from data_gen.prompts.templates import encode
from data_gen.store.shards import write_atomic
from decode.bench.generations import head_cost
from decode.console import wide_console
from decode.costs.measure import costs_of, fit_costs, time_forwards, time_generations
from decode.costs.model import CostModel, check_ratio
from decode.evaluation.grids import load_heads
from decode.traces.command import datasets_of
from heads.model.head import AcceptanceHead
from lm import Pair, Sampling, load_pair

_PROMPTS = 4
_TOKENS = 96
_SHOWN = (0, 1, 2, 5, 10, 20)
"""k of t_target(k) in the table."""


def costs_for(config: Config, ratio: float | None = None) -> CostModel:
    """Times that the YAML gives, or those of this machine; what is measured is kept, so that a second evaluation agrees with the first.

    Args:
        config: of the run.
        ratio: t_target / t_draft of other hardware in place of that (`CostModel.with_ratio`).

    Raises:
        ValueError: one of the two times given without the other; a ratio that is not positive.
    """
    if ratio is not None:
        check_ratio(ratio)
        return costs_for(config).with_ratio(ratio)
    given = config.decode.t_draft_s, config.decode.t_target_s
    if given[0] is not None and given[1] is not None:
        return CostModel.constant(given[0], given[1])
    if given != (None, None):
        raise ValueError("decode.t_draft_s and decode.t_target_s go together: give both, or neither to measure them")
    kept = read_kept(config)
    if kept is None:
        print("costs: timing generations on this machine", flush=True)
        kept = measure(config, load_pair(config.pair))
        keep(config, kept)
    return CostModel(kept["t_draft_s"], tuple(kept["t_target_s"]), kept["origin"])


def costs(config: Config, *, again: bool = False) -> None:
    """Forward times of this machine: in the loop, by regression with R², standalone; and what a head adds.

    Args:
        config: the experiment; decode.t_draft_s and decode.t_target_s are left aside.
        again: measure anew, in place of the times that DIR/costs.json keeps for evaluations.
    """
    kept = None if again else read_kept(config)
    heads = deepest_heads(config)
    if kept is None or not {"standalone", "heads"} <= set(kept) or not set(heads) <= set(kept["heads"]):
        print("costs: timing forwards and generations on this machine", flush=True)
        pair = load_pair(config.pair)
        kept = (measure(config, pair) if kept is None else kept) | standalone(config, pair, heads)
        keep(config, kept)
    wide_console().print(table_of(kept))
    for name, (step_s, head_s) in kept["heads"].items():
        print(f"head {name}: {1e6 * head_s:+.0f} us on a draft step of {1e6 * step_s:.0f} us ({head_s / step_s:+.1%})")
    print(json.dumps(kept))


def measure(config: Config, pair: Pair) -> dict[str, Any]:
    """t_draft and t_target(k) inside the real loop, and the regression over the same generations."""
    generations = time_generations(
        pair,
        Sampling(**vars(config.pair.sampling)),
        prompts_of(config, pair),
        max_draft_length=config.decode.max_draft_length,
        max_new_tokens=min(config.decode.max_new_tokens, _TOKENS),
    )
    return {**asdict(costs_of(generations, config.decode.max_draft_length)), "fit": fit_costs(generations)._asdict()}


def standalone(config: Config, pair: Pair, heads: dict[str, AcceptanceHead]) -> dict[str, Any]:
    """Bare forwards, and (seconds of a draft step without a head, seconds that it adds) for each head."""
    prompt = prompts_of(config, pair)[0]
    bare = time_forwards(pair, prompt, max_draft_length=config.decode.max_draft_length, repeats=5)
    return {"standalone": asdict(bare), "heads": {name: head_cost(pair, head, prompt, repeats=20) for name, head in heads.items()}}


def prompts_of(config: Config, pair: Pair) -> list[list[int]]:
    """Token ids of a few dev prompts of the first dataset."""
    data = replace(config.data, prompts=next(iter(datasets_of(config).values())), num_dev=max(config.decode.num_dev, _PROMPTS))
    ids = [encode(prompt, pair.tokenizer, data.template)[-data.max_prompt_tokens :] for prompt in load_prompts(data, "dev")[:_PROMPTS]]
    if not ids:
        raise ValueError(f"{data.prompts} has no dev prompts to time forwards on; give decode.t_draft_s and decode.t_target_s")
    return ids


def deepest_heads(config: Config) -> dict[str, AcceptanceHead]:
    """The deepest head of each timing, if there are any: what a head adds depends on little else."""
    heads = load_heads(config)
    names = {head.timing: name for name, head in sorted(heads.items(), key=lambda entry: entry[1].depth)}
    return {name: heads[name] for name in sorted(names.values())}


def table_of(kept: dict[str, Any]) -> Table:
    """Times in ms, one row per way of measuring."""
    lengths = [k for k in _SHOWN if k < len(kept["t_target_s"])]
    table = Table(title="milliseconds per forward; evaluations use those of the loop")
    for name in ("", "t_draft", *(f"t_target({k})" for k in lengths), "R²"):
        table.add_column(name, justify="right" if name else "left")
    for name, times in (("in the loop", kept), ("standalone", kept["standalone"])):
        table.add_row(name, *(f"{1e3 * value:.3f}" for value in (times["t_draft_s"], *(times["t_target_s"][k] for k in lengths))), "")
    fit = kept["fit"]
    blanks = [""] * (len(lengths) - 1)
    table.add_row("by regression", f"{1e3 * fit['t_draft_s']:.3f}", f"{1e3 * fit['t_target_s']:.3f}", *blanks, f"{fit['r2']:.4f}")
    return table


def read_kept(config: Config) -> dict[str, Any] | None:
    """DIR/costs.json, if it was written."""
    path = Path(config.decode.dir) / "costs.json"
    return dict(json.loads(path.read_text())) if path.is_file() else None


def keep(config: Config, kept: dict[str, Any]) -> None:
    """Write DIR/costs.json."""
    write_atomic(Path(config.decode.dir) / "costs.json", json.dumps(kept, indent=1).encode())

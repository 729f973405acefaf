"""python -m decode bench: wall clock of the loop beside transformers' assisted generation, as ratios in one interleaved run.

    outside_share     share of the wall time outside model forwards: 1 - (counts of forwards x bare forward medians) / wall time;
                      outside_own_share: the same with the loop's own forwards, which are faster than bare ones
    against_assisted  tokens per second of the loop / of assisted generation, same pair, same fixed length, same sampling
    against_plain     tokens per second of the loop / of the target's plain generation
    head_share        what a head adds to a draft step / the step without it; the first of the config's heads, or where there are none an
                      untrained one of depth 3 on the hidden state alone. Scalars cost more than a block

With `decode.hierarchies` also three models beside two (`decode.bench.hierarchies`).

Greedy, and sampled at temperature 1 without warpers (with warpers assisted generation applies them to the draft twice and would lose for
another reason). Arms take turns on every prompt; times, and ratios prompt by prompt, are medians. The last line is one JSON document.
"""

import json
import math
import platform
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers.utils import logging

from configs.schema import Config
from decode.bench.generations import Arms, median_ratio, outside_share, timed_in_turns
from decode.bench.hierarchies import hierarchy_rows, hierarchy_table
from decode.costs.measure import head_cost
from decode.experiment import Experiment
from heads.model.head import AcceptanceHead
from lm import CompiledModel, Pair, Sampling

SAMPLINGS = {"greedy": Sampling(temperature=0.0), "sampled": Sampling()}


def bench(
    config: Config,
    *,
    lengths: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 8, 10),
    threads: tuple[int, ...] = (1, 2),
    num_prompts: int = 8,
    num_tokens: int = 64,
    compile: bool = True,
) -> dict[str, Any]:
    """Wall clock, side by side with transformers' assisted generation.

    Args:
        config: names the pair; its sampling is not used, bench has two of its own.
        lengths: fixed draft lengths.
        threads: CPU threads to measure with.
        num_prompts: generations per arm; medians over them.
        num_tokens: per generation; EOS is switched off.
        compile: also time the loop with both models compiled (each width of a verification compiles once, for seconds).
    """
    logging.disable_progress_bar()
    experiment, console = Experiment(config, needs_micro=config.decode.hierarchies), Console(highlight=False)
    head = next(iter(experiment.heads.values()), None)
    pair = experiment.pair
    head = head or AcceptanceHead(pair.draft.config.get_text_config().hidden_size, 3)
    prompts = experiment.prompt_ids(next(iter(experiment.datasets)), "test", num=experiment.data.num_test)[:num_prompts]
    rows: dict[str, list[dict[str, Any]]] = {"grid": [], "overheads": [], "hierarchies": []}
    for num_threads in threads:
        torch.set_num_threads(num_threads)
        arms = Arms(pair, num_tokens, _compiled(pair, max(map(len, prompts)) + num_tokens, max(lengths)) if compile else None)
        for kind, row in _measured(arms, head, prompts=prompts, lengths=lengths, hierarchies=experiment.decode.hierarchies):
            rows[kind].append({"threads": num_threads, **row})
            console.print(_line(rows[kind][-1]), soft_wrap=True)
    console.print(_table(rows["grid"]))
    if rows["hierarchies"]:
        console.print(hierarchy_table(rows["hierarchies"]))
    models = {"target": experiment.models.target.path, "draft": experiment.models.draft.path}
    document = {"where": _where() | models, "num_tokens": num_tokens, "num_prompts": len(prompts), **rows}
    print(json.dumps(document))
    return document


def _measured(
    arms: Arms, head: AcceptanceHead, *, prompts: list[list[int]], lengths: tuple[int, ...], hierarchies: bool
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(kind, row), each as soon as it is measured."""
    for row in _grid(arms, prompts, lengths):
        yield "grid", row
    yield "overheads", _extras(arms, head, prompts)
    if hierarchies:
        for row in hierarchy_rows(arms.pair, prompts, SAMPLINGS, lengths=lengths, num_tokens=arms.num_tokens):
            yield "hierarchies", row


def _compiled(pair: Pair, num_tokens: int, longest: int) -> tuple[CompiledModel, CompiledModel]:
    """Target and draft with room for so many tokens and a padded draft, compiled for drafts of up to `longest` tokens."""
    capacity = 64 * math.ceil((num_tokens + 32) / 64)
    target, draft = (CompiledModel(model, vocab_size=pair.vocab_size, capacity=capacity) for model in (pair.target, pair.draft))
    target.warm_up(longest + 1)
    draft.warm_up(1)
    return target, draft


def _grid(arms: Arms, prompts: list[list[int]], lengths: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """One row per sampling and draft length."""
    for name, sampling in SAMPLINGS.items():
        for k in lengths:
            timed = {"plain": partial(arms.assisted, k=0, sampling=sampling), "assisted": partial(arms.assisted, k=k, sampling=sampling)}
            timed["ours"] = partial(arms.ours, k=k, sampling=sampling)
            if arms.compiled is not None:
                timed["compiled"] = partial(arms.ours_compiled, k=k, sampling=sampling)
            seconds = dict(zip(timed, timed_in_turns(list(timed.values()), prompts), strict=True))
            row: dict[str, Any] = {"sampling": name, "k": k}
            row |= {f"{arm}_tokens_per_s": arms.num_tokens / median(taken_s) for arm, taken_s in seconds.items()}
            row["against_plain"] = median_ratio(seconds["plain"], seconds["ours"])
            row["against_assisted"] = median_ratio(seconds["assisted"], seconds["ours"])
            if "compiled" in seconds:
                row["compiled_against_assisted"] = median_ratio(seconds["assisted"], seconds["compiled"])
                if sampling.is_greedy:
                    row["compiled_tokens_differ"] = arms.num_differing(prompts, k)
            yield row


def _extras(arms: Arms, head: AcceptanceHead, prompts: list[list[int]]) -> dict[str, Any]:
    """Time outside forwards at K = 5, and what a head adds."""
    row: dict[str, Any] = {}
    for name, sampling in SAMPLINGS.items():
        outside = outside_share(arms.pair, prompts, 5, sampling, arms.num_tokens)
        row |= {f"outside_{what}_{name}": value for what, value in outside._asdict().items()}
    row["draft_step_s"], row["head_s"] = head_cost(arms.pair, head, prompts[0])
    row["head_share"], row["head_depth"] = row["head_s"] / row["draft_step_s"], head.depth
    return row


def _where() -> dict[str, Any]:
    """Hardware, versions, commit, date."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10, check=False
    )
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit.stdout.strip() or None,
        "machine": platform.machine(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
    }


def _table(rows: list[dict[str, Any]]) -> Table:
    """Ratios against assisted generation: draft lengths down, threads and samplings across."""
    table = Table(title="tokens/s of the loop / of assisted generation (compiled)")
    table.add_column("K", justify="right")
    arms = sorted({(row["threads"], row["sampling"]) for row in rows})
    for num_threads, name in arms:
        table.add_column(f"{name}, {num_threads} thread{'s' * (num_threads > 1)}", justify="right")
    for k in sorted({row["k"] for row in rows}):
        by_arm = {(row["threads"], row["sampling"]): row for row in rows if row["k"] == k}
        table.add_row(str(k), *(_ratios(by_arm[arm]) for arm in arms))
    return table


def _ratios(row: dict[str, Any]) -> str:
    compiled = row.get("compiled_against_assisted")
    return f"{row['against_assisted']:.2f}" + (f" ({compiled:.2f})" if compiled else "")


def _line(row: dict[str, Any]) -> str:
    return " ".join(f"{name}={_short(value)}" for name, value in row.items())


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

"""Tokens per second in vLLM: `VLLM_PYTHON=VENV/bin/python python -m benchmarks.serve.clock --head HEAD [--turns 5]
[--layers '[14,60]']`.

The models are the embedded trio with extra layers whose outputs are zero: a draft step takes about 10 ms and a
verification five times as long. One engine speculates, with a policy per request; another does not. Arms take turns on
the same prompts, with EOS ignored. HEAD is a drawn-time head after `acceptance-heads tune`.

Engines use one thread. Speeds are per CPU second of the engine's process, which other work on the machine does not
affect; wall-clock ratios are reported too. After each turn one JSON document reports all turns: tokens per second of
every arm and concurrency, and the gain over the best fixed length with its 95 % interval (t with n - 1 degrees of
freedom, of the logarithms of the turns' ratios; null after one turn). The best fixed length is that of the same turns,
which no interval includes.
"""

import json
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from benchmarks.serve.loop import TRIO, EngineProcess, pair_of_the_trio, requests_of
from configs import ModelSource
from configs.command import run
from evaluation.gain import gain_of_turns
from evaluation.turns import in_turns
from lm import load_model

LONGEST = 20
NUM_TOKENS = 40
REQUESTS_PER_ROW = 2
ALONE = "no speculation"
_MIN_REQUESTS = 4  # per turn, because prompts differ
ARMS = {
    **{f"fixed length {k}": f"fixed_length:k={k}" for k in (2, 4, 6, 10)},
    "SVIP": "entropy:max_sqrt_entropy=0.46",
    "product of token prob.": "cumulative_token_prob:min_token_prob=0.0474",
    "head, threshold": "head:head,max_rejection_prob=0.3",
    "auto": "head:head,max_rejection_prob=auto",
}


def serve_clock(
    *,
    head: str,
    turns: int = 5,
    layers: tuple[int, int] = (14, 60),
    temperature: float = 1.0,
    concurrency: tuple[int, ...] = (1, 4, 16),
) -> None:
    """Serve all arms in turns.

    Args:
        head: directory of a drawn-time head.
        turns: measured turns of every arm.
        layers: number of extra layers of draft and target.
        temperature: sampling temperature; at 0 every arm generates the same text.
        concurrency: numbers of concurrent requests.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        added = dict(zip(("draft", "target"), layers, strict=True))
        models = {role: saved(TRIO / role, folder / role, num_layers=num) for role, num in added.items()}
        settings = {"policy": "fixed_length:k=2", "heads": {"head": head}, "allow_foreign_heads": True}
        arguments = {"max_num_seqs": max(concurrency)}
        job = {**models, "longest": LONGEST, "settings": settings, "arguments": arguments}
        with (
            closing(EngineProcess(job, folder / "stopping.json")) as stopping,
            closing(EngineProcess(job | {"draft": None, "settings": None}, folder / "alone.json")) as alone,
        ):
            for report in timed(stopping, alone, turns=turns, sizes=concurrency, temperature=temperature):
                print(json.dumps({"layers": layers, "temperature": temperature, **report}), flush=True)


def saved(path: Path, folder: Path, *, num_layers: int) -> str:
    """Save a model, with `num_layers` more layers whose outputs are zero, and its tokenizer as vLLM loads them."""
    model = load_model(ModelSource(path=str(path), dtype="float32"))
    for index in range(num_layers):
        layer = deepcopy(model.model.layers[index])
        for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
            projection.weight.data.zero_()
        model.model.layers.append(layer)
    model.config.get_text_config().num_hidden_layers += num_layers
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(path).save_pretrained(folder)
    return str(folder)


def timed(
    stopping: EngineProcess, alone: EngineProcess, *, turns: int, sizes: Sequence[int], temperature: float
) -> Iterator[dict[str, Any]]:
    """Time the two engines in turns, after one turn for warm-up; yields a summary after each turn."""
    prompts = requests_of(pair_of_the_trio(), [""], 36)
    times = {}
    results = defaultdict[tuple[int, str], list[dict[str, Any]]](list)
    for turn in range(turns + 1):
        arms = (ALONE, *ARMS) if turn else (ALONE, "auto")
        for size, order in in_turns(arms, sizes if turn else sizes[-1:], first=turn):
            for arm in order:
                settings = {"policy": ARMS.get(arm), "max_tokens": NUM_TOKENS}
                requests = [prompt | settings for prompt in prompts_for(prompts, size, turn)]
                batch = {"name": f"{turn}/{size}/{arm}", "requests": requests, "temperature": temperature}
                engine = alone if arm == ALONE else stopping
                result = engine.served(batch | {"concurrency": size, "ignore_eos": True})
                if turn:
                    results[size, arm].append(result)
                times[size] = result.get("times") or times.get(size)
        if turn:
            yield {"turns": turn, "cells": [cell(size, results) for size in sizes], "times_s": times}


def prompts_for(prompts: list[dict[str, Any]], size: int, turn: int) -> list[dict[str, Any]]:
    """The prompts of a turn, the same for every arm."""
    count = max(REQUESTS_PER_ROW * size, _MIN_REQUESTS)
    return [prompts[(turn * count + index) % len(prompts)] for index in range(count)]


def cell(size: int, results: Mapping[tuple[int, str], list[dict[str, Any]]]) -> dict[str, Any]:
    """The arms at one concurrency. In a turn every arm generates equally many tokens, so ratios of seconds suffice.
    `results`: (concurrency, arm) -> result of `benchmarks.serve.engine` in each turn.
    """
    fixed = [arm for arm, spec in ARMS.items() if spec.startswith("fixed")]
    best = max(fixed, key=lambda arm: speed(results[size, arm]))
    base_turns = results[size, best]
    rows = {}
    for arm in (ALONE, *ARMS):
        turns = results[size, arm]
        gain = gain_of_turns(_each(base_turns, "cpu_seconds"), _each(turns, "cpu_seconds"))
        on_the_wall = gain_of_turns(_each(base_turns, "seconds"), _each(turns, "seconds"))
        rows[arm] = {
            "tokens_per_s": round(speed(turns), 1),
            "over_best_fixed": gain._asdict(),
            "on_the_wall": on_the_wall._asdict(),
            "mean_draft_length": round(float(np.mean([mean_draft_length(turn) for turn in turns])), 2),
        }
    return {"concurrency": size, "best_fixed": best, "level": 0.95, "arms": rows}


def _each(turns: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [turn[name] for turn in turns]


def mean_draft_length(turn: Mapping[str, Any]) -> float:
    """Mean draft length of a turn; 0 without drafts."""
    lengths = [drafted for answer in turn["answers"] for drafted, _ in answer["rounds"]]
    return sum(lengths) / max(len(lengths), 1)


def speed(turns: Sequence[Mapping[str, Any]]) -> float:
    """Tokens per CPU second of the engine's process, over all turns."""
    num_tokens = sum(NUM_TOKENS * len(turn["answers"]) for turn in turns)
    return num_tokens / sum(turn["cpu_seconds"] for turn in turns)


if __name__ == "__main__":
    run({"serve_clock": serve_clock}, default="serve_clock")

"""Tokens per second of a real vLLM: `VLLM_PYTHON=VENV/bin/python python -m benchmarks.serve.clock --head HEAD
[--turns 5] [--layers '[14,60]']`.

The embedded trio, slowed by added layers that change no output: a draft step takes about 10 ms and a verification
five times as long; both are measured. One engine speculates, with a policy per request; another does not. The arms
take turns, each serving the same prompts, EOS ignored, `--concurrency` at a time. HEAD: a drawn-time head that
`evaluation tune` has calibrated. The engine computes with one thread, and seconds are those of its process; wall time
is printed beside. After each turn one JSON document of all turns so far: tokens per second of each arm and concurrency
and its ratio to the best fixed length's, with a 90 % interval (by resampling turns).
"""

import json
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from benchmarks.serve.engine import MARK
from benchmarks.serve.loop import ROOT, TRIO, interpreter, pair_of_the_trio, requests_of
from configs import ModelSource
from configs.command import run
from evaluation.turns import in_turns
from lm import load_model

LONGEST, NUM_TOKENS, REQUESTS_PER_SEAT, ALONE = 20, 40, 2, "no speculation"
_FEWEST = 4  # requests of a turn, at least: one at a time differs by its prompts
ARMS = {
    **{f"fixed length {k}": f"fixed_length:k={k}" for k in (2, 4, 6, 10)},
    "SVIP": "entropy:max_sqrt_entropy=0.46",
    "product of token prob.": "cumulative_token_prob:min_token_prob=0.0474",
    "head, threshold": "head:head,max_rejection_prob=0.3",
    "auto": "head:head,max_rejection_prob=auto",
}


class EngineProcess:
    """One engine in a process of its own."""

    def __init__(self, python: str, job: dict[str, Any], path: Path) -> None:
        path.write_text(json.dumps(job))
        command = [python, "-m", "benchmarks.serve.engine", str(path)]
        self._log = path.with_suffix(".log").open("w+")
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, bufsize=1
        )
        self._result()

    def served(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The answers of a batch and the seconds that they took."""
        assert self._process.stdin is not None, "a pipe was asked for"
        self._process.stdin.write(json.dumps(batch) + "\n")
        return self._result()

    def _result(self) -> dict[str, Any]:
        assert self._process.stdout is not None, "a pipe was asked for"
        for line in self._process.stdout:
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))
        self._log.seek(0)
        raise SystemExit(f"vLLM has ended: {self._log.read()[-4000:]}")

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(60)


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
        turns: of every arm.
        layers: number of layers added to the draft and to the target.
        temperature: 0: every arm writes the same text, and only work differs.
        concurrency: requests at a time.
    """
    python = interpreter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        added = dict(zip(("draft", "target"), layers, strict=True))
        sources = {role: ModelSource(path=str(TRIO / role), dtype="float32") for role in added}
        models = {role: saved(sources[role], folder / role, num_layers=num) for role, num in added.items()}
        settings = {"policy": "fixed_length:k=2", "heads": {"head": head}, "allow_foreign_heads": True}
        arguments = {"max_num_seqs": max(concurrency)}
        job = {**models, "longest": LONGEST, "settings": settings, "arguments": arguments}
        stopping = EngineProcess(python, job, folder / "stopping.json")
        alone = EngineProcess(python, job | {"draft": None, "settings": None}, folder / "alone.json")
        try:
            for report in timed(stopping, alone, turns=turns, sizes=concurrency, temperature=temperature):
                print(json.dumps({"layers": layers, "temperature": temperature, **report}), flush=True)
        finally:
            stopping.close()
            alone.close()


def saved(source: ModelSource, folder: Path, *, num_layers: int = 0) -> str:
    """Save a model, with `num_layers` more layers whose outputs are zero, and its tokenizer as vLLM loads them."""
    model = load_model(source)
    for index in range(num_layers):
        layer = deepcopy(model.model.layers[index])
        for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
            projection.weight.data.zero_()
        model.model.layers.append(layer)
    model.config.get_text_config().num_hidden_layers += num_layers
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source.path).save_pretrained(folder)
    return str(folder)


Turns = Mapping[tuple[int, str], list[dict[str, Any]]]
"""(concurrency, arm) -> what the engine answered in each turn, as `benchmarks.serve.engine` has it."""


def timed(
    stopping: EngineProcess, alone: EngineProcess, *, turns: int, sizes: Sequence[int], temperature: float
) -> Iterator[dict[str, Any]]:
    """Time the two engines in turns and yield the summary after each turn; one turn before the first warms both up."""
    prompts, times = requests_of(pair_of_the_trio(), [""], 36), {}
    seen = defaultdict[tuple[int, str], list[dict[str, Any]]](list)
    for turn in range(turns + 1):
        arms = (ALONE, *ARMS) if turn else (ALONE, "auto")
        for size, order in in_turns(arms, sizes if turn else sizes[-1:], first=turn):
            for arm in order:
                how = {"policy": ARMS.get(arm), "max_tokens": NUM_TOKENS}
                requests = [prompt | how for prompt in prompts_for(prompts, size, turn)]
                batch = {"name": f"{turn}/{size}/{arm}", "requests": requests, "temperature": temperature}
                engine = alone if arm == ALONE else stopping
                result = engine.served(batch | {"concurrency": size, "ignore_eos": True})
                if turn:
                    seen[size, arm].append(result)
                times[size] = result.get("times") or times.get(size)
        if turn:
            yield {"turns": turn, "cells": [cell(size, seen) for size in sizes], "times_s": times}


def prompts_for(prompts: list[dict[str, Any]], size: int, turn: int) -> list[dict[str, Any]]:
    """The prompts of a turn: other ones in every turn, the same for every arm."""
    count = max(REQUESTS_PER_SEAT * size, _FEWEST)
    return [prompts[(turn * count + place) % len(prompts)] for place in range(count)]


def cell(size: int, seen: Turns) -> dict[str, Any]:
    """One concurrency. Every arm has written as many tokens in a turn, so that seconds alone differ."""
    fixed = [arm for arm, spec in ARMS.items() if spec.startswith("fixed")]
    best, rows, random = max(fixed, key=lambda arm: speed(seen[size, arm])), {}, np.random.default_rng(0)
    for arm in (ALONE, *ARMS):
        pairs = list(zip(seen[size, best], seen[size, arm], strict=True))
        seconds = np.array([[turn["cpu_seconds"] for turn in pair] for pair in pairs])
        resampled = seconds[random.integers(len(pairs), size=(2000, len(pairs)))].sum(1)
        low, high = np.quantile(resampled[:, 0] / resampled[:, 1], (0.05, 0.95)).tolist()
        gain = speed(seen[size, arm]) / speed(seen[size, best])
        on_the_wall = sum(base["seconds"] for base, _ in pairs) / sum(turn["seconds"] for _, turn in pairs)
        rows[arm] = {
            "tokens_per_s": round(speed(seen[size, arm]), 1),
            "over_best_fixed": [round(value, 3) for value in (gain, low, high)],
            "on_the_wall": round(on_the_wall, 3),
            "mean_draft_length": round(float(np.mean([mean_draft_length(turn) for _, turn in pairs])), 2),
        }
    return {"concurrency": size, "best_fixed": best, "arms": rows}


def mean_draft_length(turn: Mapping[str, Any]) -> float:
    """The mean length of a turn's drafts, 0 where there were none."""
    lengths = [drafted for answer in turn["answers"] for drafted, _ in answer["rounds"]]
    return sum(lengths) / max(len(lengths), 1)


def speed(turns: Sequence[Mapping[str, Any]]) -> float:
    """Tokens per CPU second of the engine's process, over these turns together."""
    num_tokens = sum(NUM_TOKENS * len(turn["answers"]) for turn in turns)
    return num_tokens / sum(turn["cpu_seconds"] for turn in turns)


if __name__ == "__main__":
    run({"serve_clock": serve_clock}, default="serve_clock")

"""The fastest `num_speculative_tokens` of vLLM: `VLLM_PYTHON=VENV/bin/python python -m benchmarks.serve.lengths
--config tiny [--lengths '[1,2,3,5,8]'] [--prompts 24]`.

One arm per length and one without speculation, each with its own engine; all run at the same time. Requests are greedy
and served one at a time; each test prompt goes to all arms in turn, and the report says whether their texts are equal.
Speeds are per CPU second of the engine's process, which has one thread; wall-clock speeds are reported too. Drafts and
accepted tokens come from vLLM's counters. The last line is one JSON document.

The arguments of `acceptance-heads flags --for vllm` follow from the same counters, which every server has. A step is a
round, or the processing of a prompt, which also gives a token and a draft; step(K) is its time with K drafted tokens.

    two numbers      t_target_ms = step(0);  t_draft_ms = (step(K) - step(0)) / K, which includes all costs of a round
    three numbers    t_draft_ms = (step(K) - step(k)) / (K - k);  t_target_ms = step(0) for one token, and
                     step(k) - k * t_draft_ms for more, which separates the fixed cost of speculation per round

The report's "flags" has both as arguments of the command, and "predicted_ms" the step time that three numbers predict.
"""

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.serve.clock import EngineProcess, saved
from benchmarks.serve.loop import interpreter
from configs.command import run
from configs.schema import Config
from decode.experiment import Experiment
from evaluation.gain import Throughput, gain_over
from evaluation.turns import in_turns

ALONE = 0  # the length of the arm without speculation
SMALL = {"max_num_seqs": 1, "block_size": 32, "num_gpu_blocks_override": 64}  # so that all engines fit into memory
LONGEST = 21  # tokens of the longest verification that flags considers
Runs = Mapping[int, Sequence["Run"]]
"""Length -> run on each prompt."""


class Run(NamedTuple):
    """The run of one arm on one prompt."""

    token_ids: tuple[int, ...]
    num_drafts: int
    num_accepted: int
    cpu_seconds: float
    seconds: float

    @property
    def num_steps(self) -> int:
        """Target forwards: one per token without speculation, else one per draft and one for the prompt."""
        return self.num_drafts + 1 if self.num_drafts else len(self.token_ids)


class Numbers(NamedTuple):
    """Times in milliseconds, from steps of three lengths."""

    alone_ms: float  # a step without speculation
    average_ms: float  # additional time of a step with K drafted tokens, per drafted token
    t_draft_ms: float  # each further drafted token
    round_ms: float  # a step with speculation, without its drafted tokens

    @classmethod
    def of(cls, steps: Mapping[int, float], few: int, many: int) -> "Numbers":
        """From the time of a step at each length."""
        t_draft_ms = (steps[many] - steps[few]) / (many - few)
        average_ms = (steps[many] - steps[ALONE]) / many
        return cls(steps[ALONE], average_ms, t_draft_ms, steps[few] - few * t_draft_ms)

    @property
    def two(self) -> str:
        return f"--t_draft_ms {self.average_ms:.3f} --t_target_ms {self.alone_ms:.3f}"

    @property
    def three(self) -> str:
        """The time of longer forwards is given twice, because values beyond the last are extrapolated."""
        by_tokens = f"1:{self.alone_ms:.3f},2:{self.round_ms:.3f},{LONGEST}:{self.round_ms:.3f}"
        return f"--t_draft_ms {self.t_draft_ms:.3f} --t_target_ms {by_tokens}"

    def predicted_ms(self, length: int) -> float:
        """Predicted time of a step of this length."""
        return self.round_ms + length * self.t_draft_ms if length else self.alone_ms


def serve_lengths(
    config: Config,
    *,
    lengths: tuple[int, ...] = (1, 2, 3, 5, 8),
    measured_at: tuple[int, int] = (2, 5),
    prompts: int = 24,
    max_tokens: int = 128,
) -> dict[str, Any]:
    """Serve every length in turns, prompt by prompt.

    Args:
        lengths: values of num_speculative_tokens.
        measured_at: k and K, two of the lengths.
        prompts: number of test prompts.
        max_tokens: maximum tokens of a response.
    """
    few, many = measured_at
    if not (few in lengths and many in lengths and few < many):
        raise ValueError(f"measured_at is {measured_at}; name two of the lengths {lengths}, the shorter one first")
    python, experiment = interpreter(), Experiment(config)
    ids = experiment.prompt_ids(next(iter(experiment.datasets)), "test", num=prompts)
    engines: dict[int, EngineProcess] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pair = {role: saved(getattr(config.pair, role), folder / role) for role in ("target", "draft")}
        try:
            for length in (ALONE, *lengths):
                drafts = {} if length else {"draft": None}
                job = {**pair, "longest": length, "settings": None, "arguments": SMALL} | drafts
                engines[length] = EngineProcess(python, job, folder / f"{length}.json")
            runs = timed(engines, ids, max_tokens)
        finally:
            for engine in engines.values():
                engine.close()
    report = summary(runs, measured_at)
    print(json.dumps(report))
    return report


def timed(engines: Mapping[int, EngineProcess], prompts: Sequence[Sequence[int]], max_tokens: int) -> Runs:
    """Run every engine on each prompt in turns, after one prompt for warm-up."""
    runs: dict[int, list[Run]] = {length: [] for length in engines}
    for length, engine in engines.items():
        run_prompt(engine, prompts[0], max_tokens, "warm")
        print(f"length {length}: ready", flush=True)
    for index, (prompt, order) in enumerate(in_turns(engines, prompts)):
        for length in order:
            runs[length].append(run_prompt(engines[length], prompt, max_tokens, str(index)))
    return runs


def run_prompt(engine: EngineProcess, prompt: Sequence[int], max_tokens: int, name: str) -> Run:
    request = {"prompt_ids": prompt, "policy": None, "max_tokens": max_tokens}
    result = engine.served({"name": name, "requests": [request]})
    counters = result["counters"]
    counts = (counters["spec_decode_num_drafts"], counters["spec_decode_num_accepted_tokens"])
    return Run(tuple(result["answers"][0]["token_ids"]), *counts, result["cpu_seconds"], result["seconds"])


def summary(runs: Runs, measured_at: tuple[int, int]) -> dict[str, Any]:
    """Arguments for flags, the fastest length by CPU time and by wall clock, and every arm."""
    numbers = Numbers.of({length: step_ms(arm) for length, arm in runs.items()}, *measured_at)
    cpu, wall = ({length: cost_of(arm, clock) for length, arm in runs.items()} for clock in ("cpu_seconds", "seconds"))
    best, best_on_the_wall = (max(arms, key=lambda length: arms[length].tokens_per_s) for arms in (cpu, wall))
    arms = {
        length: {
            "tokens_per_s": round(cpu[length].tokens_per_s, 1),
            "over_none": gain_over(cpu[ALONE], cpu[length]).text,
            "over_best": gain_over(cpu[best], cpu[length]).text,
            "tokens_per_s_on_the_wall": round(wall[length].tokens_per_s, 1),
            "over_best_on_the_wall": gain_over(wall[best_on_the_wall], wall[length]).text,
            "step_ms": round(step_ms(arm), 3),
            "predicted_ms": round(numbers.predicted_ms(length), 3),
            "acceptance_length": round(sum(len(run.token_ids) for run in arm) / sum(run.num_steps for run in arm), 3),
        }
        for length, arm in runs.items()
    }
    return {
        "flags": {"two numbers": numbers.two, "three numbers": numbers.three},
        "best": best,
        "best_on_the_wall": best_on_the_wall,
        "same_texts": all(len({run.token_ids for run in prompt}) == 1 for prompt in zip(*runs.values(), strict=True)),
        "arms": arms,
    }


def cost_of(arm: Sequence[Run], clock: str) -> Throughput:
    """Tokens and seconds of each prompt; `clock` is a field of `Run`."""
    return Throughput(np.array([len(run.token_ids) for run in arm]), np.array([getattr(run, clock) for run in arm]))


def step_ms(arm: Sequence[Run]) -> float:
    """CPU milliseconds of a step."""
    return 1000 * sum(run.cpu_seconds for run in arm) / sum(run.num_steps for run in arm)


if __name__ == "__main__":
    run({"serve_lengths": serve_lengths}, default="serve_lengths")

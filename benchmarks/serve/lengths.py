"""The best `num_speculative_tokens` of a real vLLM, on a clock: `VLLM_PYTHON=VENV/bin/python python -m
benchmarks.serve.lengths --config tiny [--lengths '[1,2,3,5,8]'] [--prompts 24]`.

One arm per length and one without speculation; each is an engine, because the length is set when an engine starts. All
serve one request at a time, greedily, so that every arm writes the same text, which is checked. The arms take turns on
each test prompt. Seconds are CPU seconds of the engine's process, which computes with one thread; wall time is printed
beside. Drafts and accepted tokens are vLLM's counters, which `acceptance-heads flags --for vllm` needs. A step is a
round or the reading of a prompt, which also ends in one token and a draft; step(K) is its time with K drafted tokens.
The last line is one JSON document.

    two numbers      t_target_ms = step(0);  t_draft_ms = (step(K) - step(0)) / K: all that a round costs more is in it
    three numbers    t_draft_ms = (step(K) - step(k)) / (K - k);  t_target_ms = step(0) for one token, and
                     step(k) - k * t_draft_ms for more, so that what speculation costs once a round is apart

"flags" holds both as arguments of the command; "predicted_ms" is the step time of an arm by the three numbers.
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
from evaluation.intervals import Spent, gain_over
from evaluation.turns import in_turns

ALONE = 0  # the length of the arm that does not speculate
SMALL = {"max_num_seqs": 1, "block_size": 32, "num_gpu_blocks_override": 64}  # so that all engines fit into memory
LONGEST = 21  # tokens of the longest verification that flags looks at
Seen = Mapping[int, Sequence["Answered"]]  # by length: what it spent on each prompt


class Answered(NamedTuple):
    """What one arm spent on one prompt."""

    token_ids: tuple[int, ...]
    num_drafts: int
    num_accepted: int
    cpu_seconds: float
    seconds: float

    @property
    def num_steps(self) -> int:
        """Target forwards: one for each token without drafts, else one for each draft and one for the prompt."""
        return self.num_drafts + 1 if self.num_drafts else len(self.token_ids)


class Numbers(NamedTuple):
    """Parameters of the time of a step, in milliseconds, from three measured steps."""

    alone_ms: float  # a step without speculation
    average_ms: float  # extra time of a step with K drafted tokens, per token
    t_draft_ms: float  # extra time per further drafted token
    round_ms: float  # a step that speculates, without its drafted tokens

    @classmethod
    def of(cls, steps: Mapping[int, float], few: int, many: int) -> "Numbers":
        """From the milliseconds of a step at each length."""
        t_draft_ms = (steps[many] - steps[few]) / (many - few)
        average_ms = (steps[many] - steps[ALONE]) / many
        return cls(steps[ALONE], average_ms, t_draft_ms, steps[few] - few * t_draft_ms)

    @property
    def two(self) -> str:
        return f"--t_draft_ms {self.average_ms:.3f} --t_target_ms {self.alone_ms:.3f}"

    @property
    def three(self) -> str:
        # round_ms twice: beyond its last entry the command extrapolates
        by_tokens = f"1:{self.alone_ms:.3f},2:{self.round_ms:.3f},{LONGEST}:{self.round_ms:.3f}"
        return f"--t_draft_ms {self.t_draft_ms:.3f} --t_target_ms {by_tokens}"

    def predicted_ms(self, length: int) -> float:
        """A step of this length."""
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
        prompts: test prompts.
        max_tokens: of a request.
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
            seen = timed(engines, ids, max_tokens)
        finally:
            for engine in engines.values():
                engine.close()
    report = summary(seen, measured_at)
    print(json.dumps(report))
    return report


def timed(engines: Mapping[int, EngineProcess], prompts: Sequence[Sequence[int]], max_tokens: int) -> Seen:
    """What every engine spent on each prompt, all of them in turns, after one prompt that warms them up."""
    seen: dict[int, list[Answered]] = {length: [] for length in engines}
    for length, engine in engines.items():
        answered(engine, prompts[0], max_tokens, "warm")
        print(f"length {length}: ready", flush=True)
    for index, (prompt, order) in enumerate(in_turns(engines, prompts)):
        for length in order:
            seen[length].append(answered(engines[length], prompt, max_tokens, str(index)))
    return seen


def answered(engine: EngineProcess, prompt: Sequence[int], max_tokens: int, name: str) -> Answered:
    """What the engine spent on one prompt."""
    request = {"prompt_ids": prompt, "policy": None, "max_tokens": max_tokens}
    result = engine.served({"name": name, "requests": [request]})
    counters = result["counters"]
    counts = (counters["spec_decode_num_drafts"], counters["spec_decode_num_accepted_tokens"])
    return Answered(tuple(result["answers"][0]["token_ids"]), *counts, result["cpu_seconds"], result["seconds"])


def summary(seen: Seen, measured_at: tuple[int, int]) -> dict[str, Any]:
    """The numbers that flags takes, the best length by either clock, and every arm."""
    numbers = Numbers.of({length: step_ms(each) for length, each in seen.items()}, *measured_at)
    cpu, wall = ({length: spent(each, clock) for length, each in seen.items()} for clock in ("cpu_seconds", "seconds"))
    best, best_on_the_wall = (max(arms, key=lambda length: arms[length].tokens_per_s) for arms in (cpu, wall))
    arms = {
        length: {
            "tokens_per_s": round(cpu[length].tokens_per_s, 1),
            "over_none": gain_over(cpu[ALONE], cpu[length]).text,
            "over_best": gain_over(cpu[best], cpu[length]).text,
            "tokens_per_s_on_the_wall": round(wall[length].tokens_per_s, 1),
            "over_best_on_the_wall": gain_over(wall[best_on_the_wall], wall[length]).text,
            "step_ms": round(step_ms(each), 3),
            "predicted_ms": round(numbers.predicted_ms(length), 3),
            "acceptance_length": round(sum(len(one.token_ids) for one in each) / sum(one.num_steps for one in each), 3),
        }
        for length, each in seen.items()
    }
    return {
        "flags": {"two numbers": numbers.two, "three numbers": numbers.three},
        "best": best,
        "best_on_the_wall": best_on_the_wall,
        "same_texts": all(len({one.token_ids for one in prompt}) == 1 for prompt in zip(*seen.values(), strict=True)),
        "arms": arms,
    }


def spent(each: Sequence[Answered], clock: str) -> Spent:
    """Tokens and seconds of each prompt by one of the clocks."""
    return Spent(np.array([len(one.token_ids) for one in each]), np.array([getattr(one, clock) for one in each]))


def step_ms(each: Sequence[Answered]) -> float:
    """CPU milliseconds of a step."""
    return 1000 * sum(one.cpu_seconds for one in each) / sum(one.num_steps for one in each)


if __name__ == "__main__":
    run({"serve_lengths": serve_lengths}, default="serve_lengths")

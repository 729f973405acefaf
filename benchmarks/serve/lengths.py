"""The best `num_speculative_tokens` of a real vLLM, on a clock: `VLLM_PYTHON=VENV/bin/python python -m
benchmarks.serve.lengths --config tiny [--lengths '[1,2,3,5,8]'] [--turns 2]`.

One arm per length and one that does not speculate, each an engine of its own (a length is set when it starts), one
request at a time, greedy, EOS ignored. In a turn every arm starts, serves one warm-up request and then the same test
prompts; the next turn begins with another arm and has other prompts. Of each arm the last line, one JSON document, has
tokens per second of the process's CPU time, which other work on the machine does not lengthen, and of the clock on the
wall; drafts and accepted tokens are vLLM's own counters.

Two numbers are what `acceptance-heads flags --for vllm` asks for, and both come from counters that every server has:

    t_target_ms    time of a step without speculation: one token
    t_draft_ms     (time of a step with K drafted tokens - t_target_ms) / K: what verifying K more tokens costs is in it

A step is a round, or the reading of a prompt, which ends with one token and a draft too. "predicted_ms" of an arm is
what the two numbers say of its step: t_target_ms + K * t_draft_ms.
"""

import json
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from benchmarks.serve.clock import EngineProcess, saved
from benchmarks.serve.loop import interpreter
from configs.command import run
from configs.schema import Config
from decode.experiment import Experiment
from evaluation.turns import in_turns

ALONE = 0
"""Length of the arm that does not speculate."""
CLOCKS = ("tokens_per_s", "tokens_per_s_on_the_wall")
Turns = Mapping[int, Sequence[Mapping[str, float]]]
"""Length -> what each turn came to: seconds, cpu_seconds, tokens, steps, drafts, accepted."""


def serve_lengths(
    config: Config,
    *,
    lengths: tuple[int, ...] = (1, 2, 3, 5, 8),
    measured_at: int = 5,
    turns: int = 2,
    prompts: int = 8,
    max_tokens: int = 96,
) -> dict[str, Any]:
    """Serve every length in turns.

    Args:
        config: the experiment, for its pair and its test prompts.
        lengths: values of num_speculative_tokens.
        measured_at: the length, among `lengths`, whose steps give t_draft_ms.
        turns: of every arm.
        prompts: requests of an arm in a turn.
        max_tokens: of a request.
    """
    if measured_at not in lengths:
        raise ValueError(f"measured_at is {measured_at}, and no arm has that length: lengths are {lengths}")
    python, experiment = interpreter(), Experiment(config)
    ids = experiment.prompt_ids(next(iter(experiment.datasets)), "test", num=turns * prompts)
    seen = defaultdict[int, list[Mapping[str, float]]](list)
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pair = {role: saved(getattr(config.pair, role), folder / role) for role in ("target", "draft")}
        for turn, order in in_turns((ALONE, *lengths), range(turns)):
            asked = list(islice(cycle(ids), turn * prompts, (turn + 1) * prompts))
            for length in order:
                job = pair | {"longest": length, "settings": None, "arguments": {"max_num_seqs": 1}, "batches": []}
                job["draft"] = pair["draft"] if length else None
                seen[length].append(served(python, job, asked, max_tokens, folder / "job.json"))
                print(json.dumps({"turn": turn, "length": length} | seen[length][-1]), flush=True)
            report = summary(seen, measured_at)
    print(json.dumps(report))
    return report


def served(
    python: str, job: Mapping[str, Any], prompts: Sequence[Sequence[int]], max_tokens: int, path: Path
) -> dict[str, float]:
    """Counts and seconds of one engine over these prompts, after one request that warms it up."""
    engine = EngineProcess(python, dict(job), path)
    try:
        engine.served(batch("warm", prompts[:1], max_tokens))
        result = engine.served(batch("timed", prompts, max_tokens))
    finally:
        engine.close()
    num_tokens = sum(len(answer["token_ids"]) for answer in result["answers"])
    counters, is_alone = result["counters"], job["draft"] is None
    num_drafts = counters["spec_decode_num_drafts"]
    return {
        "seconds": result["seconds"],
        "cpu_seconds": result["cpu_seconds"],
        "num_tokens": num_tokens,
        "num_steps": num_tokens if is_alone else num_drafts + len(prompts),
        "num_drafts": num_drafts,
        "num_accepted": counters["spec_decode_num_accepted_tokens"],
    }


def batch(name: str, prompts: Sequence[Sequence[int]], max_tokens: int) -> dict[str, Any]:
    """A batch as `benchmarks.serve.engine` takes it."""
    requests = [{"prompt_ids": ids, "policy": None, "max_tokens": max_tokens} for ids in prompts]
    return {"name": name, "requests": requests, "concurrency": 1, "ignore_eos": True}


def summary(seen: Turns, measured_at: int) -> dict[str, Any]:
    """Every arm, the two numbers, and the best length by either clock."""
    t_target_ms = step_ms(seen[ALONE])
    t_draft_ms = (step_ms(seen[measured_at]) - t_target_ms) / measured_at
    arms = {
        length: {
            "tokens_per_s": rate(turns, "num_tokens", "cpu_seconds"),
            "tokens_per_s_on_the_wall": rate(turns, "num_tokens", "seconds"),
            "of_each_turn": [rate([turn], "num_tokens", "cpu_seconds") for turn in turns],
            "step_ms": step_ms(turns),
            "predicted_ms": t_target_ms + length * t_draft_ms,
            "acceptance_length": 1 + rate(turns, "num_accepted", "num_drafts") if length else 1.0,
        }
        for length, turns in sorted(seen.items())
    }
    best = {clock: max(arms, key=lambda length: arms[length][clock]) for clock in CLOCKS}
    return {"t_target_ms": t_target_ms, "t_draft_ms": t_draft_ms, "best": best, "arms": arms}


def step_ms(turns: Sequence[Mapping[str, float]]) -> float:
    """CPU milliseconds of a step."""
    return 1000 * rate(turns, "cpu_seconds", "num_steps")


def rate(turns: Sequence[Mapping[str, float]], count: str, over: str) -> float:
    """The sum of one column over the sum of another."""
    return sum(turn[count] for turn in turns) / sum(turn[over] for turn in turns)


if __name__ == "__main__":
    run({"serve_lengths": serve_lengths}, default="serve_lengths")

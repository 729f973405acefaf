"""How long replay takes: 1,000 settings of each of four policies on 150 prompts of 200 tokens.

    python -m benchmarks.replay_speed [--settings 1000] [--prompts 150] [--tokens 200]

The trace is made up: acceptance and signals drawn at random, drafts up to 20 tokens; replay does not care where numbers
come from. One process, one thread. The last line is one JSON document.
"""

import json
import platform
from time import perf_counter

import numpy as np

from configs.command import run
from decode.policies import CumulativeTokenProb, FixedLength, HeadPolicy, Policy, SelfVerify
from decode.policies.auto import Auto
from decode.policies.bounds import PerfectHead
from evaluation.traces.replay import replay_settings
from evaluation.traces.trace import Trace, TraceRow
from lm import Sampling

LENGTH = 20


def made_up(num_prompts: int, num_tokens: int, *, seed: int = 0) -> Trace:
    """A trace whose tokens are easy or hard in runs, with a mean acceptance near 0.7."""
    generator = np.random.default_rng(seed)
    positions = num_prompts * num_tokens
    is_rejected = generator.random(positions) > generator.choice([0.45, 0.95], positions)
    room = np.tile(num_tokens - 1 - np.arange(num_tokens), num_prompts)[is_rejected]
    lengths = np.clip(room, 0, LENGTH)
    drafts = positions + int(lengths.sum())
    signals = {name: generator.random(drafts).astype(np.float32) for name in ("entropy", "max_prob", "acceptance_prob")}
    signals["log_token_prob"] = np.log(generator.uniform(0.2, 1, drafts)).astype(np.float32)
    rows = tuple(TraceRow(str(row), "", (0,), (0,) * num_tokens, num_tokens) for row in range(num_prompts))
    token = np.zeros(drafts, dtype=np.int32)
    rate = np.full(positions, 0.7, dtype=np.float32)
    return Trace(rows, Sampling(), LENGTH, token, token > 0, signals, is_rejected, rate, lengths)


def replay_speed(*, settings: int = 1000, prompts: int = 150, tokens: int = 200) -> None:
    """Seconds for each policy's whole grid."""
    trace = made_up(prompts, tokens)
    grid = np.linspace(0.001, 0.999, settings)
    policies: dict[str, Policy] = {
        "fixed_length": FixedLength(np.arange(settings) % (LENGTH + 1)),
        "cumulative_token_prob": CumulativeTokenProb(grid),
        "head": HeadPolicy(PerfectHead("drawn"), grid),  # type: ignore[arg-type]
        "self_verify": SelfVerify(grid),
        "auto": Auto(PerfectHead("drawn"), grid, 1.0),  # type: ignore[arg-type]
    }
    seconds = {}
    for name, policy in policies.items():
        started_s = perf_counter()
        counts = replay_settings(trace, policy).counts
        seconds[name] = perf_counter() - started_s
        drafted = counts.num_drafted.sum() / counts.num_emitted.sum()
        print(f"{name:<24} {seconds[name]:6.1f} s   {drafted:.2f} drafted per emitted token", flush=True)
    shape = {"settings": settings, "prompts": prompts, "tokens": tokens}
    print(
        json.dumps(
            {**shape, "seconds_s": seconds, "machine": platform.processor() or platform.machine(), "limit_s": 60}
        )
    )


if __name__ == "__main__":
    run({"replay_speed": replay_speed}, default="replay_speed")

"""What a trace costs, and what it saves: recording against one decoding run; one trace and 100 settings against 100
decoding runs.

    python -m benchmarks.trace_cost --config FILE [--prompts 8] [--settings 100]

All in one process, prompt by prompt in turns: a run with a fixed length at the trace's maximum draft length, five runs
at settings spread over the grid, and the recording of the same prompt (response, path, branches). The 100 decoding runs
are extrapolated from the five. The last line is one JSON document.
"""

import json
from collections import defaultdict
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch

from benchmarks.replay_exactness import decoder_of, traced
from configs.command import run
from configs.schema import Config
from data_gen.prompts.pool import load_prompts
from data_gen.prompts.templates import encode
from decode.policies import CumulativeTokenProb, FixedLength, Policy
from evaluation.traces.replay import replay_settings
from evaluation.traces.trace import Trace, join_traces
from lm import Sampling, load_pair

ARMS = ("record", "record_with_perfect_head", "fixed_length_run")


def trace_cost(config: Config, *, prompts: int = 8, settings: int = 100) -> None:
    """Recording, replay and decoding of the same prompts, in turns."""
    pair, sampling = load_pair(config.pair), Sampling(**vars(config.pair.sampling))
    found = load_prompts(replace(config.data, num_test=prompts), "test")
    ids = [encode(prompt, pair.tokenizer, config.data.template) for prompt in found]
    grid = np.linspace(0.02, 0.98, settings)
    policies: list[Policy] = [
        FixedLength(config.decode.max_draft_length),
        *map(CumulativeTokenProb, grid[:: settings // 5][:5].tolist()),
    ]
    decoders = [decoder_of(pair, policy, sampling, config) for policy in policies]
    generator = torch.Generator().manual_seed(0)
    decoders[0].generate(ids[0], 16, generator=generator)
    seconds: dict[str, list[float]] = defaultdict(list)
    parts: list[Trace] = []
    for start in range(0, prompts, 4):
        batch = ids[start : start + 4]
        for name, is_whole in (("record", False), ("record_with_perfect_head", True)):
            started_s = perf_counter()
            part = traced(pair, sampling, batch, config, seed=start, has_target_branches=is_whole)
            seconds[name].append((perf_counter() - started_s) / part.num_positions)
        parts.append(part)
        for place, decoder in enumerate(decoders):
            started_s = perf_counter()
            emitted = sum(
                decoder.generate(prompt, config.decode.max_new_tokens, generator=generator).counts.num_emitted
                for prompt in batch
            )
            seconds[f"run_{place}" if place else "fixed_length_run"].append((perf_counter() - started_s) / emitted)
    started_s = perf_counter()
    replay_settings(join_traces(parts), CumulativeTokenProb(grid))
    replay_s = (perf_counter() - started_s) / sum(part.num_positions for part in parts)
    _print(seconds, replay_s, settings=settings, prompts=prompts, num_runs=len(policies) - 1)


def _print(seconds: dict[str, list[float]], replay_s: float, **facts: int) -> None:
    """The two ratios, and one JSON document."""
    per_token = {name: median(seconds[name]) for name in ARMS}
    runs_s = facts["settings"] * float(
        np.mean([median(seconds[f"run_{place}"]) for place in range(1, facts["num_runs"] + 1)])
    )
    result: dict[str, Any] = {
        "recording_over_fixed_length_run": per_token["record"] / per_token["fixed_length_run"],
        "with_perfect_head_over_fixed_length_run": per_token["record_with_perfect_head"]
        / per_token["fixed_length_run"],
        "limit_recording": 1.5,
        "decoding_runs_over_trace_and_replay": runs_s / (per_token["record_with_perfect_head"] + replay_s),
        "limit_speed_up": 50,
    }
    for key in result:
        print(f"{key}: {result[key]:.2f}")
    result["per_emitted_token_s"] = per_token | {"replay_all_settings": replay_s, "decoding_runs": runs_s}
    print(json.dumps(result | facts | {"num_threads": torch.get_num_threads()}))


if __name__ == "__main__":
    run({"trace_cost": trace_cost}, default="trace_cost")

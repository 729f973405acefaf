"""What a trace costs, and what it saves: recording against one decoding run; one trace and 100 settings against 100 decoding runs.

    python -m tests.benchmarks.trace_cost --config FILE [--prompts 8] [--settings 100]

All in one process, prompt by prompt in turns: a run with a fixed length at the trace's maximum draft length, five runs at settings spread
over the grid, and the recording of the same prompt (response, path, branches). The 100 decoding runs are extrapolated from the five. The
last line is one JSON document.
"""

import json
from dataclasses import replace
from statistics import median
from time import perf_counter

import numpy as np
import torch

from configs.command import run
from configs.schema import Config
from data_gen.prompts import load_prompts
from data_gen.templates import encode
from decode import ModelDrafter, SpeculativeDecoder
from decode.policies import CumulativeTokenProb, FixedLength, Policy
from decode.replay import replay_settings
from decode.trace import Trace, join
from lm import Sampling, load_pair
from tests.benchmarks.replay_exactness import traced


def trace_cost(config: Config, *, prompts: int = 8, settings: int = 100) -> None:
    """Recording, replay and decoding of the same prompts, in turns."""
    pair, sampling = load_pair(config.pair), Sampling(**vars(config.pair.sampling))
    found = load_prompts(replace(config.data, num_test=prompts), "test")
    ids = [encode(prompt, pair.tokenizer, config.data.template) for prompt in found]
    batches = [ids[start : start + 4] for start in range(0, prompts, 4)]
    length = config.decode.max_draft_length
    grid = np.linspace(0.02, 0.98, settings)
    measured = grid[:: settings // 5][:5].tolist()
    policies: list[Policy] = [FixedLength(length), *map(CumulativeTokenProb, measured)]
    decoders = [
        SpeculativeDecoder(
            pair.target,
            ModelDrafter(pair.draft, policy, vocab_size=pair.vocab_size),
            sampling=sampling,
            max_draft_length=length,
            eos_ids=pair.eos_ids,
            vocab_size=pair.vocab_size,
        )
        for policy in policies
    ]
    generator = torch.Generator().manual_seed(0)
    decoders[0].generate(batches[0][0], 16, generator=generator)
    per_token: list[list[float]] = [[] for _ in decoders]
    recording: list[float] = []
    parts: list[Trace] = []
    for index, batch in enumerate(batches):
        started_s = perf_counter()
        parts.append(traced(pair, sampling, batch, config, seed=index))
        recording.append((perf_counter() - started_s) / parts[-1].num_positions)
        for times, decoder in zip(per_token, decoders, strict=True):
            started_s = perf_counter()
            emitted = sum(decoder.generate(ids, config.decode.max_new_tokens, generator=generator).counts.num_emitted for ids in batch)
            times.append((perf_counter() - started_s) / emitted)
    started_s = perf_counter()
    replay_settings(join(parts), CumulativeTokenProb(grid))
    replay_s = (perf_counter() - started_s) / sum(part.num_positions for part in parts)
    fixed_s, record_s = median(per_token[0]), median(recording)
    runs_s = settings * float(np.mean([median(times) for times in per_token[1:]]))
    result = {
        "recording_over_fixed_length_run": record_s / fixed_s,
        "limit_recording": 1.5,
        "decoding_runs_over_trace_and_replay": runs_s / (record_s + replay_s),
        "limit_speed_up": 50,
        "per_emitted_token_s": {"record": record_s, "replay_all_settings": replay_s, "fixed_length_run": fixed_s, "decoding_runs": runs_s},
        "settings": settings,
        "decoding_runs_measured": len(policies) - 1,
        "prompts": prompts,
        "num_threads": torch.get_num_threads(),
    }
    for key in ("recording_over_fixed_length_run", "decoding_runs_over_trace_and_replay"):
        print(f"{key}: {result[key]:.2f}")
    print(json.dumps(result))


if __name__ == "__main__":
    run({"trace_cost": trace_cost}, default="trace_cost")

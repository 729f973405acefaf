"""Replay against real decoding on a real pair: eleven policies, paired by prompt.

    python -m benchmarks.replay_exactness --config FILE [--prompts 20] [--copies 8]

Each prompt gets `copies` responses in a trace and one real decoding per policy; the z-score of N_draft and of N_target
is that of the sum over prompts of (decoded - mean of the copies). With Z scores the probability that any exceeds 4 by
chance is Z * 6.3e-5. At temperature 0 counts must be equal prompt by prompt; the number of prompts that differ is
printed (rounding of batched forwards can flip an argmax). The last line is one JSON document.
"""

import json
from dataclasses import replace

import numpy as np
import torch

from configs.command import run
from configs.schema import Config
from data_gen.prompts.pool import load_prompts
from data_gen.prompts.templates import encode
from data_gen.responses.exchange import Exchange, Request, Response
from data_gen.responses.in_process import TargetInProcess
from decode import SpeculativeDecoder
from decode.drafters.factory import PairModels
from decode.experiment import Experiment
from decode.policies import (
    AdaEDL,
    CumulativeTokenProb,
    Entropy,
    FixedLength,
    HeadPolicy,
    Heuristic,
    MaxProb,
    Policy,
    SelfVerify,
    TokenProb,
)
from evaluation.traces.coupling import Recorder
from evaluation.traces.recording import record_trace
from evaluation.traces.replay import replay_settings
from evaluation.traces.trace import Trace
from lm import Pair, Sampling, load_pair

LIMIT = 4.0


def compared_policies(config: Config) -> dict[str, Policy]:
    """Bounded, stateful and head policies."""
    heads = {head.timing: head for head in Experiment(config).heads.values()}
    named: dict[str, Policy] = {
        "fixed_length": FixedLength(4),
        "heuristic": Heuristic(5),
        "token_prob": TokenProb(0.4),
        "cumulative_token_prob": CumulativeTokenProb(0.2),
        "max_prob": MaxProb(0.5),
        "entropy": Entropy(0.5),
        "self_verify": SelfVerify(),
        "ada_edl": AdaEDL(0.2),
    }
    named |= {f"{timing}_head": HeadPolicy(head, 0.5) for timing, head in heads.items()}
    if len(heads) == 2:
        named["both_heads"] = HeadPolicy(heads["fed"], 0.5, also=heads["drawn"], is_calibrated=True)
    return named


def decoder_of(pair: Pair, policy: Policy, sampling: Sampling, config: Config) -> SpeculativeDecoder:
    """The real loop of a pair under one policy and one sampling."""
    models = PairModels(pair)
    return models.decoder(models.drafter(policy), sampling=sampling, max_draft_length=config.decode.max_draft_length)


def traced(
    pair: Pair,
    sampling: Sampling,
    prompts: list[list[int]],
    config: Config,
    *,
    seed: int,
    has_target_branches: bool = False,
) -> Trace:
    """One response to each of `prompts`, as a trace; with target branches, for the bound of the perfect head too."""
    source = TargetInProcess(
        pair.target,
        sampling,
        vocab_size=pair.vocab_size,
        eos_ids=pair.eos_ids,
        max_new_tokens=config.decode.max_new_tokens,
        batch_size=32,
    )
    answers = source.respond([Request(str(i), "", ids) for i, ids in enumerate(prompts)], seed, lambda count: None)
    exchanges = [
        Exchange(str(i), "", ids, answer.response_ids, answer.finish_reason)
        for i, (ids, answer) in enumerate(zip(prompts, answers, strict=True))
        if isinstance(answer, Response)
    ]
    length = config.decode.max_draft_length
    recorder = Recorder(
        pair.draft,
        pair.target,
        sampling,
        pair.vocab_size,
        pair.eos_ids,
        length,
        has_target_branches=has_target_branches,
    )
    return record_trace(recorder, exchanges, max_new_tokens=config.decode.max_new_tokens, seed=seed + 1)


def replay_exactness(config: Config, *, prompts: int = 20, copies: int = 8, seed: int = 0) -> None:
    """z-scores at the config's sampling, and differences at temperature 0."""
    pair, sampling = load_pair(config.pair), Sampling(**vars(config.pair.sampling))
    found = load_prompts(replace(config.data, num_test=prompts), "test")
    ids = [encode(prompt, pair.tokenizer, config.data.template) for prompt in found]
    policies = compared_policies(config)
    warm = traced(pair, sampling, ids * copies, config, seed=seed)
    cold = traced(pair, Sampling(temperature=0), ids, config, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    scores: dict[str, dict[str, float]] = {}
    differing: dict[str, int] = {}
    for name, policy in policies.items():
        replayed, greedy = replay_settings(warm, policy).counts, replay_settings(cold, policy).counts
        scores[name] = {}
        decoders = [decoder_of(pair, policy, drawn_by, config) for drawn_by in (sampling, Sampling(temperature=0))]
        real = [
            decoders[0].generate(prompt, config.decode.max_new_tokens, generator=generator).counts for prompt in ids
        ]
        exact = [decoders[1].generate(prompt, config.decode.max_new_tokens).counts for prompt in ids]
        for quantity in ("num_drafted", "num_target"):
            of = getattr(replayed, quantity)[0].reshape(copies, len(ids)).astype(float)
            decoded = np.array([getattr(counts, quantity) for counts in real], dtype=float)
            spread = (of.var(axis=0, ddof=1) * (1 + 1 / copies)).sum()
            scores[name][quantity] = float((decoded - of.mean(axis=0)).sum() / np.sqrt(max(spread, 1e-9)))
        drafted, rounds = greedy.num_drafted[0].tolist(), greedy.num_target[0].tolist()
        real_counts = [(counts.num_drafted, counts.num_target) for counts in exact]
        differing[name] = sum(
            ours != theirs for ours, theirs in zip(zip(drafted, rounds, strict=True), real_counts, strict=True)
        )
        shown = ", ".join(f"{quantity} z = {z:+.2f}" for quantity, z in scores[name].items())
        print(f"{name:<24} {shown}; temperature 0: {differing[name]} of {len(ids)} prompts differ", flush=True)
    highest = max(abs(z) for of_policy in scores.values() for z in of_policy.values())
    num_scores = sum(map(len, scores.values()))
    print(
        json.dumps(
            {
                "z": scores,
                "highest": highest,
                "limit": LIMIT,
                "false_alarm": num_scores * 6.3e-5,
                "greedy_differing": differing,
            }
        )
    )
    assert highest < LIMIT, f"a z-score of {highest:.2f}: replay and decoding differ"


if __name__ == "__main__":
    run({"replay_exactness": replay_exactness}, default="replay_exactness")

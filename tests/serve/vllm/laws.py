"""The embedded pair, heads that requests may name, and whether tokens have the target's law."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from scipy.stats import kstest
from torch import Tensor

from decode import ModelDrafter, SpeculativeDecoder
from decode.policies.registry import parse_policy
from heads import AcceptanceHead
from lm import Pair, Sampling

_RECOMMENDED = {"t_draft_s": 0.001, "t_target_s": 0.005, "next_mean": 0.85}
_RECOMMENDED |= {"index_offset": 0.2, "index_slope": 0.7, "first_index": 0.8}


def random_heads(pair: Pair, folder: Path) -> dict[str, str]:
    """Names and directories of heads with random weights: one of each timing, and one that `auto` can use."""
    torch.manual_seed(0)
    for timing in ("fed", "drawn"):
        head = AcceptanceHead(pair.draft.config.hidden_size, 1, timing, True, True)  # type: ignore[arg-type]
        for parameter in head.parameters():
            torch.nn.init.normal_(parameter, std=0.05)
        torch.nn.init.constant_(head.out.bias, 2.0)
        head.save_pretrained(folder / timing)
    # as `evaluation tune` would leave it; a server measures its own times
    head.provenance = replace(head.provenance, recommended=_RECOMMENDED)
    head.save_pretrained(folder / "tuned")
    return {name: str(folder / name) for name in ("fed", "drawn", "tuned")}


def decoded(pair: Pair, heads: dict[str, str], request: dict[str, Any], longest: int) -> dict[str, Any]:
    """The answer of our own loop: the first token comes from the target alone, as vLLM's does."""
    policy = parse_policy(request["policy"], load_head=lambda name: AcceptanceHead.from_pretrained(heads[name]))

    def loop(longest: int) -> SpeculativeDecoder:
        drafter = ModelDrafter(pair.draft, policy, vocab_size=pair.vocab_size)
        how = {"sampling": Sampling(temperature=0.0), "max_draft_length": longest, "eos_ids": pair.eos_ids}
        return SpeculativeDecoder(pair.target, drafter, **how)

    first = list(loop(0).generate(request["prompt_ids"], 1).token_ids)
    if first[-1] in pair.eos_ids:
        return {"token_ids": first, "rounds": []}
    generation = loop(longest).generate([*request["prompt_ids"], *first], request["max_tokens"] - 1)
    rounds = [[len(one.drafted), one.num_accepted] for one in generation.rounds]
    return {"token_ids": [*first, *generation.token_ids], "rounds": rounds}


@torch.inference_mode()
def law_of(pair: Pair, prompts: list[list[int]], answers: list[list[int]], sampling: Sampling) -> tuple[float, float]:
    """(p-value, z) of answers against the exact law.

    The p-value (Kolmogorov-Smirnov) is that of F(x - 1) + U p(x) of every token x under the target, tokens in
    descending order of p: uniform iff the law is right. z is that of the sum of log p(x) against its mean under p;
    infinite if a token is impossible.
    """
    generator = torch.Generator().manual_seed(0)
    columns = [_tokens(pair, *texts, sampling, generator) for texts in zip(prompts, answers, strict=True)]
    transform, surprise, variance = torch.cat(columns, dim=1)
    z = float(surprise.sum() / variance.sum().sqrt())
    return float(kstest(transform.numpy(), "uniform").pvalue), z


def _tokens(
    pair: Pair, prompt_ids: list[int], token_ids: list[int], sampling: Sampling, generator: torch.Generator
) -> Float[Tensor, "3 token"]:
    """The transform of each token, log p(x) less its mean, and the variance of log p(x), both under p."""
    logits = pair.target(torch.tensor([prompt_ids + token_ids])).logits[0, len(prompt_ids) - 1 : -1, : pair.vocab_size]
    probs, order = sampling.probs(logits, torch.float64).sort(descending=True, stable=True)
    rank = (order == torch.tensor(token_ids).unsqueeze(-1)).long().argmax(-1, keepdim=True)
    prob = probs.gather(-1, rank)
    uniform = torch.rand(rank.shape, generator=generator, dtype=torch.float64)
    logs = probs.clamp_min(1e-300).log()
    mean, square = (probs * logs).sum(-1), (probs * logs.square()).sum(-1)
    transform = probs.cumsum(-1).gather(-1, rank) - prob + uniform * prob
    surprise = prob.log() - mean.unsqueeze(-1)
    return torch.stack([transform.flatten(), surprise.flatten(), square - mean.square()])

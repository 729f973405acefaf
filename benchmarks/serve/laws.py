"""Whether what was written has the target's law.

transform   F(x - 1) + U p(x) of every token x under the target, tokens in the order of p, the likeliest first: uniform
            iff the law is right
            (Kolmogorov-Smirnov), and small where unlikely tokens were dropped
z           of the sum of log p(x) against what it comes to on average under p
"""

from typing import Any

import torch
from jaxtyping import Float
from scipy.stats import kstest
from torch import Tensor

from lm import Pair, Sampling


@torch.inference_mode()
def law_of(
    pair: Pair, requests: list[dict[str, Any]], answers: list[dict[str, Any]], sampling: Sampling
) -> dict[str, Any]:
    """Compare all answers with the exact law: {"tokens", "ks_p", "z", "num_impossible" (tokens that the law never
    gives)}.
    """
    generator = torch.Generator().manual_seed(0)
    seen = [
        _tokens(pair, request["prompt_ids"], answer["token_ids"], sampling, generator)
        for request, answer in zip(requests, answers, strict=True)
    ]
    transform, surprise, variance = torch.cat(seen, dim=1)
    possible = surprise.isfinite()
    return {
        "tokens": len(transform),
        "ks_p": float(kstest(transform.numpy(), "uniform").pvalue),
        "z": float(surprise[possible].sum() / variance[possible].sum().sqrt()),
        "num_impossible": int((~possible).sum()),
    }


def _tokens(
    pair: Pair, prompt_ids: list[int], token_ids: list[int], sampling: Sampling, generator: torch.Generator
) -> Float[Tensor, "3 token"]:
    """The transform of each token, log p(x) less its mean, and the variance of log p(x), both under p."""
    logits = pair.target(torch.tensor([prompt_ids + token_ids])).logits[0, len(prompt_ids) - 1 : -1, : pair.vocab_size]
    probs, order = sampling.probs(logits, torch.float64).sort(descending=True, stable=True)
    chosen = (order == torch.tensor(token_ids).unsqueeze(-1)).long().argmax(-1, keepdim=True)
    prob_of_chosen = probs.gather(-1, chosen)
    uniform = torch.rand(chosen.shape, generator=generator, dtype=torch.float64)
    logs = probs.clamp_min(1e-300).log()
    mean, square = (probs * logs).sum(-1), (probs * logs.square()).sum(-1)
    transform = probs.cumsum(-1).gather(-1, chosen) - prob_of_chosen + uniform * prob_of_chosen
    surprise = prob_of_chosen.log() - mean.unsqueeze(-1)
    return torch.stack([transform.flatten(), surprise.flatten(), square - mean.square()])


def drafted_of(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """How much was drafted for them: rounds and acceptance length."""
    rounds = [round_ for answer in answers for round_ in answer["rounds"]]
    return {
        "rounds": len(rounds),
        "acceptance_length": 1 + sum(num_accepted for _, num_accepted in rounds) / max(len(rounds), 1),
    }

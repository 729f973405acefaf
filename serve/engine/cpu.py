"""Two faults of vLLM's CPU build that speculation meets, mended in the process that serves, in the releases of
`conditions.TRIED` alone.

expand_batch_to_tokens    its kernel writes into a copy, so that sampled verification reads temperature, top-k and top-p
                          from memory that nobody wrote: the output has another law than the target's
apply_top_k_only          asks for the largest k of no rows where a step verifies no drafts, which ends the engine
"""

from functools import wraps
from typing import Any

import torch
from torch import Tensor


def mend() -> None:
    """Replace both; a second call changes nothing."""
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.sample.ops import topk_topp_sampler

    rejection_sampler.expand_batch_to_tokens = expanded
    if not hasattr(topk_topp_sampler.apply_top_k_only, "__wrapped__"):
        topk_topp_sampler.apply_top_k_only = _of_rows(topk_topp_sampler.apply_top_k_only)


def expanded(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: float | int = 0, replace_to: float | int = 0
) -> Tensor:
    """Each number of a batch as often as its request has tokens: [a, b] and ends [2, 3] give [a, a, b].

    Args:
        x: a number for each request.
        cu_num_tokens: the place where each request's tokens end.
        num_tokens: the number of tokens of all requests.
        replace_from: a number of x that is replaced.
        replace_to: the number that takes its place.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).long()
    return x.masked_fill(x == replace_from, replace_to).repeat_interleave(counts, output_size=num_tokens)


def _of_rows(apply: Any) -> Any:
    """A function that leaves logits of no rows alone, and does what `apply` does with others."""

    @wraps(apply)
    def applied(logits: Tensor, k: Tensor) -> Tensor:
        return apply(logits, k) if len(logits) else logits

    return applied

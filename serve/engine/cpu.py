"""Fixes for two bugs of vLLM's CPU build, in the releases of `plugin.TRIED`.

expand_batch_to_tokens    its kernel writes into a copy, so sampled verification reads temperature, top-k and top-p from
                          uninitialised memory, and the output distribution differs from the target's
apply_top_k_only          takes the maximum k of zero rows if a step verifies no drafts, which crashes the engine
"""

from collections.abc import Callable
from functools import wraps

import torch
from torch import Tensor

TopK = Callable[[Tensor, Tensor], Tensor]
"""Logits, and k of each row, to logits."""


def mend() -> None:
    """Replace both functions; idempotent."""
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.sample.ops import topk_topp_sampler

    rejection_sampler.expand_batch_to_tokens = repeated_per_token
    if not hasattr(topk_topp_sampler.apply_top_k_only, "__wrapped__"):
        topk_topp_sampler.apply_top_k_only = _of_rows(topk_topp_sampler.apply_top_k_only)


def repeated_per_token(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: float | int = 0, replace_to: float | int = 0
) -> Tensor:
    """Repeat each request's number once per token, with one value replaced: [a, b] and ends [2, 3] give [a, a, b]."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).long()
    return x.masked_fill(x == replace_from, replace_to).repeat_interleave(counts, output_size=num_tokens)


def _of_rows(apply: TopK) -> TopK:
    @wraps(apply)
    def applied(logits: Tensor, k: Tensor) -> Tensor:
        return apply(logits, k) if len(logits) else logits

    return applied

"""Whether this CPU multiplies in a model's dtype, or torch emulates that, which takes many times as long."""

import sys
from functools import cache
from itertools import pairwise
from time import perf_counter

import torch
from torch import nn

_NUM_TOKENS, _WIDTH = 32, 1024
_MIN_TOLD = 3.0
"""Seconds over those of float32 from which on it is told; where there is arithmetic for a dtype it is below 1."""


def tell_emulated(model: nn.Module, path: str) -> None:
    """Say on stderr that a model on a CPU is slow because of its dtype; once for each path.

    Args:
        model: the model, loaded.
        path: where it comes from.
    """
    on_cpu = {weight.dtype for weight in model.parameters() if weight.device.type == "cpu"}
    for dtype in on_cpu & {torch.bfloat16, torch.float16}:
        _tell(path, dtype)


@cache
def _tell(path: str, dtype: torch.dtype) -> None:
    if (ratio := seconds_over_float32(dtype)) >= _MIN_TOLD:
        print(
            f"{path}: this CPU has no arithmetic for {str(dtype).removeprefix('torch.')}: reading many tokens at once, "
            f"as prompts, data and verification do, takes some {ratio:.0f} times as long as with dtype: float32",
            file=sys.stderr,
            flush=True,
        )


@cache
def seconds_over_float32(dtype: torch.dtype) -> float:
    """Seconds of one layer over some tokens in a dtype over those in float32, on this CPU."""
    seconds = {}
    for kind in (torch.float32, dtype):
        tokens, weight = torch.ones(_NUM_TOKENS, _WIDTH, dtype=kind), torch.ones(_WIDTH, _WIDTH, dtype=kind)
        begun = []
        for _ in range(5):
            begun.append(perf_counter())
            nn.functional.linear(tokens, weight)
        begun.append(perf_counter())
        seconds[kind] = min(after - before for before, after in pairwise(begun))
    return seconds[dtype] / seconds[torch.float32]

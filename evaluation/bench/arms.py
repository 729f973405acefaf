"""Arms: ways of writing the same number of tokens, which take turns on every prompt.

EOS is switched off in all, and a time is wall clock around a whole generation, prompt included. Every arm of the loop
starts a prompt from the same seed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch

from decode.loop.decoder import SpeculativeDecoder

Timed = Callable[[list[int], int], float]
"""Generates from a prompt and a seed, and says the seconds that it took."""


class Racer(NamedTuple):
    """One competitor."""

    family: str
    setting: str
    timed: Timed
    is_foreign: bool = False
    """Its head was trained under another sampling."""
    on_dev: float | None = None
    """Tokens per second that were predicted when dev chose its setting."""


def generations_of(decoder: SpeculativeDecoder, num_tokens: int) -> Timed:
    """Generations of a decoder, timed."""

    def seconds_of(prompt: list[int], seed: int) -> float:
        generator = torch.Generator().manual_seed(seed)
        started_s = perf_counter()
        decoder.generate(prompt, num_tokens, generator=generator)
        return perf_counter() - started_s

    return seconds_of


def turns(
    arms: Mapping[str, Timed], prompts: Sequence[list[int]], *, has_warm_up: bool = True
) -> Iterator[dict[str, float]]:
    """Seconds of every arm on each prompt in turn, as soon as a prompt is done; one unmeasured turn first."""
    for timed in arms.values() if has_warm_up else ():
        timed(prompts[0], len(prompts))
    for seed, prompt in enumerate(prompts):
        yield {name: timed(prompt, seed) for name, timed in arms.items()}


def timed_in_turns(arms: Mapping[str, Timed], prompts: Sequence[list[int]]) -> dict[str, list[float]]:
    """All turns."""
    rows = list(turns(arms, prompts))
    return {name: [row[name] for row in rows] for name in arms}


def median_ratio(slower: Sequence[float], faster: Sequence[float]) -> float:
    """How many times as fast, the median over prompts: a machine whose speed drifts slows both arms of a prompt
    alike.
    """
    return median(slow / fast for slow, fast in zip(slower, faster, strict=True))

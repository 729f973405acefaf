"""Arms: ways of writing the same number of tokens, which take turns on every prompt.

EOS is switched off in all, and a time is wall clock around a whole generation, prompt included. Every arm of the loop
starts a prompt from the same seed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from time import perf_counter
from typing import NamedTuple

import torch

from decode.loop.decoder import SpeculativeDecoder
from decode.policies.base import Policy
from evaluation.turns import in_turns
from heads.model.head import AcceptanceHead
from lm import Sampling

Timed = Callable[[list[int], int], float]
"""Generates from a prompt and a seed, and says the seconds that it took."""


class Racer(NamedTuple):
    """A family at one setting, which takes part in the race."""

    family: str
    setting: str
    policy: Policy | None = None
    """Policy that the loop runs; None: transformers has a schedule of its own."""
    on_dev: float | None = None
    """Tokens per second that were predicted when dev chose the setting; unknown of a policy that was named."""

    def is_foreign(self, sampling: Sampling) -> bool:
        """Was one of its heads trained under another sampling?"""
        heads = self.policy.heads if self.policy else ()
        known = [head.provenance.sampling for head in heads if isinstance(head, AcceptanceHead)]
        return any(trained_under and trained_under != sampling.as_dict() for trained_under in known)


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
    for seed, (prompt, order) in enumerate(in_turns(arms, prompts)):
        seconds = {name: arms[name](prompt, seed) for name in order}
        yield {name: seconds[name] for name in arms}


def timed_in_turns(arms: Mapping[str, Timed], prompts: Sequence[list[int]]) -> dict[str, list[float]]:
    """Seconds of every arm on every prompt, the arms in turns."""
    rows = list(turns(arms, prompts))
    return {name: [row[name] for row in rows] for name in arms}

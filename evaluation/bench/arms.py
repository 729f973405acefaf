"""Arms: ways of answering the same prompts, which take turns on each.

EOS is switched off in all, so that they write the same number of tokens, unless they are told to end there. A time is
wall clock around a whole generation, prompt included. Every arm of the loop starts a prompt from the same seed.
"""

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import NamedTuple

import torch

from decode.loop.decoder import SpeculativeDecoder
from decode.policies.base import Policy
from heads.model.head import AcceptanceHead
from lm import Sampling


class Written(NamedTuple):
    """What a generation wrote, and how long it took."""

    tokens: int
    seconds: float


Timed = Callable[[list[int], int], Written]
"""Generates from a prompt and a seed."""


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

    def written(prompt: list[int], seed: int) -> Written:
        generator = torch.Generator().manual_seed(seed)
        started_s = perf_counter()
        generation = decoder.generate(prompt, num_tokens, generator=generator)
        return Written(len(generation.token_ids), perf_counter() - started_s)

    return written


def warm_up(arms: Mapping[str, Timed], prompts: Sequence[list[int]]) -> None:
    """One turn that is not measured."""
    for timed in arms.values():
        timed(prompts[0], len(prompts))

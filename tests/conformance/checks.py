"""What holds of a family that is exact: its speculative output is what plain `generate` gives, token by token, and nothing is refused
that it would say itself.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from decode.loop.decoder import SpeculativeDecoder
from decode.loop.drafter import ModelDrafter
from decode.policies.length import FixedLength
from lm import CachedModel, Sampling
from tests.conformance.families import VOCAB_SIZE, WINDOW, Family, build

DRAFT_LENGTH = 3


class Case(NamedTuple):
    """One generation."""

    num_prompt_tokens: int
    num_new_tokens: int


CASES = (Case(WINDOW - 4, 14), Case(2 * WINDOW - 2, 6))
"""Across the window's edge, and beyond it from the start (a window that slides twice, a second chunk)."""


def refusal_of(model: PreTrainedModel, kind: Callable[..., CachedModel]) -> str | None:
    """Why `kind` does not take the model; None where it does."""
    try:
        kind(model)
    except ValueError as error:
        return str(error)
    return None


def assert_exact(model: PreTrainedModel, kind: Callable[..., CachedModel], cases: Sequence[Case] = CASES) -> None:
    """Greedy with many rejections and with none, and sampled with none."""
    target, itself = kind(model), CachedModel(model)
    for case in cases:
        prompt = _prompt(case.num_prompt_tokens)
        expected = plain(model, prompt, case.num_new_tokens)
        for draft, is_itself in ((CachedModel(stranger()), False), (itself, True)):
            decoder = _decoder(target, draft, Sampling(temperature=0.0))
            generation = decoder.generate(prompt, case.num_new_tokens)
            assert list(generation.token_ids) == expected, f"{case}: {list(generation.token_ids)} is not {expected}"
            counts = generation.counts
            is_accepted = counts.num_accepted == counts.num_drafted
            assert is_accepted == is_itself, f"{case}: {counts.num_accepted} of {counts.num_drafted} drafted tokens accepted"
        sampled = _decoder(target, itself, Sampling()).generate(prompt, case.num_new_tokens, generator=torch.Generator().manual_seed(1))
        assert sampled.counts.num_accepted == sampled.counts.num_drafted, f"{case}: a sampled token of its own was rejected"


def plain(model: PreTrainedModel, prompt: list[int], num_new_tokens: int, **settings: object) -> list[int]:
    """What `generate` says after the prompt, greedily."""
    ids = torch.tensor([prompt])
    made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_new_tokens, do_sample=False, **settings)
    return made[0, len(prompt) :].tolist()


@cache
def stranger() -> PreTrainedModel:
    """A draft that agrees with a target by chance."""
    return build(Family("llama", "full", {}), seed=7)


def _decoder(target: CachedModel, draft: CachedModel, sampling: Sampling) -> SpeculativeDecoder:
    return SpeculativeDecoder(target, ModelDrafter(draft, FixedLength(DRAFT_LENGTH)), sampling=sampling, eos_ids=frozenset())


def _prompt(length: int) -> list[int]:
    return torch.randint(3, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(length)).tolist()

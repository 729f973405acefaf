"""What holds of a family that is exact: its speculative output is what plain `generate` gives, token by token, and
nothing is refused that it would say itself; through the decoder, and inside `generate`.
"""

from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from decode import speculative_generate
from decode.loop.decoder import SpeculativeDecoder
from decode.loop.drafter import ModelDrafter
from decode.policies.plain import FixedLength
from lm import CachedModel, Sampling
from tests.conformance.families import VOCAB_SIZE, WINDOW, Family, build


class Case(NamedTuple):
    """One text."""

    num_prompt_tokens: int
    num_new_tokens: int
    draft_length: int


LONG_DRAFT_LENGTH = 20
SHORT = (Case(WINDOW - 4, 14, 3), Case(2 * WINDOW - 2, 6, 3))
"""Across the window's edge, and beyond it from the start (a window that slides twice, a second chunk)."""
LONG = (Case(3, 147, LONG_DRAFT_LENGTH), Case(75, 75, LONG_DRAFT_LENGTH))
"""From hardly a prompt, and from the middle of the text."""
CASES = SHORT + LONG
NUM_GENERATIONS = 3
"""The generations of a case: greedy with another draft, greedy with itself, sampled with itself."""


_NUM_WATCHED, _MOST_AGREEMENT = 70, 0.95
"""A relative says something else at one of twenty of a text's last tokens."""


def refusal_of(model: PreTrainedModel) -> str | None:
    """Why a `CachedModel` refuses the model; None if it does not."""
    try:
        CachedModel(model)
    except ValueError as error:
        return str(error)
    return None


def assert_exact(model: PreTrainedModel, cases: Sequence[Case] = CASES) -> None:
    """Greedy with rejections and with none, and sampled with none."""
    target, itself = CachedModel(model), CachedModel(model)
    for case in cases:
        prompt = prompt_of(case)
        expected = plain(model, prompt, case.num_new_tokens)
        # of a stranger's 20 tokens all but a few are thrown away; a relative's may be wrong anywhere
        other = CachedModel(relative(model, prompt + expected) if case in LONG else stranger())
        for draft, is_itself in ((other, False), (itself, True)):
            decoder = _decoder(target, draft, Sampling(temperature=0.0), case)
            generation = decoder.generate(prompt, case.num_new_tokens)
            assert list(generation.token_ids) == expected, f"{case}: {list(generation.token_ids)} is not {expected}"
            drafted, accepted = generation.counts.num_drafted, generation.counts.num_accepted
            assert (accepted == drafted) == is_itself, f"{case}: {accepted} of {drafted} drafted tokens accepted"
        decoder = _decoder(target, itself, Sampling(), case)
        counts = decoder.generate(prompt, case.num_new_tokens, generator=torch.Generator().manual_seed(1)).counts
        assert counts.num_accepted == counts.num_drafted, f"{case}: a sampled token of its own was rejected"


def assert_exact_in_transformers(model: PreTrainedModel, cases: Sequence[Case] = CASES) -> None:
    """The same through `generate`."""
    for case in cases:
        prompt = prompt_of(case)
        expected = plain(model, prompt, case.num_new_tokens)
        for draft in (relative(model, prompt + expected), model):
            ours = plain(model, prompt, case.num_new_tokens, **_custom(draft, case))
            assert ours == expected, f"{case}, speculative_generate: {ours} is not {expected}"
        settings = {"generator": torch.Generator().manual_seed(1), "return_dict_in_generate": True, "do_sample": True}
        settings |= _custom(model, case) | {"max_new_tokens": case.num_new_tokens}
        counts = model.generate(torch.tensor([prompt]), **settings).generation.counts
        is_accepted = counts.num_accepted == counts.num_drafted
        assert is_accepted, f"{case}, speculative_generate: a sampled token of its own was rejected"


def plain(model: PreTrainedModel, prompt: list[int], num_new_tokens: int, **settings: object) -> list[int]:
    """What `generate` says after the prompt, greedily."""
    ids = torch.tensor([prompt])
    settings |= {"attention_mask": torch.ones_like(ids), "max_new_tokens": num_new_tokens, "do_sample": False}
    return model.generate(ids, **settings)[0, len(prompt) :].tolist()


@cache
def stranger() -> PreTrainedModel:
    """A draft that agrees with a target by chance."""
    return build(Family("llama", "full", {}), seed=7)


def relative(model: PreTrainedModel, text: Sequence[int]) -> PreTrainedModel:
    """The target with just enough noise to say something else along the text; a stranger, where none is enough."""
    ids = torch.tensor([text])
    with torch.no_grad():
        said = model(ids).logits.argmax(-1)
        for noise in (0.003, 0.03, 0.3):
            draft = deepcopy(model)
            generator = torch.Generator().manual_seed(3)
            for parameter in draft.parameters():
                if parameter.dim() > 1:
                    parameter.data += noise * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            is_same = draft(ids).logits.argmax(-1) == said
            if is_same[0, -_NUM_WATCHED:].float().mean() < _MOST_AGREEMENT:
                return draft
    return stranger()


def prompt_of(case: Case) -> list[int]:
    length = case.num_prompt_tokens
    return torch.randint(3, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def _custom(draft: PreTrainedModel, case: Case) -> dict[str, Any]:
    """What turns `generate` into `speculative_generate`."""
    return {"custom_generate": speculative_generate, "draft_model": draft, "policy": FixedLength(case.draft_length)}


def _decoder(target: CachedModel, draft: CachedModel, sampling: Sampling, case: Case) -> SpeculativeDecoder:
    drafter = ModelDrafter(draft, FixedLength(case.draft_length))
    return SpeculativeDecoder(target, drafter, sampling=sampling, eos_ids=frozenset())

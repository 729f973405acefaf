"""`speculative_generate` refuses a head that was trained for something else, unless it is told to take it (law 4.1)."""

from typing import Any

import pytest
import torch

from decode import speculative_generate
from decode.policies import HeadPolicy
from heads import AcceptanceHead, Provenance
from tests.toys.random_pairs import random_pair

TRAINED = {"temperature": 1.0, "top_k": None, "top_p": None}


def generated(provenance: Provenance, **settings: Any) -> torch.Tensor:
    target, draft = random_pair("llama")
    head = AcceptanceHead(16, 1, "drawn", True, provenance=provenance)
    given = {
        "custom_generate": speculative_generate,
        "draft_model": draft,
        "policy": HeadPolicy(head),
        "max_new_tokens": 4,
    }
    return target.generate(torch.tensor([[3, 1, 4]]), **given | settings)


def test_a_head_of_another_sampling_is_refused():
    with pytest.raises(ValueError, match=r"trained for sampling .*'temperature': 1.0.* allow_foreign_heads"):
        generated(Provenance(sampling=TRAINED), do_sample=False)
    with pytest.raises(ValueError, match="'top_k': 50"):
        generated(Provenance(sampling=TRAINED), do_sample=True)


def test_a_head_of_another_draft_is_refused():
    with pytest.raises(ValueError, match="the draft"):
        generated(Provenance(draft={"name": "another", "hidden_size": 24}), do_sample=False)


def test_a_head_that_fits_or_says_nothing_or_is_allowed_passes():
    assert generated(Provenance(sampling=TRAINED), do_sample=True, top_k=0).shape[1] > 3
    assert generated(Provenance(), do_sample=False).shape[1] > 3
    assert generated(Provenance(sampling=TRAINED), do_sample=False, allow_foreign_heads=True).shape[1] > 3

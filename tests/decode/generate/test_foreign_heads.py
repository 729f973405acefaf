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
    given = {"draft_model": draft, "policy": HeadPolicy(head), "max_new_tokens": 4}
    return target.generate(torch.tensor([[3, 1, 4]]), custom_generate=speculative_generate, **given | settings)


@pytest.mark.parametrize(
    ("provenance", "settings", "problem"),
    [
        (
            {"sampling": TRAINED},
            {"do_sample": False},
            r"trained for sampling .*'temperature': 1.0.* allow_foreign_heads",
        ),
        ({"sampling": TRAINED}, {"do_sample": True}, "'top_k': 50"),
        ({"draft": {"name": "another", "hidden_size": 24}}, {"do_sample": False}, "the draft"),
        ({"sampling": TRAINED}, {"do_sample": True, "top_k": 0}, None),
        ({}, {"do_sample": False}, None),
        ({"sampling": TRAINED}, {"do_sample": False, "allow_foreign_heads": True}, None),
    ],
)
def test_a_head_that_was_trained_for_something_else_is_refused_unless_it_is_allowed(provenance, settings, problem):
    if problem is None:
        assert generated(Provenance(**provenance), **settings).shape[1] > 3
    else:
        with pytest.raises(ValueError, match=problem):
            generated(Provenance(**provenance), **settings)

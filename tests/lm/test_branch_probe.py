"""A trace is recorded only with models whose branches, fed side by side, are what they are on their own."""

import pytest
import torch

from lm.batch import check_branch_length, check_branches
from lm.masks import BranchMask
from tests.conformance.families import FAMILIES, build

BY_NAME = {family.name: family for family in FAMILIES}


@pytest.mark.parametrize(
    "name", ["llama (tied)", "gpt2 (learned positions)", "gpt_neox (partial rotary)", "mixtral (experts)", "qwen3"]
)
def test_branches_of_full_attention_are_what_they_are_alone(name):
    model = build(BY_NAME[name])
    check_branches(model)
    check_branch_length(model, 100, num_prompt=4)


@pytest.mark.parametrize("name", ["bloom (ALiBi)", "mpt (ALiBi)", "mamba", "lfm2"])
def test_a_family_whose_branches_would_be_wrong_is_refused_with_one_line(name):
    with pytest.raises(ValueError, match="no trace can be recorded with") as refusal:
        check_branches(build(BY_NAME[name]))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ["mistral", "gemma3_text", "cohere2", "llama4_text"])
def test_a_window_shorter_than_a_response_is_refused(name):
    model = build(BY_NAME[name])
    check_branches(model)
    check_branch_length(model, 8, num_prompt=4)
    with pytest.raises(ValueError, match="sees 8 tokens"):
        check_branch_length(model, 9, num_prompt=4)


def test_a_branch_sees_the_text_before_its_root_and_its_own_earlier_tokens():
    branching = BranchMask(5, torch.tensor([2, 4]))
    positions, seen = branching.feed(torch.tensor([0, 1]), torch.tensor([0, 0]))
    assert positions.tolist() == [2, 4]
    assert seen.int().tolist() == [[1, 1, 0, 0, 0, 1, 0], [1, 1, 1, 1, 0, 0, 1]]
    positions, seen = branching.feed(torch.tensor([0]), branching.lengths(torch.tensor([0])))
    assert positions.tolist() == [3]
    assert seen.int().tolist() == [[1, 1, 0, 0, 0, 1, 0, 1]]

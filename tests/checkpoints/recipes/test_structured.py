"""Prompts whose answers are JSON."""

from collections import Counter

import pytest

from checkpoints.recipes.structured import structured, structured_prompts
from configs.schema import PromptSource
from data_gen.prompts.listed import listed_splits
from data_gen.prompts.sets import load, set_of


def test_prompts_differ_have_both_categories_and_follow_from_the_seed():
    prompts = structured_prompts(600)
    assert prompts == structured_prompts(600) != structured_prompts(600, seed=1)
    assert prompts[:40] == structured_prompts(40)
    assert len({prompt["instruction"] for prompt in prompts}) == 600
    assert Counter(prompt["category"] for prompt in prompts) == {"extraction": 300, "function call": 300}
    assert not [prompt for prompt in prompts if "{few}" in prompt["instruction"] or "{name}" in prompt["instruction"]]


def test_a_function_call_is_of_one_of_the_functions_that_it_offers():
    for prompt in structured_prompts(100):
        if prompt["category"] == "function call":
            offered = [line for line in prompt["instruction"].splitlines() if line.startswith("- ")]
            assert len(set(offered)) == 3


def test_no_prompt_of_training_or_dev_has_the_record_or_the_function_of_an_unseen_one(tmp_path):
    path = tmp_path / "structured.jsonl"
    structured(out=str(path), num=200, num_unseen=40)
    prompts = load(set_of(PromptSource(path=str(path))))
    listed = listed_splits(str(path.with_suffix(".splits.json")), ("train", "dev", "test"))
    assert Counter(listed.values()) == {"test": 80, "dev": 20}
    unseen = {prompt.id for prompt in prompts if prompt.category.startswith("unseen ")}
    assert len(unseen) == 40 and {listed[prompt_id] for prompt_id in unseen} == {"test"}
    marks = ("months_owned", "minutes_down", "Pay ", "this is critical")
    for prompt in prompts:
        request = prompt.turns[0].rpartition("Request: ")[2]
        assert any(mark in request for mark in marks) == (prompt.id in unseen)


@pytest.mark.parametrize("num_unseen", [-1, 90])
def test_too_many_unseen_prompts_are_refused(num_unseen):
    with pytest.raises(ValueError, match="give at most 44 % of --num, which is 200"):
        structured_prompts(200, num_unseen=num_unseen)


def test_the_file_is_read_as_a_prompt_set_with_categories(tmp_path, capsys):
    path = tmp_path / "deep" / "structured.jsonl"
    structured(out=str(path), num=20)
    assert "20 prompts" in capsys.readouterr().out
    prompts = load(set_of(PromptSource(path=str(path))))
    assert sorted(prompt.category for prompt in prompts) == ["extraction"] * 10 + ["function call"] * 10

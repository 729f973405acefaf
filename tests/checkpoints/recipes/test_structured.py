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


def test_a_function_call_is_of_one_of_three_functions():
    for prompt in structured_prompts(100)[1::2]:
        assert len({line for line in prompt["instruction"].splitlines() if line.startswith("- ")}) == 3


def test_only_test_prompts_have_a_record_or_a_function_of_the_unseen_ones(tmp_path):
    path = tmp_path / "structured.jsonl"
    structured(out=str(path), num=200, num_unseen=40)
    listed = listed_splits(str(path.with_suffix(".splits.json")), ("train", "dev", "test"))
    assert Counter(listed.values()) == {"test": 80, "dev": 20}
    for number, prompt in enumerate(load(set_of(PromptSource(path=str(path))))):
        request = prompt.turns[0].rpartition("Request: ")[2]
        is_unseen = any(mark in request for mark in ("months_owned", "minutes_down", "Pay ", "this is critical"))
        assert is_unseen == prompt.category.startswith("unseen ") == (number >= 160)
        assert not is_unseen or listed[prompt.id] == "test"
    with pytest.raises(ValueError, match="give at most 44 % of --num, which is 200"):
        structured_prompts(200, num_unseen=90)


def test_the_file_is_read_as_a_prompt_set_with_categories(tmp_path, capsys):
    path = tmp_path / "deep" / "structured.jsonl"
    structured(out=str(path), num=20)
    assert "20 prompts" in capsys.readouterr().out
    prompts = load(set_of(PromptSource(path=str(path))))
    assert sorted(prompt.category for prompt in prompts) == ["extraction"] * 10 + ["function call"] * 10

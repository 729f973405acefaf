"""Laws of the story problems: splits never meet, sequences repeat, every equation holds, and no text changes."""

import hashlib
import operator
import re

from data_gen.prompts.stories import _WORDS, KINDS, split_of, stories

SPLITS = ("train", "dev", "test")
SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
STORIES = [story for split in SPLITS for story in stories(split, 700, seed=3)]
"""Enough for every kind to come up dozens of times."""


def test_splits_are_disjoint_whatever_the_seed():
    for split in SPLITS:  # a prompt has one split
        for seed in range(4):
            assert {split_of(story.prompt) for story in stories(split, 300, seed=seed)} == {split}


def test_a_longer_run_begins_with_the_shorter_one_and_no_prompt_and_no_id_repeats_within_one():
    assert stories("dev", 50, seed=1) == stories("dev", 80, seed=1)[:50]
    assert stories("dev", 50, seed=1) != stories("dev", 50, seed=2)
    many = stories("train", 4000)
    assert len({story.id for story in many}) == len({story.prompt for story in many}) == 4000
    assert {story.kind for story in STORIES} == set(KINDS)


def test_every_equation_in_an_answer_holds():
    num_checked = 0
    for story in STORIES:
        for x, sign, y, result in re.findall(r"(\d+) ([-+*]) (\d+) = (\d+)", story.answer):
            assert SIGNS[sign](int(x), int(y)) == int(result), story
            num_checked += 1
        assert story.answer.count("=") == len(re.findall(r"\d+ [-+*] \d+ = \d+\.", story.answer)), story
    assert num_checked > 2000


def test_every_number_of_the_last_line_is_worked_out_before_and_no_text_has_changed():
    """The embedded models were trained on these texts."""
    for story in STORIES:
        work, _, last = story.answer.rpartition("\n")
        assert last.startswith("Answer: ")
        if story.kind != "count":
            assert set(re.findall(r"\d+", last)) <= set(re.findall(r"\d+", work)), story
    texts = "".join(repr((story.id, story.prompt, story.answer, story.kind)) for story in STORIES)
    digest = "2a79779059f101ddf1727112b6e5dc1fdfd17322c3c7ef3fba413e0a8c0b3dea"
    assert hashlib.sha256(texts.encode()).hexdigest() == digest


def test_one_word_decides_between_the_phrases_of_a_bank():
    for bank in ("openings", "closings", "item_leads", "gain_reasons", "loss_reasons", "group_reasons"):
        assert len({phrase.split()[0] for phrase in _WORDS[bank]}) == len(_WORDS[bank])

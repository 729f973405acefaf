"""Laws of the story problems: splits never meet, sequences repeat, and every worked answer is right."""

import operator
import re

import pytest

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
    with pytest.raises(ValueError, match="at least 0"):
        stories("dev", -1)


def test_every_equation_in_an_answer_holds():
    num_checked = 0
    for story in STORIES:
        for x, sign, y, result in re.findall(r"(\d+) ([-+*]) (\d+) = (\d+)", story.answer):
            assert SIGNS[sign](int(x), int(y)) == int(result), story
            num_checked += 1
        assert story.answer.count("=") == len(re.findall(r"\d+ [-+*] \d+ = \d+\.", story.answer)), story
    assert num_checked > 2000


def test_the_last_line_solves_the_prompt_and_every_number_of_it_is_worked_out_before():
    for story in STORIES:
        work, _, last = story.answer.rpartition("\n")
        assert last == f"Answer: {SOLVERS[story.kind](story.prompt)}", story
        if story.kind != "count":
            assert set(re.findall(r"\d+", last)) <= set(re.findall(r"\d+", work)), story


def test_one_word_decides_between_the_phrases_of_a_bank():
    for bank in ("openings", "closings", "item_leads", "gain_reasons", "loss_reasons", "group_reasons"):
        assert len({phrase.split()[0] for phrase in _WORDS[bank]}) == len(_WORDS[bank])


def listed(prompt: str) -> list[str]:
    """The items after the colon."""
    return re.split(", ", prompt.split(": ")[1].rstrip(".?"))


def solve_story(prompt: str) -> str:
    total, *changes = map(int, re.findall(r"\d+", prompt))
    thing = re.search(r"has \d+ (\w+)\.", prompt)[1]
    events = re.findall(r"(\w+(?: \w+)?) \d+", prompt.split(". ", 1)[1])
    for event, change in zip(events, changes, strict=True):
        total += -change if re.search("gives away|loses|sells|lends out|breaks|throws away", event) else change
    return f"{total} {thing}"


def solve_receipt(prompt: str) -> str:
    prices = {thing: int(price) for thing, price in re.findall(r"(\w+) cost (\d+)", prompt)}
    bought = re.findall(r"(\d+) (\w+)", prompt.split("buys ")[1])
    return f"{sum(int(number) * prices[thing] for number, thing in bought)} coins"


def solve_stock(prompt: str) -> str:
    held = {thing: int(number) for number, thing in re.findall(r"(\d+) (\w+)", prompt)}
    if wanted := re.search(r"How many (\w+) and (\w+)", prompt):
        return str(held[wanted[1]] + held[wanted[2]])
    wanted = re.search(r"numbers of (\w+) and (\w+)", prompt)
    return str(abs(held[wanted[1]] - held[wanted[2]]))


def solve_sums(prompt: str) -> str:
    return ", ".join(str(SIGNS[sign](int(x), int(y))) for x, sign, y in re.findall(r"(\d+) ([-+*]) (\d+)", prompt))


def solve_sort(prompt: str) -> str:
    items = listed(prompt)
    return ", ".join(sorted(items, key=lambda item: (int(item), "") if item.isdigit() else (0, item)))


def solve_copy(prompt: str) -> str:
    return ", ".join(reversed(listed(prompt)) if "from the last" in prompt else listed(prompt))


def solve_count(prompt: str) -> str:
    wanted = re.search(r"word (\w+) in", prompt)[1]
    return f"{listed(prompt).count(wanted)} times"


def solve_compare(prompt: str) -> str:
    held = {name: int(number) for name, number in re.findall(r"(\w+) has (\d+)", prompt)}
    most, second, _ = sorted(held.values(), reverse=True)
    return f"{max(held, key=held.__getitem__)}, {most - second} more"


def solve_convert(prompt: str) -> str:
    smaller, number, unit, extra = re.search(r"many (\w+) are (\d+) (\w+) and (\d+)", prompt).groups()
    seconds = {"seconds": 1, "minutes": 60, "hours": 3600, "days": 86400, "weeks": 604800}
    ratio = {"dozens": 12, "feet": 12, "years": 12, "meters": 100}.get(unit) or seconds[unit] // seconds[smaller]
    return f"{int(number) * ratio + int(extra)} {smaller}"


SOLVERS = {
    name.removeprefix("solve_"): function for name, function in list(globals().items()) if name.startswith("solve_")
}

"""Competitors take turns on every prompt, and each of them is first as often as any other."""

from collections import Counter

from evaluation.turns import in_turns


def test_another_competitor_begins_on_every_prompt():
    assert list(in_turns("abc", [7, 8])) == [(7, ("a", "b", "c")), (8, ("b", "c", "a"))]


def test_over_as_many_repeats_as_competitors_each_is_as_often_at_every_place():
    orders = [order for repeat in range(3) for _, order in in_turns("abc", range(5), first=repeat)]
    assert {count for place in zip(*orders, strict=True) for count in Counter(place).values()} == {5}

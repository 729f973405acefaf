"""A loop of two small random models."""

import pytest

from evaluation.costs.measure import Loop
from lm import Pair, Sampling
from tests.toys.random_pairs import random_pair
from tests.toys.small_pair import Words


@pytest.fixture(scope="module")
def loop() -> Loop:
    pair = Pair(*random_pair("llama"), None, Words())
    return Loop(pair=pair, prompts=[[5, 6, 7], [9, 8]], sampling=Sampling(), max_draft_length=4, max_new_tokens=24)

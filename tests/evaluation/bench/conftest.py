"""The pair of these tests."""

import pytest

from lm import Pair
from tests.toys.small_pair import Words, model


@pytest.fixture
def pair() -> Pair:
    return Pair(model(1, 2), model(2), None, Words())

"""Costs are timed as briefly as they can be."""

from math import inf

import pytest

from lm import Pair
from tests.toys.small_pair import Words, model


@pytest.fixture(autouse=True, scope="session")
def fewest_turns():
    """No test reads how long a stop takes, beyond a bound that the fewest turns keep; so errors may be large."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("stops", "measure"):
            patch.setattr(f"evaluation.costs.{module}.BUDGET_S", 0.0)
        patch.setattr("evaluation.costs.stability.LARGEST_ERROR", inf)
        patch.setattr("evaluation.costs.stability.SMALLEST_SHARE", 0.0)
        yield


@pytest.fixture
def pair() -> Pair:
    return Pair(model(1, 2), model(2), None, Words())

"""Cases of which `make test` runs a few: where many prove one statement of the same code."""

from collections.abc import Iterable
from typing import Any

import pytest


def first_fast(cases: Iterable[Any], num: int = 2) -> list[Any]:
    """The cases, all but the first `num` of them slow."""
    rest = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*case, marks=[pytest.mark.slow] * (index >= num)) for index, case in enumerate(rest)]

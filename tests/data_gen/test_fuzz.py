"""A quick selection of `benchmarks.fuzz`: what users write, broken in some ways, is read or refused in a line that
names the file.
"""

import pytest

from benchmarks.boundaries import texts
from benchmarks.breakage import fuzz_boundary


@pytest.mark.parametrize("number", range(4))
def test_broken_texts_are_refused_by_name(toy_config, tmp_path, number: int):
    boundary = texts(tmp_path, toy_config)[number]
    counts = fuzz_boundary(boundary, 60, seed=number)
    assert counts["refused"] > 8, boundary.name
    assert counts["failures"] == {}, boundary.name

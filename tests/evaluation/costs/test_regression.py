"""Fits of seconds against an independent reference."""

import numpy as np
import pytest
from scipy.optimize import nnls

from evaluation.regression import non_negative


@pytest.mark.parametrize("num_columns", [1, 2, 4])
def test_non_negative_least_squares_are_those_of_scipy(num_columns):
    generator = np.random.default_rng(0)
    num_zeros = 0
    for _ in range(50):
        columns = generator.random((12, num_columns))
        seconds = columns @ generator.normal(0.3, 1.0, num_columns) + generator.normal(0.0, 0.1, 12)
        expected, _ = nnls(columns, seconds)
        num_zeros += int((expected == 0).sum())
        np.testing.assert_allclose(non_negative(columns, seconds), expected, atol=1e-12)
    assert num_zeros > 10

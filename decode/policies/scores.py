"""The loop calls sigmoid once or twice per drafted token, on a float, where array functions cost ten times as much."""

import math

import numpy as np
from scipy.special import expit

from decode.policies.base import Number

_LOWEST = -700.0
"""exp of its negative is still a float."""


def sigmoid(logit: Number) -> Number:
    """1 / (1 + exp(-logit)), of a float or elementwise of an array; 1 at +inf."""
    if isinstance(logit, np.ndarray):
        return expit(logit)
    return 1.0 / (1.0 + math.exp(-max(logit, _LOWEST)))

"""Heads that learn during generation (law 4.14): a calibration that each round's verification refits.

A logistic regression on three inputs follows the acceptance probabilities that verification reveals:

    a = sigmoid(w . x)        x = (1, f, l)        f: the head's calibrated logit
                                                   l: logit of q(y); with a prefix head of max q

It starts at w = (0, 1, 0), which is the head's own calibration, with a Gaussian prior there. Each round is one Newton
step (Laplace's approximation) over the tokens that it revealed; earlier rounds lose weight by `memory` per round:

    P <- P0 + memory (P - P0) + sum a (1 - a) x x'          w <- w + P^-1 (sum (p - a) x - (1 - memory) P0 (w - w0))

where p = min(1, p(y) / q(y)), a label far less noisy than whether the token was accepted.
"""

from math import exp, log
from typing import Any, NamedTuple

import numpy as np
from scipy.special import expit

from decode.policies.base import Number, State

# inputs are clipped to +- this, so that no single token dominates the fit
_LARGEST = 8.0
_LEAST_PROB = 1.0 / (1.0 + exp(_LARGEST))
# exp of its negative is still a float
_LOWEST = -700.0
# standard deviation of each weight under the prior
_SD = 0.35
# decay of a round's weight per later round
_MEMORY = 0.98
# w0, the weights that are the head's own calibration
_CENTRE = 0.0, 1.0, 0.0
# P0, in the order of `Learned.precision`
_PRIOR = _SD**-2, 0.0, 0.0, _SD**-2, 0.0, _SD**-2


class Learned(NamedTuple):
    """Learned state of a generation."""

    weights: tuple[Number, Number, Number]
    """w: of the constant 1, of the head's logit f, of the token's own logit l."""
    precision: tuple[Number, ...]
    """P, the upper half of the regression's precision matrix, row by row: 11, 1f, 1l, ff, fl, ll."""


FIRST = Learned(_CENTRE, _PRIOR)
"""The state before the first round."""
NOTHING = (0.0,) * 3, (0.0,) * 6
"""Feedback of no token: the gradient, sum of (p - a) x over tokens, and the curvature, sum of a (1 - a) x x'."""


def learned_from(before: Any, feedback: State) -> State:
    """The state after a round; unchanged if the policy takes no feedback."""
    if not feedback:
        return before
    gradient, curvature = feedback
    grown = tuple(p0 + _MEMORY * (p - p0) + h for p0, p, h in zip(_PRIOR, before.precision, curvature, strict=True))
    pull = (1.0 - _MEMORY) * _PRIOR[0]
    steps = _solved(grown, *(g - pull * (w - w0) for g, w, w0 in zip(gradient, before.weights, _CENTRE, strict=True)))
    shift, slope, token = (w + step for w, step in zip(before.weights, steps, strict=True))
    return Learned((shift, slope, token), grown)


def score_of(weights: tuple[Number, Number, Number], inputs: tuple[Number, Number]) -> Number:
    """a, the acceptance probability that the regression gives a token with the inputs (f, l)."""
    shift, slope, token = weights
    return sigmoid(shift + slope * inputs[0] + token * inputs[1])


def token_feedback(weights: tuple[Number, Number, Number], inputs: tuple[Number, Number], prob: Number) -> State:
    """Feedback of one token, whose acceptance probability is `prob`."""
    f, token = inputs
    score = score_of(weights, inputs)
    error = prob - score
    v = score * (1.0 - score)
    vf = v * f
    vl = v * token
    return (error, error * f, error * token), (v, vf, vl, vf * f, vf * token, vl * token)


def clip(value: Number) -> Number:
    """The number within +- _LARGEST."""
    if type(value) is float:  # the loop's is one, on which array functions cost ten times as much
        return min(max(value, -_LARGEST), _LARGEST)
    return np.clip(value, -_LARGEST, _LARGEST)


def logit_of(prob: Number) -> Number:
    """log(p / (1 - p)), clipped."""
    if type(prob) is float:
        prob = min(max(prob, _LEAST_PROB), 1.0 - _LEAST_PROB)
        return log(prob / (1.0 - prob))
    prob = np.clip(prob, _LEAST_PROB, 1.0 - _LEAST_PROB)
    return np.log(prob / (1.0 - prob))


def _solved(matrix: tuple[Number, ...], a: Number, b: Number, c: Number) -> tuple[Number, Number, Number]:
    """matrix^-1 (a, b, c), by cofactors."""
    m00, m01, m02, m11, m12, m22 = matrix
    c00 = m11 * m22 - m12 * m12
    c01 = m02 * m12 - m01 * m22
    c02 = m01 * m12 - m02 * m11
    c11 = m00 * m22 - m02 * m02
    c12 = m01 * m02 - m00 * m12
    c22 = m00 * m11 - m01 * m01
    determinant = m00 * c00 + m01 * c01 + m02 * c02
    return (
        (c00 * a + c01 * b + c02 * c) / determinant,
        (c01 * a + c11 * b + c12 * c) / determinant,
        (c02 * a + c12 * b + c22 * c) / determinant,
    )


def sigmoid(logit: Number) -> Number:
    """1 / (1 + exp(-logit)), of a float or elementwise of an array; 1 at +inf."""
    if type(logit) is not float:
        return expit(logit)
    return 1.0 / (1.0 + exp(-(_LOWEST if logit < _LOWEST else logit)))

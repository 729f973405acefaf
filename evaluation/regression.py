"""Robust fits of seconds, least absolute deviations and a curve that never falls, and the errors of such fits."""

from collections.abc import Callable, Mapping, Sequence
from itertools import product

import numpy as np
from jaxtyping import Float, Int

from decode.policies.batch import Curve

_REWEIGHTINGS = 30


def least_absolute(
    columns: Float[np.ndarray, "row column"], seconds: Float[np.ndarray, " row"]
) -> Float[np.ndarray, " column"]:
    """argmin over times >= 0 of the sum of |seconds - columns @ times|, by reweighted least squares."""
    weights = np.ones_like(seconds)
    for _ in range(_REWEIGHTINGS):
        times = non_negative(columns * weights[:, None], seconds * weights)
        # Squares weighted by 1 / |residual| are absolute values; the floor keeps an exact fit from an infinite weight.
        weights = 1 / np.sqrt(np.maximum(np.abs(seconds - columns @ times), 1e-4 * np.median(seconds) + 1e-12))
    return times


def non_negative(
    columns: Float[np.ndarray, "row column"], seconds: Float[np.ndarray, " row"]
) -> Float[np.ndarray, " column"]:
    """argmin over times >= 0 of |seconds - columns @ times|^2, for a few columns: of the least squares of every subset
    of them, the closest without a negative time. `scipy.optimize.nnls` does the same, and takes longer to import than a
    trace to replay.
    """
    best = np.zeros(columns.shape[1])
    least = float(seconds @ seconds)
    for subset in product((False, True), repeat=len(best)):
        is_used = np.array(subset)
        times = np.zeros_like(best)
        times[is_used], *_ = np.linalg.lstsq(columns[:, is_used], seconds)
        residual = seconds - columns @ times
        if times.min() >= 0 and residual @ residual < least:
            best = times
            least = float(residual @ residual)
    return best


def resampled_errors(
    fit: Callable[[Int[np.ndarray, " some_turns"]], Float[np.ndarray, " time"]], num_turns: int, num_resamples: int
) -> Float[np.ndarray, " time"]:
    """Standard errors of what is fitted to some turns: standard deviations over bootstrap resamples of turns, or half
    the difference between the halves of the run if that is larger, since a machine may change for good in the middle.
    """
    drawn = np.random.default_rng(0).integers(num_turns, size=(num_resamples, num_turns))
    errors: Float[np.ndarray, " time"] = np.std([fit(sample) for sample in drawn], axis=0)
    if num_turns > 1:
        first, second = (fit(half) for half in np.array_split(np.arange(num_turns), [num_turns // 2]))
        errors = np.maximum(errors, abs(first - second) / 2)
    return errors


def rising(seconds: Mapping[int, Sequence[float]]) -> Curve:
    """The medians of the seconds at each number, made monotone: numbers whose medians fall share their mean."""
    from scipy.optimize import isotonic_regression

    numbers = sorted(seconds)
    medians = [float(np.median(seconds[number])) for number in numbers]
    weights = [float(len(seconds[number])) for number in numbers]
    fitted = isotonic_regression(medians, weights=weights).x
    return Curve(tuple(map(float, numbers)), tuple(map(float, fitted)))

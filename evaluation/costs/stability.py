"""Whether measured times can be used: one whose error is above `LARGEST_ERROR` is measured again, and then refused."""

import sys
from collections.abc import Callable, Mapping
from typing import TypeVar

from evaluation.times import LARGEST_ERROR

SKIP = "--decode.t_draft_s SECONDS --decode.t_target_s SECONDS --decode.stop_share size"
"""Flags that give times instead of measuring them."""
_ATTEMPTS = 3
Measured = TypeVar("Measured")


def stable(measure: Callable[[], Measured], errors_of: Callable[[Measured], Mapping[str, float]]) -> Measured:
    """What is measured, as soon as no error is too large; `errors_of`: name of a time -> its error.

    Raises:
        ValueError: an error is above `LARGEST_ERROR` in every attempt.
    """
    for attempt in range(1, _ATTEMPTS + 1):
        measured = measure()
        errors = errors_of(measured)
        name = max(errors, key=lambda name: errors[name], default="")
        error = errors.get(name, 0.0)
        if error <= LARGEST_ERROR:
            return measured
        if attempt < _ATTEMPTS:
            about = f"costs: the error of {name} is {error:.0%}, above {LARGEST_ERROR:.0%}"
            print(f"{about}; measuring again, {attempt + 1} of {_ATTEMPTS}", file=sys.stderr, flush=True)
    raise ValueError(
        f"this machine is too busy to be timed: the error of {name} is {error:.0%} in the last of {_ATTEMPTS} "
        f"measurements, and the limit is {LARGEST_ERROR:.0%}; close other programs and run `acceptance-heads costs "
        f"--again`, or give the times: {SKIP}"
    )

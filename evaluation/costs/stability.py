"""Whether measured times can be used. Those with an error above `LARGEST_ERROR`, and those of a run that had to share
its processor, are measured again, and then refused.

An error says how much a time varies. A load that lasts as long as the run makes all times longer and varies little, but
it delays draft and target unequally, so the ratio of their times is wrong. It shows in another number: the share of the
elapsed time in which the thread that times had a processor.
"""

import sys
from collections.abc import Callable, Mapping
from time import perf_counter, thread_time
from typing import TypeVar

from evaluation.times import LARGEST_ERROR

SKIP = "--decode.t_draft_s SECONDS --decode.t_target_s SECONDS --decode.stop_share size"
"""Flags that give times instead of measuring them."""
SMALLEST_SHARE = 0.9
"""Of the elapsed time, on a processor. An idle machine reaches 0.97 and more, one busy process per core 0.5."""
_ATTEMPTS = 3
Measured = TypeVar("Measured")


def stable(
    measure: Callable[[], Measured], errors_of: Callable[[Measured], Mapping[str, float]], *, on_cpu: bool
) -> Measured:
    """What is measured, as soon as nothing speaks against it.

    Args:
        measure: measures once.
        errors_of: name of a time -> its error.
        on_cpu: whether the models run on the CPU; waiting for an accelerator is not waiting for a processor.

    Raises:
        ValueError: in every attempt an error is above `LARGEST_ERROR`, or the thread had a processor for less than
            `SMALLEST_SHARE` of the time.
    """
    for attempt in range(1, _ATTEMPTS + 1):
        started_s = perf_counter()
        started_on_cpu_s = thread_time()
        measured = measure()
        share = (thread_time() - started_on_cpu_s) / (perf_counter() - started_s) if on_cpu else 1.0
        problem = _problem(errors_of(measured), share)
        if problem is None:
            return measured
        if attempt < _ATTEMPTS:
            print(f"costs: {problem}; measuring again, {attempt + 1} of {_ATTEMPTS}", file=sys.stderr, flush=True)
    raise ValueError(
        f"this machine is too busy to be timed: in the last of {_ATTEMPTS} measurements {problem}; close other "
        f"programs and run `acceptance-heads costs --again`, or give the times: {SKIP}"
    )


def _problem(errors: Mapping[str, float], share: float) -> str | None:
    """What speaks against measured times, with its value and its limit; None if nothing does."""
    if share < SMALLEST_SHARE:
        return f"other programs left a processor for {share:.0%} of the time, below {SMALLEST_SHARE:.0%}"
    name = max(errors, key=lambda name: errors[name], default="")
    if errors.get(name, 0.0) > LARGEST_ERROR:
        return f"the error of {name} is {errors[name]:.0%}, above {LARGEST_ERROR:.0%}"
    return None

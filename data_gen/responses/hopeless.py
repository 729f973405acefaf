"""Stops a run whose latest rows nearly all failed: the cause is then a setting, a model or a proxy, not the rows."""

from collections import deque
from collections.abc import Iterable

from data_gen.responses.exchange import Problem

WINDOW, FEWEST_ROWS, HOPELESS_SHARE = 32, 8, 0.9
"""A run stops once this share of the latest FEWEST_ROWS to WINDOW rows failed."""


class LatestRows:
    """The latest rows of a run: the problem of each that failed, None for each that did not."""

    def __init__(self, *, max_error_share: float = 0.0) -> None:
        """Args:
        max_error_share: the share of failures that the config allows; at 1 the run never stops.
        """
        self._problems: deque[Problem | None] = deque(maxlen=WINDOW)
        self._share = max(HOPELESS_SHARE, max_error_share)
        self._end = ""

    def add(self, problems: Iterable[Problem | None], *, subject: str, remedy: str) -> None:
        """Add rows.

        Args:
            problems: the problem of each row, None for a row without one.
            subject: the end of "8 of the last 8 …", such as "rows of the stage draft ended in an error".
            remedy: the remedy, as a clause.

        Raises:
            ValueError: nearly all of the latest rows failed.
        """
        self._problems.extend(problems)
        failed, num = [problem for problem in self._problems if problem is not None], len(self._problems)
        if num >= FEWEST_ROWS and len(failed) >= self._share * num and self._share < 1:
            self._end = self._end or (
                f"{len(failed)} of the last {num} {subject}; the latest, {failed[-1].id}: {failed[-1].reason}; {remedy}"
            )
            raise ValueError(self._end)  # the same in every thread

"""The project's progress bar: redrawn on a terminal; in a log, a line per 10 % and at least every 30 seconds."""

import io
import os
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from tqdm import tqdm

_QUIET_S = 30.0  # longest time between two lines of a log
_REFRESH_S = 1.0
_COUNT = "{n:.0f}/{total_fmt} {unit}"
_SCALED = "{n_fmt}{unit}/{total_fmt}{unit}"


def _size_of_terminal() -> dict[str, Any]:
    """tqdm's arguments for stderr's terminal; some containers report 0 lines, on which tqdm would draw nothing."""
    with suppress(OSError):
        if os.get_terminal_size(sys.stderr.fileno()).lines > 0:
            return {"dynamic_ncols": True}
    return {"ncols": 80, "nrows": 24}


class Bar(tqdm):
    """A progress bar on stderr, or lines of a log if stderr is not a terminal. `update(0)` only refreshes the time."""

    def __init__(self, iterable: Iterable[object] | None = None, *, desc: str, unit: str, **settings: Any) -> None:
        """Arguments are tqdm's: `desc` is the work, such as "replay: tiny", `total` the number of units if known."""
        self._log = None if sys.stderr.isatty() else sys.stderr
        self._tenth = -1
        self._last_count = ""
        self._last_line_s = self._last_refresh_s = time.monotonic()
        count = _SCALED if settings.get("unit_scale") else _COUNT
        if self._log is None:
            form = f"{{desc}}{{percentage:3.0f}}%|{{bar}}| {count} [{{elapsed}}<{{remaining}}{{postfix}}]"
            drawing: dict[str, Any] = {"file": sys.stderr, "mininterval": 0.2, **_size_of_terminal()}
        else:  # `display` writes the lines, so tqdm's own output is discarded
            form = f"{{desc}}{{percentage:.0f}} %, {count} [{{elapsed}}<{{remaining}}{{postfix}}]"
            drawing = {"file": io.StringIO(), "mininterval": 0, "miniters": 1}
        drawing["smoothing"] = 0  # estimate the remaining time from the whole run, since many units come in bursts
        super().__init__(iterable, desc=f"{desc}: ", unit=unit, bar_format=form, **drawing | settings)

    def update(self, n: int | float | None = 1) -> None:
        """Count `n` more units."""
        super().update(n)
        if n == 0 and time.monotonic() - self._last_refresh_s > _REFRESH_S:
            self._last_refresh_s = time.monotonic()
            self.refresh()

    def display(self, msg: str | None = None, pos: int | None = None) -> bool | None:
        """Redraw the bar, or write a line to the log if one is due; `msg` and `pos` are tqdm's."""
        if self._log is None:
            return super().display(msg, pos)
        tenth = int(10 * self.n / self.total + 1e-9) if self.total else 0
        count = f"{self.n:.0f}"
        is_quiet = time.monotonic() - self._last_line_s > _QUIET_S
        if is_quiet or (tenth > self._tenth and count != self._last_count):
            self._last_count, self._last_line_s = count, time.monotonic()
            print(self, file=self._log, flush=True)
        self._tenth = max(self._tenth, tenth)
        return True

    def close(self) -> None:
        """End the bar; a log gets its final count, if it has not been written."""
        self._tenth, self._last_line_s = -1, float("inf")
        super().close()  # which displays it once more

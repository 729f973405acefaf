"""The one progress bar of the project: a line that is redrawn on a terminal, and in a log a line at each tenth, or
after half a minute without one.
"""

import io
import os
import sys
import time
from collections.abc import Iterable
from typing import Any, TypeVar

from tqdm import tqdm

AnyMade = TypeVar("AnyMade")
_QUIET_S = 30.0
"""Seconds after which a log gets a line though no further tenth is done."""
_REDRAWN_S = 1.0
_COUNT, _SCALED = "{n:.0f}/{total_fmt} {unit}", "{n_fmt}{unit}/{total_fmt}{unit}"


def _size_of(terminal: Any) -> dict[str, Any]:
    """Arguments of tqdm on the terminal's size; one that does not know its own, as in some containers, has 0 lines, and
    tqdm would draw nothing on it.
    """
    try:
        is_known = os.get_terminal_size(terminal.fileno()).lines > 0
    except OSError:
        is_known = False
    return {"dynamic_ncols": True} if is_known else {"ncols": 80, "nrows": 24}


class Bar(tqdm):
    """A progress bar on stderr.

    Where stderr is no terminal, a line at the start, at each 10 %, after half a minute without one and at the end, as a
    log wants it. `update(0)` says that the work continues.
    """

    def __init__(
        self,
        iterable: Iterable[Any] | None = None,
        *,
        desc: str,
        unit: str,
        total: int | float | None = None,
        **settings: Any,
    ) -> None:
        """
        Args:
            iterable: what is gone through; None where `update` is called.
            desc: what is done, such as "replay: tiny".
            unit: what is counted, such as "prompt".
            total: how many there will be; None: as many as the iterable has, if it says so.
            **settings: further arguments of tqdm, such as `disable`.
        """
        self._log = None if sys.stderr.isatty() else sys.stderr
        self._tenth, self._shown = -1, ""
        self._told = self._drawn = time.monotonic()
        count = _SCALED if settings.get("unit_scale") else _COUNT
        if self._log is None:
            form = f"{{desc}}{{percentage:3.0f}}%|{{bar}}| {count} [{{elapsed}}<{{remaining}}{{postfix}}]"
            drawing: dict[str, Any] = {"file": sys.stderr, "mininterval": 0.2, **_size_of(sys.stderr)}
        else:  # tqdm draws into the void; `display` writes the lines
            form = f"{{desc}}{{percentage:.0f}} %, {count} [{{elapsed}}<{{remaining}}{{postfix}}]"
            drawing = {"file": io.StringIO(), "mininterval": 0, "miniters": 1}
        drawing["smoothing"] = 0  # what remains is told by the whole run so far: many units come in bursts
        super().__init__(iterable, desc=f"{desc}: ", unit=unit, total=total, bar_format=form, **drawing | settings)

    def update(self, n: int | float | None = 1) -> bool | None:
        """Count `n` more units."""
        result = super().update(n)
        if n == 0 and time.monotonic() - self._drawn > _REDRAWN_S:
            self._drawn = time.monotonic()
            self.refresh()
        return result

    def display(self, msg: str | None = None, pos: int | None = None) -> bool | None:
        """Redraw the line, or write one to the log if another tenth is done; `msg` and `pos` are tqdm's."""
        if self._log is None:
            return super().display(msg, pos)
        tenth = int(10 * self.n / self.total + 1e-9) if self.total else 0
        is_quiet = time.monotonic() - self._told > _QUIET_S
        if tenth > self._tenth or is_quiet:
            self._tenth, self._told = tenth, time.monotonic()
            self._write(even_if_shown=is_quiet)
        return True

    def count(self, num: int | float) -> None:
        """Count `num` more units: a `Progress` of data."""
        self.update(num)

    def counted(self, made: AnyMade) -> AnyMade:
        """What was made, counted as one: for comprehensions."""
        self.update()
        return made

    def close(self) -> None:
        """End the bar; a log gets its last count, unless it has it."""
        if self._log is not None and not self.disable:
            self._write()
            self._told = float("inf")
        super().close()

    def _write(self, *, even_if_shown: bool = False) -> None:
        counted = f"{self.desc}{self.n:.0f}"
        if self._log is not None and (even_if_shown or counted != self._shown):
            self._shown = counted
            print(self, file=self._log, flush=True)

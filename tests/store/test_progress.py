"""Progress: a line at each tenth and after a silence in a log, one that is redrawn on a terminal, no bars besides."""

import io
import os
import pty
import sys
from contextlib import suppress

import pytest

from store import progress
from store.progress import Bar


@pytest.mark.parametrize(
    ("total", "num_updates", "quiet_s", "expected"),
    [
        (1000, 1000, None, [f"{10 * tenth} %, {100 * tenth}/1000" for tenth in range(11)]),
        (1000, 3, -1.0, [f"0 %, {count}/1000" for count in range(4)]),
        (40, 5, None, ["0 %, 0/40", "10 %, 4/40", "12 %, 5/40"]),
    ],
    ids=["each tenth", "after a long silence", "at an early end"],
)
def test_a_log_has_a_line(total, num_updates, quiet_s, expected, capsys, monkeypatch):
    if quiet_s is not None:
        monkeypatch.setattr(progress, "_QUIET_S", quiet_s)
    with Bar(total=total, desc="replay: tiny", unit="rows") as bar:
        for _ in range(num_updates):
            bar.update()
    lines = [line.partition(" [")[0] for line in capsys.readouterr().err.splitlines()]
    assert lines == [f"replay: tiny: {line} rows" for line in expected]


def test_parts_that_are_shares_add_up_and_a_bar_that_is_switched_off_says_nothing(capsys):
    """A stage of three steps counts each row three times, by a third."""
    with Bar(total=7, desc="labels", unit="rows") as bar:
        for _ in range(21):
            bar.update(1 / 3)
    assert capsys.readouterr().err.splitlines()[-1].startswith("labels: 100 %, 7/7 rows [")
    for _ in Bar(range(20), desc="sums", unit="B", disable=True):
        pass
    assert capsys.readouterr().err == ""


def test_a_terminal_sees_one_line_that_is_redrawn(monkeypatch):
    screen = io.StringIO()
    screen.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", screen)
    for _ in Bar(range(1000), desc="replay", unit="settings", ncols=100):
        pass
    assert screen.getvalue().count("\n") == 1
    assert screen.getvalue().split("\r")[-1].startswith("replay: 100%|")


def test_a_terminal_that_does_not_know_its_size_gets_a_bar(monkeypatch):
    ours, theirs = pty.openpty()  # 0 lines of 0 columns
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr("sys.stderr", terminal)
        with Bar(total=2, desc="costs", unit="generations") as bar:
            bar.update(2)
    drawn = ""
    with os.fdopen(ours, errors="replace") as shown, suppress(OSError):  # EIO is the end of a terminal
        while line := shown.readline():
            drawn += line
    assert "costs: 100%" in drawn
    assert "2/2 generations" in drawn

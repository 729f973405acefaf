"""Progress: a line at each tenth and after a silence in a log, one that is redrawn on a terminal, no bars besides."""

import io
import os
import pty
import sys
from contextlib import suppress
from pathlib import Path

from store import progress
from store.progress import Bar

ROOT = Path(__file__, "../../..").resolve()


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def counts(lines: list[str]) -> list[str]:
    """The part of each line up to the times."""
    return [line.partition(" [")[0] for line in lines]


def test_a_log_has_a_line_for_each_tenth(capsys):
    for _ in Bar(range(1000), desc="replay: tiny", unit="settings"):
        pass
    lines = counts(capsys.readouterr().err.splitlines())
    assert lines == [f"replay: tiny: {10 * tenth} %, {100 * tenth}/1000 settings" for tenth in range(11)]


def test_a_log_has_a_line_after_a_long_silence(capsys, monkeypatch):
    monkeypatch.setattr(progress, "_QUIET_S", -1.0)
    with Bar(total=1000, desc="labels", unit="rows") as bar:
        for _ in range(3):
            bar.update()
    lines = counts(capsys.readouterr().err.splitlines())
    assert lines == [f"labels: 0 %, {count}/1000 rows" for count in range(4)]


def test_a_bar_that_ends_early_says_how_far_it_came(capsys):
    with Bar(total=40, desc="costs", unit="generations") as bar:
        for _ in range(5):
            bar.update()
    lines = counts(capsys.readouterr().err.splitlines())
    assert lines == ["costs: 0 %, 0/40 generations", "costs: 10 %, 4/40 generations", "costs: 12 %, 5/40 generations"]


def test_parts_that_are_shares_add_up(capsys):
    """A stage of three steps counts each row three times, by a third."""
    with Bar(total=7, desc="labels", unit="rows") as bar:
        for _ in range(21):
            bar.update(1 / 3)
    assert counts(capsys.readouterr().err.splitlines())[-1] == "labels: 100 %, 7/7 rows"


def test_a_terminal_sees_one_line_that_is_redrawn(monkeypatch):
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    for _ in Bar(range(1000), desc="replay", unit="settings", ncols=100):
        pass
    assert screen.getvalue().count("\n") == 1
    assert screen.getvalue().split("\r")[-1].startswith("replay: 100%|")


def test_a_bar_that_is_switched_off_says_nothing(capsys):
    for _ in Bar(range(20), desc="sums", unit="B", disable=True):
        pass
    assert capsys.readouterr().err == ""


def test_bars_are_made_in_one_place():
    rooms = (
        "store",
        "lm",
        "data_gen",
        "heads",
        "decode",
        "evaluation",
        "serve",
        "configs",
        "checkpoints",
        "benchmarks",
    )
    made = [
        str(path.relative_to(ROOT))
        for room in rooms
        for path in (ROOT / room).rglob("*.py")
        if any(maker in path.read_text(encoding="utf-8") for maker in (" tqdm(", "(tqdm(", "rich.progress"))
    ]
    assert made == []


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

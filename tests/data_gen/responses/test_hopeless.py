"""When a run gives up."""

import pytest

from data_gen.responses.exchange import Problem
from data_gen.responses.hopeless import FEWEST_ROWS, WINDOW, LatestRows


def added(latest: LatestRows, *failed: bool) -> None:
    problems = [Problem(f"p{row}", "error", "no answer") if is_failed else None for row, is_failed in enumerate(failed)]
    latest.add(problems, subject="answers are no responses", remedy="look at the proxy")


def test_a_run_gives_up_once_nearly_all_of_the_latest_rows_failed():
    latest = LatestRows()
    added(latest, *[False] * WINDOW, *[True] * (WINDOW - 4))
    with pytest.raises(
        ValueError, match=r"^29 of the last 32 answers are no responses; the latest, p0: no answer; look at"
    ):
        added(latest, True)


def test_few_rows_are_no_reason_to_give_up():
    latest = LatestRows()
    added(latest, *[True] * (FEWEST_ROWS - 1))
    with pytest.raises(ValueError, match=r"^8 of the last 8 answers"):
        added(latest, True)


def test_a_run_gives_up_only_beyond_the_errors_that_it_bears():
    added(LatestRows(max_error_share=0.95), *[True] * 18, False)  # 18 of 19 are fewer than 95 %
    with pytest.raises(ValueError, match="18 of the last 19"):
        added(LatestRows(), *[True] * 18, False)
    added(LatestRows(max_error_share=1.0), *[True] * WINDOW)

"""A run stops once nearly all of its latest rows failed."""

import pytest

from data_gen.responses.exchange import LatestRows, Problem

REFUSED = r"{} answers are invalid; the latest, p\d+: no answer; check"


@pytest.mark.parametrize(
    ("failed", "allowed", "says"),
    [
        ([False] * 32 + [True] * 29, 0.0, "29 of the last 32"),
        ([False] * 32 + [True] * 28, 0.0, None),
        ([True] * 7, 0.0, None),
        ([True] * 8, 0.0, "8 of the last 8"),
        ([True] * 18 + [False], 0.0, "18 of the last 19"),
        ([True] * 18 + [False], 0.95, None),
        ([True] * 32, 1.0, None),
    ],
)
def test_a_run_stops_once_nearly_all_of_its_latest_rows_failed(failed, allowed, says):
    rows = [Problem(f"p{row}", "error", "no answer") if is_failed else None for row, is_failed in enumerate(failed)]
    settings = {"subject": "answers are invalid", "remedy": "check the proxy"}
    latest = LatestRows(max_error_share=allowed)
    if says is None:
        latest.add(rows, **settings)
    else:
        with pytest.raises(ValueError, match=REFUSED.format(says)):
            latest.add(rows, **settings)

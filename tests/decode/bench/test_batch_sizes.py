"""Batches on a clock: what they write is counted, and curves are read off rounds in which no prompt was read."""

import pytest

from decode.bench.batch_sizes import batch_rows, batch_table, curves_of
from decode.costs.measure import Loop
from decode.loop.batch import BatchRound
from decode.policies import FixedLength, TokenProb
from lm import Sampling


def test_every_policy_has_a_row_at_every_size(pair):
    loop = Loop(pair=pair, prompts=[[1, 2], [3, 4, 5]], sampling=Sampling(), max_draft_length=4, max_new_tokens=6)
    rows = batch_rows(loop, {"none": FixedLength(0), "two": FixedLength(2), "own": TokenProb(0.4)}, [1, 3])
    assert [(row["batch_size"], row["policy"]) for row in rows] == [(size, name) for size in (1, 3) for name in ("none", "two", "own")]
    for size in (1, 3):
        assert max(row["against_fixed"] for row in rows if row["batch_size"] == size and row["policy"] != "own") >= 1.0
    for row in rows:  # three turns, of two requests for each seat, none ended by an EOS
        assert sum(one.num_emitted for one in row["rounds"]) == 3 * 2 * row["batch_size"] * 6
    assert batch_table(rows).row_count == 3
    assert curves_of([one for row in rows for one in row["rounds"]]).draft.seconds[0] > 0


def test_curves_leave_out_rounds_that_read_prompts_and_never_fall():
    rounds = [
        BatchRound((4, 4), 12, 5, 0.4, 2.0, 0),
        BatchRound((2, 2, 2), 8, 5, 0.3, 1.0, 0),
        BatchRound((2, 1), 7, 5, 9.0, 1.2, 0),
        BatchRound((4, 4), 12, 5, 9.0, 9.0, 1),
    ]
    curves = curves_of(rounds)
    assert (curves.draft.numbers, curves.draft.seconds) == ((2.0, 4.0), pytest.approx((0.1, 0.2)))
    assert curves.target.numbers == (7.0, 8.0, 12.0)
    assert curves.target.seconds == pytest.approx((1.1, 1.1, 2.0))
    with pytest.raises(ValueError, match="drafted with all"):
        curves_of(rounds[2:])

"""Batches on a clock: what they write is counted, and curves are read off rounds in which no prompt was read."""

import pytest

from decode.loop.batch import BatchRound
from decode.policies import FixedLength, TokenProb
from decode.policies.auto import Auto
from decode.policies.batch import BatchAuto
from evaluation.bench import batch_sizes
from evaluation.bench.batch_sizes import curves_of, measure_sizes, size_table, size_verdict
from evaluation.costs.measure import Loop
from heads import AcceptanceHead
from lm import Sampling


def test_every_policy_has_a_row_at_every_size(pair):
    loop = Loop(pair=pair, prompts=[[1, 2], [3, 4, 5]], sampling=Sampling(), max_draft_length=4, max_new_tokens=6)
    rows, curves = measure_sizes(loop, {"none": FixedLength(0), "two": FixedLength(2), "own": TokenProb(0.4)}, [1, 3])
    assert [(row["batch_size"], row["policy"]) for row in rows] == [
        (size, name) for size in (1, 3) for name in ("none", "two", "own")
    ]
    for size in (1, 3):
        assert max(row["against_fixed"] for row in rows if row["batch_size"] == size and row["policy"] != "own") >= 1.0
    assert len(size_table(rows).rows) == 3
    assert curves.draft.seconds[0] > 0


def test_auto_runs_with_the_curves_of_batches_and_every_request_is_written_to_its_end(pair, monkeypatch):
    ran = []

    def run(loop, policy, *rest, seed):
        ran.append((policy, RUN(loop, policy, *rest, seed=seed)))
        return ran[-1][1]

    monkeypatch.setattr(batch_sizes, "_run", run)
    loop = Loop(pair=pair, prompts=[[1, 2], [3, 4, 5]], sampling=Sampling(), max_draft_length=4, max_new_tokens=6)
    head = AcceptanceHead(pair.draft.config.hidden_size, 0, "drawn", scalars=True)
    measure_sizes(loop, {"two": FixedLength(2), "auto": Auto(head, 1.0, 2.0)}, [3])
    rules = [policy for policy, _ in ran if isinstance(policy, BatchAuto)]
    assert len(rules) == 4
    assert all(rule.costs.draft(3) < 1.0 for rule in rules)  # seconds: a toy takes less than the 1 that it began with
    # two requests a row, none ended by an EOS
    assert all(sum(one.num_emitted for one in rounds) == 2 * 3 * 6 for _, (_, rounds) in ran)


RUN = batch_sizes._run


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


def test_the_fastest_policy_of_every_size_is_named_in_a_sentence():
    sizes = [
        {"batch_size": size, "policy": policy, "tokens_per_s": speed, "against_fixed": speed / 100}
        for size, policy, speed in ((1, "entropy", 110.0), (1, "fixed_length:k=2", 100.0), (4, "entropy", 90.0))
    ]
    assert "entropy +10.0% in batches of 1, entropy -10.0% in batches of 4." in size_verdict(sizes)

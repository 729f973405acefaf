"""AdaFlash's length head in replay: its fit, what it may read, and the counts of the lengths that it predicts."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from evaluation.traces.bounds import ScoreHead
from evaluation.traces.lengths import PredictedLength, fit_length, predict_length
from evaluation.traces.replay import replay_settings
from evaluation.traces.trace import InputTensors, Trace
from tests.evaluation.traces.forms import LENGTH, traced

WIDTH, MARKOV = 3, 2


@pytest.fixture(scope="module")
def planted() -> tuple[Trace, torch.Tensor]:
    """A trace of blocks whose states make a rule exact, with what it predicts: the expected accepted length of a block
    is 3 * last[0] - mean[1] + 0.5. What follows the states is a Markov head's.
    """
    trace, generator = traced("rnn"), torch.Generator().manual_seed(0)
    lengths = trace.branch_lengths.tolist()
    hidden = torch.randn(len(trace.token), WIDTH + MARKOV, generator=generator)
    prob = torch.from_numpy(trace.drafts["acceptance_prob"][trace.num_positions :])
    expected = torch.stack([block.cumprod(0).sum() for block in prob.split(lengths)])
    for block, label in zip(hidden[trace.num_positions :].split(lengths), expected, strict=True):
        if len(block):
            block[-1, 0] = (label + block[:, 1].mean() - 0.5) / 3
    inputs = InputTensors(hidden, torch.arange(1), torch.zeros(1, WIDTH))
    return replace(trace, inputs=lambda: inputs, drafts=dict(trace.drafts)), expected


def test_a_fit_recovers_a_linear_rule_and_reads_no_state_that_depends_on_a_drawn_token(planted):
    trace, expected = planted
    weights = fit_length(trace)
    torch.testing.assert_close(weights, torch.tensor([0, -1, 0, 3, 0, 0, 0.5]).double(), atol=1e-5, rtol=0)
    predict_length(trace, weights)
    at = trace.first_drawn[trace.branch_lengths > 0]
    predicted = trace.logit(ScoreHead("length"))[at]
    np.testing.assert_allclose(predicted, expected[trace.branch_lengths > 0], atol=1e-5)
    assert fit_length(replace(trace, inputs=None)) is None
    assert fit_length(traced("eagle")) is None, "no blocks"


@pytest.mark.parametrize("extra", [-1.0, 0.0, 0.7, LENGTH])
def test_counts_of_predicted_lengths_are_those_by_hand(planted, extra):
    trace, _ = planted
    predict_length(trace, fit_length(trace))
    predicted = trace.logit(ScoreHead("length"))[trace.first_drawn]
    played = replay_settings(trace, PredictedLength(np.array([extra])))
    for number, (row, start) in enumerate(zip(trace.rows, trace.offsets, strict=False)):
        at, drafted, accepted, rounds = int(start), 0, 0, 0
        while at < trace.offsets[number + 1]:
            room = max(min(start + row.limit - at - 1, trace.branch_lengths[at]), 0)
            length = min(max(np.ceil(predicted[at] + extra), 0), room)
            passed = min(length, trace.num_passing[at])
            at, drafted, accepted, rounds = at + int(passed) + 1, drafted + length, accepted + passed, rounds + 1
        counts = [played.counts.num_drafted, played.counts.num_accepted, played.counts.num_target]
        assert [each[0, number] for each in counts] == [drafted, accepted, rounds]

"""Along a draft: histograms by position against loops, expected counts against tossed coins and against known
extremes.
"""

import pytest
import torch

from heads.measures.histogram import observe
from heads.measures.survival import by_place, by_position, expected_counts

LENGTHS = torch.tensor([6, 1, 9])


@pytest.fixture
def rows() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 16, generator=generator), torch.rand(16, generator=generator)


def spans() -> list[range]:
    ends = LENGTHS.cumsum(0).tolist()
    return [range(end - length, end) for end, length in zip(ends, LENGTHS.tolist(), strict=True)]


def test_histograms_by_position_are_those_of_all_drafts(rows):
    logit, prob = rows
    found_token, found_survival = by_position(logit, prob, row_lengths=LENGTHS, num_positions=4)
    hat = logit.double().sigmoid()
    for k in range(4):
        starts = [s for span in spans() for s in span if s + k < span.stop]
        reach = torch.stack([prob[s : s + k].double().prod() for s in starts])
        token = observe(logit[:, [s + k for s in starts]], prob[[s + k for s in starts]][None], reach[None])
        predicted = torch.stack([hat[:, s : s + k + 1].prod(1) for s in starts], 1)
        survival = observe(predicted.logit(), torch.stack([prob[s : s + k + 1].double().prod() for s in starts])[None])
        for head in range(2):
            for ours, whole in ((found_token, token), (found_survival, survival)):
                torch.testing.assert_close(ours.accepted[head * 4 + k].sum(), whole.accepted[head].sum())
                torch.testing.assert_close(
                    ours.logit[head * 4 + k].sum(), whole.logit[head].sum(), rtol=1e-6, atol=1e-6
                )
                torch.testing.assert_close(ours.entropy[head * 4 + k], whole.entropy[head])


def test_histograms_by_place_are_those_of_rows_that_are_one_draft_each(rows):
    logit, prob = rows
    label = torch.rand(2, 16, generator=torch.Generator().manual_seed(2))
    found_token, found_survival = by_place(logit, label=label, acceptance_prob=prob, row_lengths=LENGTHS, num_places=5)
    hat = logit.double().sigmoid()
    for k in range(5):
        starts = [span.start for span in spans() if k < len(span)]
        at = [start + k for start in starts]
        reach = torch.stack([prob[start : start + k].double().prod() for start in starts])
        token = observe(logit[:, at], label[:, at], reach[None])
        predicted = torch.stack([hat[:, start : start + k + 1].prod(1) for start in starts], 1)
        truth = torch.stack([prob[start : start + k + 1].double().prod() for start in starts])
        survival = observe(predicted.logit(), truth[None])
        for head in range(2):
            for ours, whole in ((found_token, token), (found_survival, survival)):
                for name in ("weight", "accepted"):
                    ours_of, whole_of = (getattr(part, name).sum(-1) for part in (ours, whole))
                    torch.testing.assert_close(ours_of[head * 5 + k], whole_of[head], rtol=1e-9, atol=1e-9)
                torch.testing.assert_close(ours.product[head * 5 + k], whole.product[head], rtol=1e-6, atol=1e-6)
                torch.testing.assert_close(ours.squares[head * 5 + k], whole.squares[head])


def toss(
    hat: list[float], prob: list[float], threshold: float, lag: int, limit: int, generator: torch.Generator
) -> tuple[int, int]:
    """(drafted, rounds) of one response, by the rule of law 4.8 with coins."""
    drafted = rounds = start = 0
    while start < len(prob):
        rounds, length, kept = rounds + 1, 0, 1.0
        while length < min(limit, len(prob) - start):
            before, kept = kept, kept * hat[start + length]
            if lag == -1 and length > 0 and 1 - kept > threshold:
                break
            length += 1
            if lag >= 0 and 1 - (before if lag else kept) > threshold:
                break
        drafted += length
        accepted = 0
        while accepted < length and float(torch.rand((), generator=generator)) < prob[start + accepted]:
            accepted += 1
        start += accepted + 1
    return drafted, rounds


@pytest.mark.parametrize("lag", [-1, 0, 1])
def test_expected_counts_are_the_means_of_tossed_coins(rows, lag: int):
    """False alarms: z below 4.5 in 4 comparisons, under 1e-4."""
    logit, prob = rows[0], rows[1] * 0.5 + 0.5
    thresholds = torch.tensor([0.3, 0.8])
    found = expected_counts(logit + 1, prob, row_lengths=LENGTHS, thresholds=thresholds, max_draft_length=4, lag=lag)
    generator = torch.Generator().manual_seed(2)
    hat = (logit + 1).double().sigmoid()[0].tolist()
    for column, threshold in enumerate(thresholds.tolist()):
        counts = torch.tensor(
            [
                [
                    sum(x)
                    for x in zip(
                        *(
                            toss(hat[s.start : s.stop], prob[s.start : s.stop].tolist(), threshold, lag, 4, generator)
                            for s in spans()
                        ),
                        strict=True,
                    )
                ]
                for _ in range(1500)
            ],
            dtype=torch.float64,
        )
        expected = torch.stack([found.num_drafted[0, column], found.num_rounds[0, column]])
        z = (counts.mean(0) - expected) / (counts.std(0) / len(counts) ** 0.5).clamp_min(1e-9)
        assert z.abs().max() < 4.5, z


def test_certain_heads_draft_all_or_one():
    prob, lengths = torch.ones(10), torch.tensor([10])
    for logit, drafted, rounds in ((30.0, 10, 1), (-30.0, 5, 5)):
        found = expected_counts(
            torch.full((1, 10), logit),
            prob,
            row_lengths=lengths,
            thresholds=torch.tensor([0.5]),
            max_draft_length=20,
            lag=0,
        )
        assert (float(found.num_drafted), float(found.num_rounds)) == (drafted, rounds)
    assert float(found.discard_rate) == 0


def test_a_fed_time_head_drafts_one_more():
    """Every token is as good as rejected: the drawn-time head sees it at once, the fed-time head one token later (law
    4.8).
    """
    found = [
        expected_counts(
            torch.full((1, 9), -30.0),
            torch.zeros(9),
            row_lengths=torch.tensor([9]),
            thresholds=torch.tensor([0.5]),
            max_draft_length=20,
            lag=lag,
        )
        for lag in (0, 1)
    ]
    assert [float(counts.num_rounds) for counts in found] == [9, 9]
    assert [float(counts.num_drafted) for counts in found] == [9, 17]

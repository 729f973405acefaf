"""Along a draft: histograms by position against loops."""

import pytest
import torch

from heads.measures.histogram import observe
from heads.measures.survival import by_position

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


def test_histograms_by_row_position_are_those_of_rows_that_are_one_draft_each(rows):
    logit, prob = rows
    label = torch.rand(2, 16, generator=torch.Generator().manual_seed(2))
    found_token, found_survival = by_position(
        logit, prob, label=label, row_lengths=LENGTHS, num_positions=5, is_draft=True
    )
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

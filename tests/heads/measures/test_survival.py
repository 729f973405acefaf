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


@pytest.mark.parametrize("is_draft", [False, True])
def test_histograms_by_position_are_those_of_all_drafts(rows, is_draft):
    """Drafts from every position of a row, or rows that are one draft each, with labels of their own."""
    logit, prob = rows
    label = torch.rand(2, 16, generator=torch.Generator().manual_seed(2)) if is_draft else None
    parts = by_position(logit, prob, row_lengths=LENGTHS, num_positions=5, label=label, is_draft=is_draft)
    hat, truth = logit.double().sigmoid(), prob.double()
    for k in range(5):
        starts = [s for span in spans() for s in (span[:1] if is_draft else span) if s + k < span.stop]
        at = [start + k for start in starts]
        reach = torch.stack([truth[s : s + k].prod() for s in starts])
        token = observe(logit[:, at], prob[at][None] if label is None else label[:, at], reach[None])
        predicted = torch.stack([hat[:, s : s + k + 1].prod(1) for s in starts], 1)
        survival = observe(predicted.logit(), torch.stack([truth[s : s + k + 1].prod() for s in starts])[None])
        for part, expected in zip(parts, (token, survival), strict=True):
            for name in part._fields:
                ours, whole = getattr(part, name)[k::5], getattr(expected, name)
                sums = (ours.sum(-1), whole.sum(-1)) if ours.dim() > 1 else (ours, whole)
                torch.testing.assert_close(*sums, rtol=1e-6, atol=1e-6)

"""logit q(y) and logit max q are one number wherever they are computed, also where float32 rounds q(y) to 1: from
logits of batches, in numpy, of data and of traces.
"""

import math

import pytest
import torch

from data_gen.labels.laws import label_draft
from decode.loop.signals import HostSignals, SignalReader
from decode.loop.step import DraftSteps
from decode.policies import HeadPolicy
from evaluation.traces.coupling import read_signals
from heads import AcceptanceHead
from heads.model.head import Timing
from lm import Sampling
from lm.signals import LARGEST_LOGIT, Normalised, logit_of_log, signals_of, token_stats
from tests.toys.enumeration import ToyModel

INF = math.inf
ROWS: list[tuple[str, list[float], int, float, float]] = [
    ("even", [0.0, 0.0, 0.0], 1, math.log(1 / 2), math.log(1 / 2)),
    ("near certain", [20.0, 10.0, -5.0, 8.0], 0, 9.873071, 9.873071),
    ("1 - 1e-5", [30.0, 30.0 - math.log(1e5)], 0, math.log(1e5), math.log(1e5)),
    ("1 - 1e-12", [0.0, math.log(1e-12)], 0, LARGEST_LOGIT, LARGEST_LOGIT),
    ("1e-12", [0.0, math.log(1e-12)], 1, -LARGEST_LOGIT, LARGEST_LOGIT),
    ("another is likelier", [2.0, 1.0, 0.0], 1, 1 - math.log(math.exp(2) + 1), 2 - math.log(math.exp(1) + 1)),
    ("probability 0", [1.0, -INF, 0.0], 1, -LARGEST_LOGIT, 1.0),
    ("others have probability 0", [-INF, 3.0, -INF], 1, LARGEST_LOGIT, LARGEST_LOGIT),
    ("one token", [3.0], 0, LARGEST_LOGIT, LARGEST_LOGIT),
]
"""Logits, y, logit q(y), logit max q."""


def reading_head(timing: Timing, name: str) -> AcceptanceHead:
    """A head whose logit is one scalar."""
    head = AcceptanceHead(4, 0, timing, (name,))
    weights = {key: torch.zeros_like(value) for key, value in head.state_dict().items()}
    head.load_state_dict(weights | {"skip.weight": torch.ones(1, 1)})
    return head.eval()


@pytest.mark.parametrize(("logits", "token", "of_token", "of_max"), [row[1:] for row in ROWS], ids=[r[0] for r in ROWS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_both_logits_are_equal_in_batches_in_numpy_on_a_device_in_data_and_in_traces(
    logits, token, of_token, of_max, dtype
):
    row, ids, vocab = torch.tensor(logits, dtype=dtype), torch.tensor([token]), len(logits)
    expected = pytest.approx([of_token, of_max], rel=2e-6, abs=2e-6)
    names = ("logit_token_prob", "logit_max_prob")
    columns = signals_of(Normalised(row[None]), ids, names)
    assert [columns[name].item() for name in names] == expected
    stats = token_stats(row, token)
    assert [getattr(stats, name) for name in names] == expected

    heads = (reading_head("drawn", names[0]), reading_head("prefix", names[1]))
    scores = []
    for head, logit in zip(heads, ("drawn_logit", "prefix_logit"), strict=True):
        policy, model = HeadPolicy(head), ToyModel(2, vocab)
        model.feed([0])
        for reader in (HostSignals(policy, model), SignalReader(policy, model)):
            scores.append(getattr(reader.read(0, row, token), logit))
        _, [drawn] = DraftSteps(lambda ids: torch.zeros(len(ids), 4)).read(
            0, Normalised(row[None]), torch.zeros(1, 4), ids, policies=[policy], nums_before=[0]
        )
        scores.append(getattr(drawn, logit))
    assert scores == pytest.approx([of_token] * 3 + [of_max] * 3, rel=2e-6, abs=2e-6)

    for sampling in (Sampling(), Sampling(temperature=0.0), Sampling(0.5, top_k=1)):
        labels, q = label_draft(row[None], None, sampling, ids)
        recorded = read_signals(row[None], ids, q, torch.zeros(1, 4), torch.ones(1))
        for stored in (labels, recorded):
            assert [stored[name].float().item() for name in names] == expected


@pytest.mark.parametrize(("logits", "token", "of_token"), [row[1:4] for row in ROWS], ids=[r[0] for r in ROWS])
def test_the_stored_log_q_gives_the_logit(logits, token, of_token):
    row = torch.tensor(logits)
    stored = signals_of(Normalised(row[None]), torch.tensor([token]), ["log_token_prob"])["log_token_prob"]
    assert logit_of_log(stored).item() == pytest.approx(of_token, rel=2e-6, abs=2e-6)
    assert token_stats(row, token).log_token_prob == pytest.approx(stored.item(), rel=2e-6)

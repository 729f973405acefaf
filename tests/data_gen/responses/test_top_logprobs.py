"""Distributions from the likeliest tokens' log-probabilities: those of `Sampling` over all logits, or none."""

import pytest
import torch

from data_gen.responses.exchange import RefusedError
from data_gen.responses.top_logprobs import DistributionReader, num_logprobs_of
from lm import Sampling

NUM_IDS, NUM_PADDED = 300, 316


def logits_of(num_places: int = 40, *, width: int = NUM_IDS, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_places, width, generator=torch.Generator().manual_seed(seed)) * 3


def told(logits: torch.Tensor, num: int) -> list[dict[int, float]]:
    """What a server tells of each place: the likeliest, and a token that was drawn besides."""
    log_probs = logits.double().log_softmax(-1)
    likeliest = log_probs.topk(min(num, log_probs.shape[-1]))
    return [
        {7: float(row[7])} | dict(zip(ids.tolist(), values.tolist(), strict=True))
        for row, ids, values in zip(log_probs, likeliest.indices, likeliest.values, strict=True)
    ]


def dense(distributions) -> torch.Tensor:
    return torch.zeros(len(distributions.ids), NUM_IDS).scatter_add_(-1, distributions.ids.long(), distributions.probs)


def reader(sampling: Sampling, num: int, *, is_padded: bool = False) -> DistributionReader:
    return DistributionReader(sampling=sampling, num_logprobs=num, num_ids=NUM_IDS, is_padded=is_padded)


SAMPLINGS = [Sampling(temperature=0), Sampling(top_k=50), Sampling(top_p=0.9), Sampling(top_p=1e-6)]
SAMPLINGS += [Sampling(temperature=0.6, top_k=50), Sampling(temperature=1.7, top_k=20)]
SAMPLINGS += [Sampling(temperature=0.8, top_k=30, top_p=0.9)]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("width", [NUM_IDS, NUM_PADDED])
def test_the_law_is_that_of_all_logits(sampling, width):
    logits = logits_of(width=width)
    num = 64 if sampling.top_k or sampling.is_greedy else 400  # all of a padded vocabulary for top-p alone
    distributions = reader(sampling, num, is_padded=width > NUM_IDS).distributions(told(logits, num))
    torch.testing.assert_close(dense(distributions), sampling.probs(logits[:, :NUM_IDS]), rtol=1e-5, atol=1e-7)


def test_top_p_alone_is_known_from_few_where_no_id_is_padded_and_of_equals_greedy_takes_the_least_as_argmax_does():
    logits, sampling = logits_of() * 1.5, Sampling(top_p=0.8)
    distributions = reader(sampling, 100).distributions(told(logits, 100))
    torch.testing.assert_close(dense(distributions), sampling.probs(logits), rtol=1e-5, atol=1e-7)
    logits[:1, [3, 9, 200]] = 50.0
    distributions = reader(Sampling(temperature=0), 15).distributions(told(logits[:1], 15))
    assert (distributions.ids.tolist(), distributions.probs.tolist()) == ([[3]], [[1.0]])


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_equals_around_the_kth_place_are_kept_together_or_the_law_is_refused(temperature):
    """bfloat16 has many equals. Every place is either the law of all logits or an error, and both occur."""
    logits, sampling = logits_of(400).bfloat16().float(), Sampling(temperature=temperature, top_k=50)
    num_determined = 0
    for place in range(len(logits)):
        try:
            distributions = reader(sampling, 52).distributions(told(logits[place : place + 1], 52))
        except RefusedError:
            assert (logits[place] >= logits[place].topk(52).values[-1]).sum() >= 52
            assert logits[place].topk(52).values[-1] == logits[place].topk(50).values[-1]
            continue
        num_determined += 1
        torch.testing.assert_close(dense(distributions), sampling.probs(logits[place, None]), rtol=1e-5, atol=1e-7)
    assert 0 < num_determined < 400


def test_padded_ids_among_the_likeliest_are_made_up_for_or_the_law_is_refused():
    logits = logits_of(3, width=NUM_PADDED)
    logits[:, NUM_IDS : NUM_IDS + 10] = 30.0
    sampling = Sampling(top_k=50)
    distributions = reader(sampling, 64, is_padded=True).distributions(told(logits, 64))
    torch.testing.assert_close(dense(distributions), sampling.probs(logits[:, :NUM_IDS]), rtol=1e-5, atol=1e-7)
    with pytest.raises(RefusedError, match=r"others may be as likely as number 50; raise data\.server"):
        reader(sampling, 59, is_padded=True).distributions(told(logits, 59))


@pytest.mark.parametrize(
    ("sampling", "positions", "reason"),
    [
        (Sampling(top_p=0.999), told(logits_of(1) / 9, 64), "at position 0 .* the 64 likeliest hold less than top_p"),
        (Sampling(top_k=5), told(logits_of(2), 64)[:1] + told(logits_of(2), 20)[1:], "at position 1 .* fewer than 64"),
        (Sampling(top_k=5), [dict(enumerate(logits_of(1)[0].topk(64).values.tolist()))], "sum to more than 1"),
        (Sampling(top_k=5), [{id: -9999.0 if id > 4 else -1.61 for id in range(64)}], "truncated distributions"),
        (Sampling(top_k=5), [dict.fromkeys(range(64), float("nan"))], "no token has any"),
    ],
)
def test_what_does_not_determine_the_law_is_refused_with_the_place(sampling, positions, reason):
    with pytest.raises(RefusedError, match=reason):
        reader(sampling, 64).distributions(positions)


@pytest.mark.parametrize(
    ("sampling", "num", "complaint"),
    [
        (Sampling(), None, "tokens count that a server omits; set pair.sampling.top_k"),
        (Sampling(top_p=1.0), None, "that a server omits"),
        (Sampling(temperature=0.7, top_p=0.9), None, "that a server omits"),
        (Sampling(top_k=50), 50, r"data.server.num_logprobs is 50 .*; set it to more than 50 \(null: 80\)"),
    ],
)
def test_a_sampling_that_no_number_determines_is_refused_and_another_asks_for_few(sampling, num, complaint):
    with pytest.raises(ValueError, match=complaint):
        num_logprobs_of(sampling, num)
    assert num_logprobs_of(Sampling(top_k=50), None) == 80
    assert num_logprobs_of(Sampling(top_p=0.9), None) == 80
    assert num_logprobs_of(Sampling(top_k=50), 51) == 51

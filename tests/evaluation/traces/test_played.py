"""Played to the real loop, a trace writes its own text with the very counts of its replay, whatever the policy (law
4.10).
"""

from dataclasses import fields

import numpy as np
import pytest
import torch

from decode import ModelDrafter, SpeculativeDecoder
from decode.loop.counts import Counts
from decode.policies import AdaEDL, FixedLength, HeadPolicy, Policy
from decode.policies.auto import Auto
from evaluation.traces.played import PlayedSampler
from evaluation.traces.replay import replay_settings
from evaluation.traces.trace import Trace
from heads import AcceptanceHead
from lm import Sampling
from tests.toys.loop import POLICIES, SAMPLINGS, decoder_of, toy_head
from tests.toys.small_pair import EOS, LENGTH, VOCAB, model, trace
from tests.toys.traces import traced

RULES = POLICIES | {
    "auto_online": Auto(toy_head("drawn", seed=2), 0.2, 1.0, probe_every=2),
    "auto_learning": Auto(toy_head("drawn", seed=2), 0.2, 1.0, probe_every=2, is_learning=True),
    "auto_before_the_draw": Auto(
        toy_head("prefix", seed=2), 0.05, 1.0, t_verify_s=0.3, probe_every=2, is_learning=True
    ),
    "kept_prefix_head": HeadPolicy(toy_head("prefix", seed=2), 0.5, keeps_newest=True),
    "auto_stops_drafting": Auto(toy_head("fed", seed=2), 2.0, 1.0, prior_rounds=1.0, probe_every=2),
}


def rows_that_differ(decoder: SpeculativeDecoder, policy: Policy, traced: Trace) -> list[int]:
    """Rows whose text, counts or draft lengths are not the replay's."""
    replayed = replay_settings(traced, policy)
    different = []
    for number, row in enumerate(traced.rows):
        generation = decoder.generate(row.prompt_ids, row.limit, generator=PlayedSampler(traced, number))
        lengths = np.bincount([len(one.drafted) for one in generation.rounds], minlength=traced.max_draft_length + 1)
        counts = Counts(
            **{
                f.name: int(np.take(getattr(replayed.counts, f.name), number))
                for f in fields(Counts)
                if "micro" not in f.name
            }
        )
        assert generation.token_ids == row.response_ids
        if generation.counts != counts or not np.array_equal(lengths, replayed.lengths[0, number]):
            different.append(number)
    return different


@pytest.mark.parametrize("policy", RULES)
def test_the_loop_counts_what_replay_counts_for_every_policy(policy):
    _, every = traced("plain", 4, 3, (2,))
    some = every.select(range(0, len(every.rows), len(every.rows) // 40))
    assert not rows_that_differ(decoder_of(RULES[policy], length=3), RULES[policy], some)


@pytest.mark.parametrize(
    ("sampling", "limit", "eos_ids"), [("top_k", 5, ()), ("top_p", 3, (0, 2)), ("greedy", 5, (2,)), ("cold", 1, (2,))]
)
@pytest.mark.parametrize("policy", ["fixed_length", "ada_edl", "both_heads", "auto_online"])
def test_the_loop_counts_what_replay_counts_under_every_sampling_limit_and_eos(policy, sampling, limit, eos_ids):
    _, every = traced(sampling, limit, 2, eos_ids)
    some = every.select(range(0, len(every.rows), max(1, len(every.rows) // 30)))
    assert not rows_that_differ(
        decoder_of(RULES[policy], sampling=SAMPLINGS[sampling], eos_ids=eos_ids, length=2), RULES[policy], some
    )


def model_head(timing: str) -> AcceptanceHead:
    head = AcceptanceHead(16, 1, timing, True, timing != "prefix")
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return head.eval()


@pytest.mark.parametrize("temperature", [0.8, 0.0])
def test_models_in_float32_differ_from_replay_only_where_a_threshold_falls_between_last_bits(temperature):
    sampling = Sampling(temperature=temperature)
    recorded = trace(sampling).select(range(12))
    for policy in (
        FixedLength(3),
        AdaEDL(0.4),
        HeadPolicy(model_head("prefix"), 0.5),
        HeadPolicy(model_head("fed"), 0.5, also=model_head("drawn")),
    ):
        decoder = SpeculativeDecoder(
            model(1, 2),
            ModelDrafter(model(2), policy, vocab_size=VOCAB),
            sampling=sampling,
            max_draft_length=LENGTH,
            vocab_size=VOCAB,
        )
        assert decoder.eos_ids == {EOS}
        assert len(rows_that_differ(decoder, policy, recorded)) <= 1


def test_what_is_played_costs_the_draws_and_looks_of_a_loop_that_draws():
    _, every = traced("plain", 4, 3, (2,))
    number = int(np.flatnonzero([len(row.response_ids) == 4 for row in every.rows])[0])
    asked: list[float] = []
    played = PlayedSampler(every, number)
    passing = int(every.rejected[every.offsets[number]]) - int(every.offsets[number])
    assert played.num_accepted(asked.append(prob) or prob for prob in (0.1, 0.2, 0.3)) == min(passing, 3)
    assert len(asked) == min(passing + 1, 3)
    law = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    assert played.token(law) == every.rows[number].response_ids[min(passing, 3)]
    with pytest.raises(ValueError, match="not finite"):
        played.token(law * float("nan"))


def test_a_law_on_a_device_is_answered_with_a_tensor_of_the_recorded_token():
    _, every = traced("plain", 4, 3, (2,))
    law = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    for number in range(0, len(every.rows), 50):
        one, other = PlayedSampler(every, number), PlayedSampler(every, number)
        assert [int(one.draw(law)) for _ in range(2)] == [other.token(law) for _ in range(2)]

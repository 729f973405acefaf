"""A trace of likeliest drafts has the law of a loop that drafts them (law 4.10), exactly on toys; and a recorded one
says what its models say.
"""

from collections import defaultdict

import numpy as np
import pytest
import torch

from decode import SpeculativeDecoder
from decode.policies import CumulativeTokenProb, FixedLength, LlamaCpp
from decode.policies.registry import make_policy
from evaluation.flags.engines import ShortDrafts
from evaluation.traces.disk import Place, read_trace, write_trace
from evaluation.traces.replay import replay_settings
from lm import CachedModel, Sampler, Sampling
from tests.evaluation.flags.point_mass import PointMassDrafter
from tests.evaluation.traces.test_replay import COUNTED, Diary
from tests.toys.enumeration import ToyModel, assert_same_law, law_of
from tests.toys.loop import PROMPT, SAMPLINGS
from tests.toys.small_pair import EOS, LENGTH, LIMIT, PROMPTS, VOCAB, model, trace
from tests.toys.traces import EOS as TOY_EOS
from tests.toys.traces import Toys

LIKELIEST = Sampling(temperature=0)
WARM = Sampling(temperature=0.8, top_k=8)
RULES = {
    "fixed": FixedLength(2),
    "p_min": LlamaCpp(n_max=3, p_min=0.6),
    "n_min": ShortDrafts(n_max=3, n_min=2, p_min=0.6),
    "n_min_of_3": ShortDrafts(n_max=3, n_min=3, p_min=0.4),
    "product": CumulativeTokenProb(0.3),
    "diary": Diary(),
}


@pytest.mark.parametrize("eos_ids", [(), (TOY_EOS,), (0, 2)])
@pytest.mark.parametrize("sampling", ["plain", "top_k", "greedy"])
@pytest.mark.parametrize("rule", RULES)
def test_replay_has_the_law_of_a_loop_with_likeliest_drafts(rule, sampling, eos_ids):
    policy, law = RULES[rule], SAMPLINGS[sampling]
    toys = Toys(law, limit=4, length=3, eos_ids=eos_ids, draft_sampling=LIKELIEST)
    weights, traced = toys.trace()
    counts = replay_settings(traced, policy).counts
    replayed: dict[tuple[int, ...], float] = defaultdict(float)
    for weight, *numbers in zip(weights, *(getattr(counts, name)[0] for name in COUNTED), strict=True):
        replayed[tuple(map(int, numbers))] += weight
    drafter = PointMassDrafter(ToyModel(2), policy)
    decoder = SpeculativeDecoder(ToyModel(1), drafter, sampling=law, eos_ids=frozenset(eos_ids), max_draft_length=3)

    def play(draws: Sampler) -> tuple[int, ...]:
        counts = decoder.generate(PROMPT, 4, generator=draws).counts
        return tuple(getattr(counts, name) for name in COUNTED)

    assert_same_law(dict(replayed), law_of(play), tolerance=1e-9)


@pytest.fixture(scope="module")
def likeliest():
    """A trace of warm responses and likeliest drafts."""
    return trace(WARM, draft_sampling=LIKELIEST)


def test_a_recorded_token_is_accepted_where_the_draft_names_it(likeliest):
    assert likeliest.has_point_masses
    draft = CachedModel(model(2), vocab_size=VOCAB)
    for row in range(6):
        part = likeliest.select([row])
        prompt, response = list(part.rows[0].prompt_ids), list(part.rows[0].response_ids)
        draft.reset()
        logits = draft.forward(prompt + response[:-1], len(response))
        assert part.is_rejected.tolist() == (logits.argmax(-1) != torch.tensor(response)).tolist()
        firsts = part.token[part.branch[part.is_rejected]][part.branch_lengths > 0]
        at = part.is_rejected.nonzero()[0][part.branch_lengths > 0]
        assert firsts.tolist() == logits.argmax(-1)[torch.from_numpy(at)].tolist()


def test_the_acceptance_of_a_likeliest_token_is_the_targets_probability_of_it(likeliest):
    part = likeliest.select([0])
    target = CachedModel(model(1, 2), vocab_size=VOCAB)
    prompt, response = list(part.rows[0].prompt_ids), list(part.rows[0].response_ids)
    p = WARM.probs(target.forward(prompt + response[:-1], len(response)))
    accepted = (~part.is_rejected).nonzero()[0]
    expected = p[torch.from_numpy(accepted), torch.tensor(response)[torch.from_numpy(accepted)]]
    assert part.signals["acceptance_prob"][accepted] == pytest.approx(expected.numpy(), rel=1e-4)


@pytest.mark.parametrize("rule", ["fixed", "p_min", "n_min", "product"])
def test_at_temperature_0_replay_and_decoding_agree_prompt_by_prompt(rule):
    """There the ordinary trace is that of likeliest drafts."""
    policy = RULES[rule]
    counts = replay_settings(trace(LIKELIEST), policy).counts
    drafter = PointMassDrafter(model(2), policy, vocab_size=VOCAB)
    decoder = SpeculativeDecoder(
        model(1, 2), drafter, sampling=LIKELIEST, max_draft_length=LENGTH, eos_ids=frozenset({EOS})
    )
    for row, prompt in enumerate(PROMPTS[:20]):
        real = decoder.generate(prompt, LIMIT).counts
        assert [int(getattr(counts, name)[0, row]) for name in COUNTED] == [getattr(real, name) for name in COUNTED]


class ShortAndRemembering(ShortDrafts):
    """A rule that discards short drafts and learns from each round, which loop and replay would count differently."""

    def end(self, state, outcome):
        return state


@pytest.mark.parametrize(
    ("sampling", "policy"), [(WARM, ShortDrafts(n_min=np.array([0, 2]))), (LIKELIEST, ShortAndRemembering(n_min=2))]
)
def test_discarding_short_drafts_is_refused_where_replay_would_not_be_exact(sampling, policy):
    with pytest.raises(ValueError, match=r"drafts of fewer than 2 tokens.*likeliest"):
        replay_settings(trace(sampling), policy)


def test_no_loop_has_a_minimum_length():
    with pytest.raises(ValueError, match="llama_cpp has no parameter 'n_min'"):
        make_policy("llama_cpp", n_min=2)


def test_the_drafts_sampling_is_kept_on_disk(likeliest, tmp_path):
    write_trace(tmp_path, Place("small", "dev", 0), trace=likeliest, problems=[])
    (tmp_path / "manifest.json").write_text(
        '{"sampling": {"temperature": 0.8, "top_k": 8}, "draft_sampling": {"temperature": 0}, '
        f'"max_draft_length": {LENGTH}, "eos_ids": [{EOS}]}}'
    )
    assert read_trace(tmp_path, "small", "dev", 1).draft_sampling == LIKELIEST

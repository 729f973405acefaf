"""Blocks of a DSpark draft in the real loop: the laws of chains, at one forward of the draft a round."""

import pytest
import torch

from decode import TreeDrafter
from decode.policies import DSparkConfidence, FixedLength, HeadPolicy
from decode.policies.auto import Auto
from lm import Sampling, feature_model
from tests.cases import first_fast
from tests.decode.features import test_chains as chains
from tests.decode.features.test_chains import GREEDY, PROMPT, decoder_of, greedy
from tests.toys.enumeration import assert_same_law, seeded
from tests.toys.loop import OF_BLOCKS, POLICIES, SAMPLINGS, law
from tests.toys.observed import observed
from tests.toys.random_drafts import BLOCK, BLOCKS, TARGETS, draft, feature_head, target

WIDE = draft("rnn").hidden_size
HEADS = {f"{timing}_head": HeadPolicy(feature_head(timing, WIDE), 0.4) for timing in ("fed", "drawn", "prefix")}
BLOCK_S = {"t_draft_s": 0.0, "t_target_s": 1.0, "t_verify_s": 0.2, "t_start_s": 0.2}
HEADS |= {f"auto_{timing}": Auto(feature_head(timing, WIDE), **BLOCK_S) for timing in ("drawn", "prefix")}
HEADS["learning_head"] = HeadPolicy(feature_head("drawn", WIDE), 0.4, is_learning=True)
OWN = OF_BLOCKS | {"dspark_product": DSparkConfidence(0.2, is_product=True)}
EVERY = {name: policy for name, policy in POLICIES.items() if not policy.heads} | HEADS | OWN
FEW = ("dspark", "fixed_length", "auto_drawn")


@pytest.mark.parametrize("family", first_fast(TARGETS, 1))
@pytest.mark.parametrize("kind", BLOCKS)
def test_greedy_output_equals_transformers_generate(kind, family):
    decoder = decoder_of(kind, FixedLength(9), sampling=GREEDY, family=family)
    with observed(decoder) as seen:
        generation = decoder.generate(PROMPT, 40)
    seen.check(generation, len(PROMPT))
    assert list(generation.token_ids) == greedy(40, family)
    assert generation.rounds[0].drafted == ()
    assert {len(round_.drafted) for round_ in generation.rounds[1:-4]} == {BLOCK}, "a block is all that a round drafts"
    assert 0 < generation.counts.num_accepted < generation.counts.num_drafted


@pytest.mark.parametrize("policy", first_fast([*FEW, *(name for name in EVERY if name not in FEW)], 3))
def test_the_sampled_law_is_the_target_s_exactly_under_every_policy(policy):
    sampling = SAMPLINGS["top_k"]
    decoder = decoder_of("rnn", EVERY[policy], sampling=sampling)
    assert_same_law(law(decoder, 4, PROMPT), chains.target_law(sampling, 4), tolerance=1e-10)


@pytest.mark.parametrize("policy", ["fixed_length", "token_prob", "ada_edl", "prefix_head", "never_draft"])
def test_a_round_costs_one_forward_of_the_draft_whatever_is_kept_of_its_block(policy, monkeypatch):
    """Law 4.9 with the price of a block, counted where the draft runs."""
    ran, block = [], type(draft("rnn")).block
    monkeypatch.setattr(type(draft("rnn")), "block", lambda *args, **keys: ran.append(1) or block(*args, **keys))
    generation = decoder_of("rnn", EVERY[policy], sampling=Sampling()).generate(PROMPT, 30)
    assert generation.counts.num_draft_forwards == len(ran)
    for round_ in generation.rounds:
        assert round_.counts.num_draft_forwards == (len(round_.drafted) > 0) or round_.stop_reason == "policy"


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_block_that_is_read_at_its_end_is_the_same(kind):
    decoder = decoder_of(kind, FixedLength(3), sampling=Sampling())
    one = decoder.generate(PROMPT, 30, generator=seeded(2))
    decoder.drafter.reads_at_end = lambda: True  # as on an accelerator
    on_device = decoder.generate(PROMPT, 30, generator=seeded(2))
    assert (on_device.token_ids, on_device.counts) == (one.token_ids, one.counts)


@pytest.mark.parametrize("is_product", [False, True])
def test_a_block_is_kept_up_to_the_first_place_whose_confidence_is_below_the_threshold(is_product):
    """DeepSpec's rule, from the confidences of whole blocks; at 0 it keeps them."""
    policy, one = DSparkConfidence(0.4, is_product=is_product), draft("rnn")
    generation = decoder_of("rnn", policy, sampling=Sampling()).generate(PROMPT, 40, generator=seeded(1))
    committed, kept = [*PROMPT, *generation.rounds[0].emitted], set()
    for round_ in generation.rounds[1:-BLOCK]:
        tokens, num = torch.tensor([committed]), len(round_.drafted)
        with torch.inference_mode():
            output = target()(tokens, output_hidden_states=True)
            features = torch.cat([output.hidden_states[place] for place in one.target_layer_ids], -1)
            states = one.on_text(features, tokens, torch.tensor([[len(committed) - 1]]))[:, 0]
            previous = [committed[-1], *round_.drafted, *[0] * BLOCK][:BLOCK]
            confidences = one.confidence(one.joined(states, torch.tensor([previous])))[0].sigmoid()
        confidences = confidences.cumprod(0) if is_product else confidences
        assert (confidences[:num] >= 0.4).all()
        assert num == BLOCK or confidences[num] < 0.4
        kept.add(num)
        committed += round_.emitted
    assert len(kept) > 2
    whole, fixed = (
        decoder_of("rnn", policy, sampling=GREEDY).generate(PROMPT, 16)
        for policy in (DSparkConfidence(0.0, is_product), FixedLength(BLOCK))
    )
    assert whole.counts == fixed.counts


def test_confidences_of_a_draft_that_has_none_and_trees_of_blocks_are_refused():
    for kind in ("dflash", "eagle"):
        with pytest.raises(ValueError, match="has no confidence head"):
            decoder_of(kind, DSparkConfidence(), sampling=GREEDY)
    with pytest.raises(ValueError, match="one block, which is a chain"):
        TreeDrafter(feature_model(draft("rnn"), chains.tapped("rnn")), FixedLength(2))

"""Feature drafts in the real loop, as chains, trees and blocks: greedy is plain generation, sampled laws are exact."""

import pytest
import torch

from decode import ModelDrafter, PreVerifiedDrafter, SpeculativeDecoder, speculative_generate
from decode.drafters.trees import Shape, TreeDrafter, dynamic
from decode.policies import CumulativeTokenProb, DSparkConfidence, Entropy, FixedLength, HeadPolicy, Policy
from decode.policies.auto import Auto
from lm import CachedModel, Sampling
from tests.cases import first_fast
from tests.toys.enumeration import Law, assert_same_law, law_by, law_of, seeded
from tests.toys.loop import OF_BLOCKS, POLICIES, SAMPLINGS
from tests.toys.observed import observed
from tests.toys.random_drafts import BLOCK, BLOCKS, KINDS, PAIRS, TARGETS, WIDTH, beside, draft, feature_head, target
from tests.toys.random_pairs import greedy_of

PROMPT, GREEDY = [1, 2, 3], Sampling(temperature=0)
SHAPES = {"eagle": dynamic(3, 12), "eagle3": dynamic(3, 8), "reduced": dynamic(2, 4), "layers": dynamic(2, 6)}
SHAPES |= {"glide": Shape(((0.5, 3), (1.0, 2)))}


def decoder_of(
    kind: str, policy: Policy, *, sampling: Sampling, family: str = "llama", shape: Shape | None = None
) -> SpeculativeDecoder:
    verifier, model = beside(target(family), draft(kind, family), holds_trees=shape is not None)
    drafter = ModelDrafter(model, policy) if shape is None else TreeDrafter(model, policy, shape)
    return SpeculativeDecoder(verifier, drafter, sampling=sampling, eos_ids=frozenset())


def greedy(num_tokens: int, family: str = "llama") -> list[int]:
    return greedy_of(target(family), PROMPT, num_tokens)


@pytest.mark.parametrize(
    ("kind", "family"), [*PAIRS, *first_fast([(kind, family) for family in TARGETS for kind in BLOCKS], len(BLOCKS))]
)
def test_greedy_output_equals_transformers_generate(kind, family):
    decoder = decoder_of(kind, FixedLength(9 if kind in BLOCKS else 4), sampling=GREEDY, family=family)
    with observed(decoder, decoder.drafter.model) as seen:
        generation = decoder.generate(PROMPT, 40)
    seen.check(generation, len(PROMPT))
    assert list(generation.token_ids) == greedy(40, family)
    assert generation.rounds[0].drafted == ()
    assert 0 < generation.counts.num_accepted < generation.counts.num_drafted
    if kind in BLOCKS:
        assert {len(round_.drafted) for round_ in generation.rounds[1:-4]} == {BLOCK}, "a block is all that is drafted"
    else:
        assert generation.counts.num_drafted == seen.num_draft_forwards


def target_law(sampling: Sampling, num_tokens: int, family: str = "llama") -> Law:
    """No cache involved."""

    def probs(tokens: tuple[int, ...]) -> torch.Tensor:
        return sampling.probs(target(family)(torch.tensor([[*PROMPT, *tokens]]), use_cache=False).logits[0, -1])

    return law_by(probs, num_tokens)


def heads_of(width: int) -> dict[str, Policy]:
    return {f"{timing}_head": HeadPolicy(feature_head(timing, width), 0.4) for timing in ("fed", "drawn", "prefix")}


WIDE, BLOCK_S = draft("rnn").hidden_size, {"t_draft_s": 0.0, "t_target_s": 1.0, "t_verify_s": 0.2, "t_start_s": 0.2}
EVERY = {name: policy for name, policy in POLICIES.items() if not policy.heads} | OF_BLOCKS | heads_of(WIDE)
EVERY |= {f"auto_{timing}": Auto(feature_head(timing, WIDE), **BLOCK_S) for timing in ("drawn", "prefix")}
EVERY["learning_head"] = HeadPolicy(feature_head("drawn", WIDE), 0.4, is_learning=True)
EVERY["dspark_product"] = DSparkConfidence(0.2, is_product=True)
FEW = ("dspark", "auto_drawn", *(name for name in EVERY if name not in ("dspark", "auto_drawn", "fixed_length")))
LAWS = [("reduced", "llama", "tree"), ("mtp", "qwen3_next", None)]
LAWS += [(kind, "llama", None) for kind in ("eagle", "glide", "reduced", "layers", *BLOCKS)]
LAWS.append(("mtp", "deepseek_v3", None))


@pytest.mark.parametrize(
    ("kind", "family", "policy"),
    [*first_fast(LAWS, 4), *first_fast([("rnn", "llama", policy) for policy in FEW])],
)
def test_the_sampled_law_is_the_target_s_exactly(kind, family, policy):
    """For every draft, and for every policy. Of four tokens the second round drafts two, the other on the draft's own
    output.
    """
    sampling, shape = SAMPLINGS["top_k"], SHAPES["reduced"] if policy == "tree" else None
    decoder = decoder_of(kind, EVERY.get(policy, FixedLength(2)), sampling=sampling, family=family, shape=shape)
    num_tokens = 3 if kind in ("eagle", "glide") else 4
    tolerance = 1e-5 if kind == "mtp" else 1e-10  # layers of these targets compute in float32
    found = law_of(lambda draws: decoder.generate(PROMPT, num_tokens, generator=draws).token_ids)
    assert_same_law(found, target_law(sampling, num_tokens, family), tolerance=tolerance)


@pytest.mark.parametrize("kind", SHAPES)
def test_greedy_output_of_trees_equals_generate_and_the_draft_then_reads_what_it_reads_of_a_fresh_sequence(kind):
    decoder = decoder_of(kind, CumulativeTokenProb(0.2), sampling=GREEDY, shape=SHAPES[kind])
    generation = decoder.generate(PROMPT, 20)
    assert 0 < generation.counts.num_accepted < generation.counts.num_drafted
    assert list(generation.token_ids) == greedy(20)
    text = [*PROMPT, *generation.token_ids]
    fresh, model = beside(target(), draft(kind), holds_trees=True)
    fresh.feed(text[:-1])
    assert decoder.target.recorder.num_features == len(decoder.target) == len(text) - 1
    if kind != "glide":
        ours, expected = (model.recorder.features(0, len(text) - 1) for model in (decoder.target, fresh))
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-8)
    used = decoder.drafter.model
    torch.testing.assert_close(used.feed(text[len(used) :]), model.feed(text), rtol=0, atol=1e-8)


def test_every_policy_runs_unchanged_and_changes_no_greedy_token():
    fitting = [policy for policy in POLICIES.values() if not policy.heads] + [*heads_of(WIDTH).values()]
    generations = [decoder_of("reduced", policy, sampling=GREEDY).generate(PROMPT, 16) for policy in fitting]
    assert {generation.token_ids for generation in generations} == {tuple(greedy(16))}
    assert len({generation.counts.num_drafted for generation in generations}) > 4


@pytest.mark.parametrize("kind", first_fast([*KINDS, *BLOCKS]))
def test_a_middle_model_may_have_a_feature_draft_of_its_own(kind):
    middle, model = beside(target(), draft(kind))
    drafter = PreVerifiedDrafter(ModelDrafter(model, FixedLength(2)), middle, Entropy(0.5))
    decoder = SpeculativeDecoder(CachedModel(target("qwen2")), drafter, sampling=GREEDY, eos_ids=frozenset())
    assert list(decoder.generate(PROMPT, 20).token_ids) == greedy(20, "qwen2")


def test_a_batch_of_feature_drafts_is_refused_and_a_reduced_vocabulary_is_all_that_is_drafted():
    decoder = decoder_of("reduced", FixedLength(3), sampling=Sampling())
    with pytest.raises(ValueError, match="one prompt at a time"):
        decoder.generate_batch([PROMPT], 4)
    drafted = {token for seed in range(5) for one in decoder.generate(PROMPT, 20).rounds for token in one.drafted}
    assert drafted == {0, 2, 3, 6}


@pytest.mark.parametrize("kind", [*KINDS, "rnn"])
def test_generate_of_transformers_takes_a_feature_draft_of_its_model(kind):
    keywords = {"custom_generate": speculative_generate, "do_sample": False, "max_new_tokens": 20}
    keywords |= {"draft_model": draft(kind), "policy": FixedLength(3), "return_dict_in_generate": True}
    output = target("llama").generate(torch.tensor([PROMPT]), **keywords)
    assert output.sequences[0, len(PROMPT) :].tolist() == greedy(20)
    assert output.generation.counts.num_drafted > 0
    with pytest.raises(ValueError, match="of another target"):
        target("qwen2").generate(torch.tensor([PROMPT]), **keywords)


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
        TreeDrafter(beside(target(), draft("rnn"))[1], FixedLength(2))

"""Feature drafts as chains and trees in the real loop: greedy is plain generation, sampled laws are exact."""

import pytest
import torch

from decode import ModelDrafter, PreVerifiedDrafter, SpeculativeDecoder, speculative_generate
from decode.drafters.trees import Cape, Dynamic, Shape, TreeDrafter
from decode.policies import CumulativeTokenProb, Entropy, FixedLength, HeadPolicy, Policy
from lm import CachedModel, Sampling, feature_model
from lm.features.recorder import FeatureRecorder
from tests.cases import first_fast
from tests.toys.enumeration import assert_same_law, law_of
from tests.toys.loop import POLICIES, SAMPLINGS, BothHeads, Law
from tests.toys.observed import observed
from tests.toys.random_drafts import BLOCKS, KINDS, PAIRS, VOCAB, WIDTH, draft, feature_head, target
from tests.toys.random_pairs import greedy_of

PROMPT, GREEDY = [1, 2, 3], Sampling(temperature=0)
SHAPES = {"eagle": Dynamic(3, 12), "eagle3": Dynamic(3, 8), "reduced": Dynamic(2, 4), "layers": Dynamic(2, 6)}
SHAPES |= {"glide": Cape(((0.5, 3), (1.0, 2)))}


def tapped(kind: str, family: str = "llama", *, holds_trees: bool = False) -> CachedModel:
    recorder = FeatureRecorder(target(family), draft(kind, family))
    return CachedModel(target(family), recorder=recorder, holds_trees=holds_trees)


def decoder_of(
    kind: str, policy: Policy, *, sampling: Sampling, family: str = "llama", shape: Shape | None = None
) -> SpeculativeDecoder:
    verifier = tapped(kind, family, holds_trees=shape is not None)
    model = feature_model(draft(kind, family), verifier)
    drafter = ModelDrafter(model, policy) if shape is None else TreeDrafter(model, policy, shape)
    return SpeculativeDecoder(verifier, drafter, sampling=sampling, eos_ids=frozenset())


def greedy(num_tokens: int, family: str = "llama") -> list[int]:
    return greedy_of(target(family), PROMPT, num_tokens)


@pytest.mark.parametrize(("kind", "family"), PAIRS)
def test_greedy_output_equals_transformers_generate(kind, family):
    decoder = decoder_of(kind, FixedLength(4), sampling=GREEDY, family=family)
    with observed(decoder, decoder.drafter.model) as seen:
        generation = decoder.generate(PROMPT, 40)
    seen.check(generation, len(PROMPT))
    assert list(generation.token_ids) == greedy(40, family)
    assert generation.rounds[0].drafted == ()
    assert 0 < generation.counts.num_accepted < generation.counts.num_drafted == seen.num_draft_forwards


def target_law(sampling: Sampling, num_tokens: int, family: str = "llama") -> Law:
    """Products of the target's probabilities, no cache involved."""
    open_ = {(): 1.0}
    for _ in range(num_tokens):
        grown = {}
        for tokens, probability in open_.items():
            with torch.no_grad():
                logits = target(family)(torch.tensor([[*PROMPT, *tokens]]), use_cache=False).logits[0, -1]
            probs = sampling.probs(logits).tolist()
            grown |= {(*tokens, token): probability * prob for token, prob in enumerate(probs) if prob > 0}
        open_ = grown
    return open_


MORE = [("mtp", "qwen3_next", 4), ("mtp", "deepseek_v3", 4)]
MORE += [(kind, "llama", 4) for kind in ("reduced", "layers", *BLOCKS)]


@pytest.mark.parametrize(
    ("kind", "family", "num_tokens"),
    [("eagle", "llama", 3), ("glide", "llama", 3), ("tree", "llama", 4), *first_fast(MORE, 1)],
)
def test_the_sampled_law_is_the_target_s_exactly(kind, family, num_tokens):
    """Of four tokens the second round drafts two, the other on the draft's own output."""
    sampling, shape = SAMPLINGS["top_k"], SHAPES["reduced"] if kind == "tree" else None
    decoder = decoder_of("reduced" if shape else kind, FixedLength(2), sampling=sampling, family=family, shape=shape)
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
    fresh = tapped(kind, holds_trees=True)
    fresh.feed(text[:-1])
    assert decoder.target.recorder.num_features == len(decoder.target) == len(text) - 1
    if kind != "glide":
        ours, expected = (model.recorder.features(0, len(text) - 1) for model in (decoder.target, fresh))
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-8)
    model, used = feature_model(draft(kind), fresh), decoder.drafter.model
    torch.testing.assert_close(used.feed(text[len(used) :]), model.feed(text), rtol=0, atol=1e-8)


HEADS = {f"{timing}_head": HeadPolicy(feature_head(timing), 0.4) for timing in ("fed", "drawn", "prefix")}
HEADS["both_heads"] = BothHeads((feature_head("fed"), feature_head("drawn")), 0.4)


def test_every_policy_runs_unchanged_and_changes_no_greedy_token():
    known = (POLICIES | HEADS).values()
    fitting = [policy for policy in known if all(head.hidden_size == WIDTH for head in policy.heads)]
    generations = [decoder_of("reduced", policy, sampling=GREEDY).generate(PROMPT, 16) for policy in fitting]
    assert {generation.token_ids for generation in generations} == {tuple(greedy(16))}
    assert len({generation.counts.num_drafted for generation in generations}) > 4


@pytest.mark.parametrize("kind", first_fast([*KINDS, *BLOCKS]))
def test_a_middle_model_may_have_a_feature_draft_of_its_own(kind):
    middle = tapped(kind)
    inner = ModelDrafter(feature_model(draft(kind), middle), FixedLength(2))
    drafter = PreVerifiedDrafter(inner, middle, Entropy(0.5))
    decoder = SpeculativeDecoder(CachedModel(target("qwen2")), drafter, sampling=GREEDY, eos_ids=frozenset())
    assert list(decoder.generate(PROMPT, 20).token_ids) == greedy(20, "qwen2")


def test_a_batch_of_feature_drafts_is_refused_and_a_reduced_vocabulary_is_all_that_is_drafted():
    decoder = decoder_of("reduced", FixedLength(3), sampling=Sampling())
    with pytest.raises(ValueError, match="one prompt at a time"):
        decoder.generate_batch([PROMPT], 4)
    drafted = {token for seed in range(5) for one in decoder.generate(PROMPT, 20).rounds for token in one.drafted}
    assert drafted == {0, 2, 3, 6} < set(range(VOCAB))


@pytest.mark.parametrize("kind", [*KINDS, "rnn"])
def test_generate_of_transformers_takes_a_feature_draft_of_its_model(kind):
    keywords = {"custom_generate": speculative_generate, "do_sample": False, "max_new_tokens": 20}
    keywords |= {"draft_model": draft(kind), "policy": FixedLength(3), "return_dict_in_generate": True}
    output = target("llama").generate(torch.tensor([PROMPT]), **keywords)
    assert output.sequences[0, len(PROMPT) :].tolist() == greedy(20)
    assert output.generation.counts.num_drafted > 0
    with pytest.raises(ValueError, match="of another target"):
        target("qwen2").generate(torch.tensor([PROMPT]), **keywords)

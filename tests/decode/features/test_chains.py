"""Chains of feature drafts through the real loop: greedy equals plain generation, sampled laws are exact, every policy
runs unchanged.
"""

import pytest
import torch

from decode import ModelDrafter, PreVerifiedDrafter, SpeculativeDecoder, speculative_generate
from decode.policies import Entropy, FixedLength, HeadPolicy, Policy
from lm import CachedModel, Sampling, feature_model
from lm.features.recorder import FeatureRecorder
from tests.cases import first_fast
from tests.toys.enumeration import assert_same_law
from tests.toys.loop import POLICIES, SAMPLINGS, law
from tests.toys.observed import observed
from tests.toys.random_drafts import BLOCKS, KINDS, PAIRS, VOCAB, WIDTH, draft, feature_head, target

PROMPT = [1, 2, 3]


def decoder_of(
    kind: str, policy: Policy, *, sampling: Sampling, family: str = "llama", eos_ids=()
) -> SpeculativeDecoder:
    tapped = CachedModel(target(family), recorder=FeatureRecorder(target(family), draft(kind, family)))
    drafter = ModelDrafter(feature_model(draft(kind, family), tapped), policy)
    return SpeculativeDecoder(tapped, drafter, sampling=sampling, eos_ids=frozenset(eos_ids))


def greedy(num_tokens: int, family: str = "llama") -> list[int]:
    ids = target(family).generate(torch.tensor([PROMPT]), do_sample=False, max_new_tokens=num_tokens)
    return ids[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize(("kind", "family"), PAIRS)
def test_greedy_output_equals_transformers_generate(kind, family):
    decoder = decoder_of(kind, FixedLength(4), sampling=Sampling(temperature=0), family=family)
    with observed(decoder, decoder.drafter.model) as seen:
        generation = decoder.generate(PROMPT, 40)
    seen.check(generation, len(PROMPT))
    assert list(generation.token_ids) == greedy(40, family)
    assert generation.rounds[0].drafted == ()
    assert 0 < generation.counts.num_accepted < generation.counts.num_drafted == seen.num_draft_forwards


def target_law(sampling: Sampling, num_tokens: int, family: str = "llama") -> dict[tuple[int, ...], float]:
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


@pytest.mark.parametrize(
    ("kind", "family", "num_tokens"),
    [
        *(("eagle", "llama", 3), ("glide", "llama", 3), ("mtp", "qwen3_next", 4)),
        *first_fast(
            (
                ("reduced", "llama", 4),
                ("layers", "llama", 4),
                *((kind, "llama", 4) for kind in BLOCKS),
                ("mtp", "deepseek_v3", 4),
            ),
            0,
        ),
    ],
)
def test_the_sampled_law_is_the_target_s_exactly(kind, family, num_tokens):
    """Of four tokens the second round drafts two, the other on the draft's own output; each token more is eight times
    the branches.
    """
    sampling = SAMPLINGS["top_k"]
    decoder = decoder_of(kind, FixedLength(2), sampling=sampling, family=family)
    tolerance = 1e-5 if kind == "mtp" else 1e-10  # layers of these targets compute in float32
    assert_same_law(law(decoder, num_tokens, PROMPT), target_law(sampling, num_tokens, family), tolerance=tolerance)


HEADS = {f"{timing}_head": HeadPolicy(feature_head(timing), 0.4) for timing in ("fed", "drawn", "prefix")}
HEADS["both_heads"] = HeadPolicy(feature_head("fed"), 0.4, also=feature_head("drawn"))


@pytest.mark.parametrize("kind", ["reduced"])
def test_every_policy_runs_unchanged_and_changes_no_greedy_token(kind):
    expected = greedy(16)
    lengths = set()
    for policy in (POLICIES | HEADS).values():
        if any(head.hidden_size != WIDTH for head in policy.heads):
            continue
        generation = decoder_of(kind, policy, sampling=Sampling(temperature=0)).generate(PROMPT, 16)
        assert list(generation.token_ids) == expected
        lengths.add(generation.counts.num_drafted)
    assert len(lengths) > 4


@pytest.mark.parametrize("kind", first_fast([*KINDS, *BLOCKS]))
def test_a_middle_model_may_have_a_feature_draft_of_its_own(kind):
    middle = CachedModel(target(), recorder=FeatureRecorder(target(), draft(kind)))
    inner = ModelDrafter(feature_model(draft(kind), middle), FixedLength(2))
    drafter = PreVerifiedDrafter(inner, middle, Entropy(0.5))
    outer = target("qwen2")
    decoder = SpeculativeDecoder(CachedModel(outer), drafter, sampling=Sampling(temperature=0), eos_ids=frozenset())
    assert list(decoder.generate(PROMPT, 20).token_ids) == greedy(20, "qwen2")


def test_a_batch_of_feature_drafts_is_refused():
    decoder = decoder_of("eagle", FixedLength(2), sampling=Sampling())
    with pytest.raises(ValueError, match="one prompt at a time"):
        decoder.generate_batch([PROMPT], 4)


def test_the_vocabulary_of_a_reduced_draft_is_all_that_it_names():
    decoder = decoder_of("reduced", FixedLength(3), sampling=Sampling())
    drafted = {token for seed in range(5) for one in decoder.generate(PROMPT, 20).rounds for token in one.drafted}
    assert drafted == {0, 2, 3, 6} < set(range(VOCAB))


@pytest.mark.parametrize("kind", [*KINDS, "rnn"])
def test_generate_of_transformers_takes_a_feature_draft_of_its_model(kind):
    keywords = {"custom_generate": speculative_generate, "do_sample": False, "max_new_tokens": 20}
    ids = torch.tensor([PROMPT])
    output = target("llama").generate(
        ids, draft_model=draft(kind), policy=FixedLength(3), **keywords, return_dict_in_generate=True
    )
    assert output.sequences[0, len(PROMPT) :].tolist() == greedy(20)
    assert output.generation.counts.num_drafted > 0
    with pytest.raises(ValueError, match="of another target"):
        target("qwen2").generate(ids, draft_model=draft(kind), **keywords)

"""`generate(custom_generate=speculative_generate)` means what plain `generate` means, and leaves nothing behind."""

import gc
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GraniteConfig, StoppingCriteria, StoppingCriteriaList

from decode import SpeculativeOutput, speculative_generate
from decode.policies import Entropy, FixedLength, HeadPolicy
from heads import AcceptanceHead, Provenance
from lm import CachedModel
from tests.toys.enumeration import assert_same_law, law_of
from tests.toys.random_pairs import IDS, SIZES, random_pair
from tests.toys.small_pair import llama

PROMPT = torch.tensor([[3, 1, 4, 1, 5]])
SMALL = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}


@pytest.mark.parametrize(
    "policy", [None, FixedLength(4), Entropy(0.6), HeadPolicy(AcceptanceHead(16, 1, "drawn", True))]
)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"no_repeat_ngram_size": 2, "min_new_tokens": 8, "eos_token_id": [7, 9]},
        {"bad_words_ids": [[2], [4]], "repetition_penalty": 1.3, "eos_token_id": 11},
    ],
)
def test_greedy_output_under_processors_equals_plain_generate(policy, settings):
    target, draft = (model.to(torch.float64 if settings else torch.float32) for model in random_pair("llama"))
    settings |= {"do_sample": False, "max_new_tokens": 30}
    expected = target.generate(PROMPT, **settings)
    ours = target.generate(PROMPT, custom_generate=speculative_generate, draft_model=draft, policy=policy, **settings)
    assert ours.tolist() == expected.tolist()


def test_sampled_output_has_exactly_the_law_of_plain_generate():
    """Enumerated: temperature, top-k, repetition penalty and a minimum length, on random models over four tokens."""
    config = llama(**SMALL, vocab_size=4, bos_token_id=0, eos_token_id=3)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        target, draft = (AutoModelForCausalLM.from_config(config).double().eval() for _ in range(2))
        for parameter in (*target.parameters(), *draft.parameters()):
            torch.nn.init.normal_(parameter)
    settings = {"do_sample": True, "temperature": 1.5, "top_k": 2, "repetition_penalty": 1.4}
    settings |= {"min_new_tokens": 1, "max_new_tokens": 3}
    ours = {"custom_generate": speculative_generate, "draft_model": draft, "policy": FixedLength(2)}
    prompt = torch.tensor([[0, 1]])

    def play(draws):
        return tuple(target.generate(prompt, generator=draws, **ours, **settings)[0, 2:].tolist())

    processors = target.generate(
        prompt, custom_generate=lambda model, input_ids, logits_processor, **_: logits_processor, **settings
    )
    expected, open_ = {}, {(): 1.0}
    for _ in range(3):
        grown = {}
        for tokens, probability in open_.items():
            ids = torch.tensor([[0, 1, *tokens]])
            with torch.no_grad():
                probs = processors(ids, target(ids).logits[:, -1].float()).softmax(-1)[0]
            for token, prob in enumerate(probs.tolist()):
                if prob > 0:
                    (expected if token == 3 else grown)[(*tokens, token)] = probability * prob
        open_ = grown
    assert_same_law(law_of(play), expected | open_, tolerance=1e-5)


class _After(StoppingCriteria):
    """Stops once `token` was emitted."""

    def __init__(self, token):
        self.token = token

    def __call__(self, input_ids, scores, **_):
        return input_ids[:, -1] == self.token


def test_stopping_criteria_end_the_output_at_their_token():
    target, draft = random_pair("gpt2")
    plain = target.generate(PROMPT, do_sample=False, max_new_tokens=20)[0].tolist()
    criteria = StoppingCriteriaList([_After(plain[12])])
    settings = {"do_sample": False, "max_new_tokens": 20, "stopping_criteria": criteria}
    expected = target.generate(PROMPT, **settings)
    settings |= {"custom_generate": speculative_generate, "draft_model": draft, "return_dict_in_generate": True}
    ours = target.generate(PROMPT, **settings)
    assert isinstance(ours, SpeculativeOutput)
    assert ours.sequences.tolist() == expected.tolist()
    counts, rounds = ours.generation.counts, ours.generation.rounds
    assert counts.num_emitted == expected.shape[1] - PROMPT.shape[1]
    num_discarded = sum(len(played.drafted) + 1 - len(played.emitted) for played in rounds)
    assert counts.num_drafted + counts.num_target == counts.num_emitted + num_discarded
    assert (counts.num_discarded, counts.num_target) == (num_discarded, len(rounds))


TRAINED = {"sampling": {"temperature": 1.0, "top_k": None, "top_p": None}}
OTHER_SAMPLING = r"trained for sampling .*'temperature': 1.0.* allow_foreign_heads"


@pytest.mark.parametrize(
    ("provenance", "settings", "problem"),
    [
        (TRAINED, {"do_sample": False}, OTHER_SAMPLING),
        (TRAINED, {"do_sample": True}, "'top_k': 50"),
        ({"draft": {"name": "another", "hidden_size": 24}}, {"do_sample": False}, "the draft"),
        (TRAINED, {"do_sample": True, "top_k": 0}, None),
        ({}, {"do_sample": False}, None),
        (TRAINED, {"do_sample": False, "allow_foreign_heads": True}, None),
    ],
)
def test_a_head_that_was_trained_for_something_else_is_refused_unless_it_is_allowed(provenance, settings, problem):
    """Law 4.1."""
    target, draft = random_pair("llama")
    policy = HeadPolicy(AcceptanceHead(16, 1, "drawn", True, provenance=Provenance(**provenance)))
    given: dict[str, Any] = {"custom_generate": speculative_generate, "draft_model": draft, "policy": policy}
    given |= settings | {"max_new_tokens": 4}
    if problem is None:
        assert target.generate(PROMPT, **given).shape[1] > 5
    else:
        with pytest.raises(ValueError, match=problem):
            target.generate(PROMPT, **given)


class _Fails(StoppingCriteria):
    def __call__(self, input_ids, scores, **_):
        raise RuntimeError("a criterion's own mistake")


def test_nothing_of_a_generation_stays_behind():
    """With a head, and a draft that is more than its halves (it scales its logits), so that states are caught."""
    target, _ = random_pair("llama")
    config = GraniteConfig(**SIZES, **IDS, intermediate_size=32, logits_scaling=2.0)
    draft = AutoModelForCausalLM.from_config(config).double().eval()
    settings = {"custom_generate": speculative_generate, "draft_model": draft, "do_sample": False, "max_new_tokens": 12}
    settings["policy"] = HeadPolicy(AcceptanceHead(16, 1, "drawn", True))

    def num_left() -> tuple[int, int]:
        gc.collect()
        modules = [*target.modules(), *draft.modules()]
        num_hooks = sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in modules)
        return sum(isinstance(each, CachedModel) for each in gc.get_objects()), num_hooks

    before = num_left()
    for _ in range(2):
        target.generate(PROMPT, **settings)
        with pytest.raises(RuntimeError, match="own mistake"):
            target.generate(PROMPT, stopping_criteria=StoppingCriteriaList([_Fails()]), **settings)
    assert num_left() == before

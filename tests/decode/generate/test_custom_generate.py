"""`generate(custom_generate=speculative_generate)` means what plain `generate` means, under processors, warpers and
stopping criteria.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

from decode import SpeculativeOutput, speculative_generate
from decode.policies import Entropy, FixedLength, HeadPolicy
from heads import AcceptanceHead
from tests.toys.enumeration import assert_same_law, law_of
from tests.toys.random_pairs import random_pair
from tests.toys.small_pair import llama

PROMPT = torch.tensor([[3, 1, 4, 1, 5]])


@pytest.mark.parametrize(
    "policy", [None, FixedLength(4), Entropy(0.6), HeadPolicy(AcceptanceHead(16, 1, "drawn", True))]
)
@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.8},
        {"no_repeat_ngram_size": 2, "min_new_tokens": 8, "eos_token_id": [7, 9]},
        {"bad_words_ids": [[2], [4]], "repetition_penalty": 1.3, "eos_token_id": 11},
    ],
)
def test_greedy_output_under_processors_equals_plain_generate(policy, settings):
    target, draft = random_pair("llama")
    settings |= {"do_sample": False, "max_new_tokens": 30}
    expected = target.generate(PROMPT, **settings)
    ours = target.generate(PROMPT, custom_generate=speculative_generate, draft_model=draft, policy=policy, **settings)
    assert ours.tolist() == expected.tolist()


def test_sampled_output_has_exactly_the_law_of_plain_generate():
    """Enumerated: temperature, top-k, repetition penalty and a minimum length, on random models over four tokens."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = llama(**sizes, vocab_size=4, bos_token_id=0, eos_token_id=3)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        target, draft = (AutoModelForCausalLM.from_config(config).double().eval() for _ in range(2))
        for parameter in (*target.parameters(), *draft.parameters()):
            torch.nn.init.normal_(parameter)
    settings = {
        "do_sample": True,
        "temperature": 1.5,
        "top_k": 2,
        "repetition_penalty": 1.4,
        "min_new_tokens": 1,
        "max_new_tokens": 3,
    }
    prompt = torch.tensor([[0, 1]])

    def play(draws):
        output = target.generate(
            prompt,
            custom_generate=speculative_generate,
            draft_model=draft,
            policy=FixedLength(2),
            generator=draws,
            **settings,
        )
        return tuple(output[0, 2:].tolist())

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
    token = plain[12]
    settings = {"do_sample": False, "max_new_tokens": 20, "stopping_criteria": StoppingCriteriaList([_After(token)])}
    expected = target.generate(PROMPT, **settings)
    ours = target.generate(
        PROMPT, custom_generate=speculative_generate, draft_model=draft, return_dict_in_generate=True, **settings
    )
    assert isinstance(ours, SpeculativeOutput)
    assert ours.sequences.tolist() == expected.tolist()
    counts, rounds = ours.generation.counts, ours.generation.rounds
    assert counts.num_emitted == expected.shape[1] - PROMPT.shape[1]
    num_discarded = sum(len(played.drafted) + 1 - len(played.emitted) for played in rounds)
    assert counts.num_drafted + counts.num_target == counts.num_emitted + num_discarded
    assert (counts.num_discarded, counts.num_target) == (num_discarded, len(rounds))


def test_a_draft_with_fewer_or_more_ids_than_the_target_is_lossless_where_they_share_those_in_use():
    target, _ = random_pair("llama")
    expected = target.generate(PROMPT, do_sample=False, max_new_tokens=12)
    num_used = int(expected.max()) + 1
    for width, vocab_size in ((44, None), (num_used, num_used), (44, num_used)):
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
        config = llama(**sizes, vocab_size=width)
        draft = AutoModelForCausalLM.from_config(config).eval()
        settings = {"draft_model": draft, "vocab_size": vocab_size, "do_sample": False, "max_new_tokens": 12}
        ours = target.generate(PROMPT, custom_generate=speculative_generate, **settings)
        assert ours.tolist() == expected.tolist()

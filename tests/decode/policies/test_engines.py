"""Engines' rules do what the engines do: transformers' against its own generations, llama.cpp's by hand."""

import pytest
import torch
from transformers import PreTrainedModel

from configs.schema import ModelSource
from decode import ModelDrafter, SpeculativeDecoder
from decode.policies import Assisted, LlamaCpp
from lm import Sampling, load_model
from tests.cases import first_fast
from tests.evaluation.flags.point_mass import PointMassDrafter

GREEDY = Sampling(temperature=0)
PROMPTS = [[5, 17, 33, 60 + i, 12, 9 + i] for i in range(4)]
TOKENS = 40
CONFIDENT = Assisted(8, 0.7)
SETTINGS = [Assisted(), Assisted(5, 0.0), CONFIDENT, Assisted(3, 0.0, is_heuristic=True)]
SETTINGS.append(Assisted(4, 0.6, is_heuristic=True))


@pytest.fixture(scope="module")
def pair() -> tuple[PreTrainedModel, PreTrainedModel]:
    sources = (ModelSource(path=f"checkpoints/tiny/{name}", dtype="float32") for name in ("target", "draft"))
    target, draft = map(load_model, sources)
    return target, draft


def drafts_of_transformers(pair, policy: Assisted, prompt: list[int]) -> tuple[list[int], list[int]]:
    """(tokens drafted in each round, the text) of transformers' own greedy assisted generation."""
    target, draft = pair
    fed: list[int] = []
    settings = {
        "num_assistant_tokens": policy.num_assistant_tokens,
        "num_assistant_tokens_schedule": "heuristic_transient" if policy.is_heuristic else "constant",
        "assistant_confidence_threshold": policy.assistant_confidence_threshold,
    }
    counting = target.register_forward_pre_hook(
        lambda model, args, kwargs: fed.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    with counting, pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setattr(draft.generation_config, name, value)
        ids = torch.tensor([prompt])
        how = {"attention_mask": torch.ones_like(ids), "max_new_tokens": TOKENS, "do_sample": False}
        text = target.generate(ids, assistant_model=draft, **how)
    fed[0] -= len(prompt) - 1
    return [count - 1 for count in fed], text[0, len(prompt) :].tolist()


@pytest.mark.parametrize("policy", first_fast(SETTINGS))
def test_transformers_rule_drafts_what_transformers_drafts(policy, pair):
    target, draft = pair
    decoder = SpeculativeDecoder(target, ModelDrafter(draft, policy), sampling=GREEDY)
    lengths = set()
    for prompt in PROMPTS:
        generation = decoder.generate(prompt, TOKENS)
        expected, text = drafts_of_transformers(pair, policy, prompt)
        assert list(generation.token_ids) == text
        assert [len(played.drafted) for played in generation.rounds] == expected
        lengths.update(expected)
    assert len(lengths) > 1


def test_llama_cpp_drops_the_token_below_p_min_and_pays_its_forward(pair):
    """Every kept token is at least p_min likely among the ten likeliest, and the next one is not."""
    target, draft = pair
    decoder = SpeculativeDecoder(target, PointMassDrafter(draft, LlamaCpp(n_max=6, p_min=0.7)), sampling=GREEDY)
    committed, reasons = list(PROMPTS[0]), set()
    for played in decoder.generate(PROMPTS[0], TOKENS).rounds:
        with torch.inference_mode():
            logits = draft(torch.tensor([[*committed, *played.drafted]])).logits[0, len(committed) - 1 :]
        top = logits.topk(10).values.softmax(-1)[:, 0].tolist()
        num = len(played.drafted)
        assert all(prob >= 0.7 for prob in top[:num])
        if played.stop_reason == "policy":
            assert top[num] < 0.7
            assert played.counts.num_draft_forwards == num + 1
        elif played.stop_reason == "limit" and num:
            assert played.counts.num_draft_forwards == num
        reasons.add(played.stop_reason)
        committed += played.emitted
    assert {"policy", "limit"} <= reasons

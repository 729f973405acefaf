"""One family or two of every kind of cache; the whole table is `python -m tests.conformance`."""

import pytest
import torch
from transformers import PretrainedConfig

from decode.loop.decoder import SpeculativeDecoder
from decode.loop.drafter import ModelDrafter
from decode.policies.plain import FixedLength
from lm import CachedModel, Sampling
from lm.forwards import eos_ids_of
from tests.conformance import checks
from tests.conformance.checks import SHORT, plain, stranger
from tests.conformance.families import FAMILIES, Family, build

EXACT = [
    "llama (grouped queries)", "gpt2 (learned positions)", "gpt_neox (partial rotary)", "bloom (ALiBi)",
    "mixtral (experts)", "deepseek_v3", "mistral", "gemma2 (soft-capped logits)", "gemma3_text",
    "qwen2 (max_window_layers)", "gpt_oss (sinks, experts)", "llama4_text",
    "lfm2", "mamba", "mamba2", "jamba", "falcon_h1 (both in each layer)", "qwen3_next", "glm_moe_dsa", "gemma3n_text",
]  # fmt: skip
SECOND_OF_THEIR_KIND = {"jamba", "gemma3n_text"}
REFUSED = {
    "rwkv": "ignores the cache",
    "openai-gpt": "ignores the cache",
    "recurrent_gemma": "differ",
    "xlstm": "fails",
    "minimax": "fails",
    "doge (few keys kept)": "keeps 6 keys of texts up to 256 tokens",
    "deepseek_v32 (few index heads)": "indexer of 4 heads keeps 4 keys",
}
BY_NAME = {family.name: family for family in FAMILIES}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SECOND_OF_THEIR_KIND else name for name in EXACT]
)
def test_speculative_output_is_plain_generates(name):
    checks.assert_exact(build(BY_NAME[name]), SHORT)


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_whose_cache_is_not_to_be_trusted_is_refused_with_one_line(name):
    refusal = checks.refusal_of(build(BY_NAME[name]))
    assert refusal is not None
    assert REFUSED[name] in refusal
    assert "\n" not in refusal


@pytest.mark.parametrize(
    "kind", [int, lambda id_: [39, id_], lambda id_: (id_, 39), lambda id_: torch.tensor([id_, 39])]
)
def test_generation_ends_at_any_of_the_models_eos_ids_however_they_are_given(kind):
    model = build(Family("llama", "full", {}))
    expected = plain(model, [5, 9, 3], 12)
    last, config = expected[4], PretrainedConfig()
    model.generation_config.eos_token_id, model.config.eos_token_id = None, [39, last]
    assert last in CachedModel(model).eos_ids
    model.generation_config.eos_token_id = config.eos_token_id = kind(last)
    assert last in eos_ids_of(config)
    drafter, greedy = ModelDrafter(stranger(), FixedLength(3)), Sampling(temperature=0.0)
    for target in (model, CachedModel(model)):
        decoder = SpeculativeDecoder(target, drafter, sampling=greedy)
        assert list(decoder.generate([5, 9, 3], 12).token_ids) == expected[: expected.index(last) + 1]

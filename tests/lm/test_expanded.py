"""Function-preserving expansion: not a bit of the output moves, caches get their layers, and what cannot be expanded is
refused.
"""

from functools import partial

import pytest
import torch

from configs.schema import ModelSource
from data_gen.store.identity import describe_model
from lm import CachedModel, CompiledModel, expanded, load_model, make_cache
from lm.expanded import expand
from tests.conformance.families import FAMILIES, VOCAB_SIZE, build

BY_NAME = {family.name: family for family in FAMILIES}
EXPANDED = [
    "llama (grouped queries)",
    "qwen2",
    "mistral",
    "gemma2 (soft-capped logits)",
    "gpt_neox (partial rotary)",
    "gpt_oss (sinks, experts)",
]
STATIC = ["llama (grouped queries)", "gemma2 (soft-capped logits)", "gpt_neox (partial rotary)"]
REFUSED = {
    "recurrent_gemma": "output changes",
    "gemma3n_text": "fails with them",
    "rwkv": "output changes",
    "xlstm": "fails without",
}
TOKENS = [(7 * place + place * place) % VOCAB_SIZE for place in range(30)]
FEEDS = ((0, 12, 3), (12, 13, 1), (10, 14, 4), (14, 30, 2))
"""(length to roll back to, length to feed up to, rows to look at)."""


def loaded(tmp_path, name, *, extra_layers, dtype="float32"):
    directory = tmp_path / "model"
    if not directory.exists():
        build(BY_NAME[name]).save_pretrained(directory)
    return load_model(ModelSource(path=str(directory), dtype=dtype, device_map="cpu", extra_layers=extra_layers))


def rows_of(model, kind):
    """Logits and final hidden states of a few forwards through the cache."""
    cached = kind(model, with_hidden=True)
    for start, end, num_rows in FEEDS:
        cached.roll_back(start)
        yield cached.forward(TOKENS[:end], num_rows).clone()
        yield cached.hidden.clone()


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float32") for name in EXPANDED), *((name, "bfloat16") for name in STATIC)]
)
def test_no_bit_of_logits_or_hidden_states_moves(name, dtype, tmp_path):
    plain, slow = (loaded(tmp_path, name, extra_layers=extra, dtype=dtype) for extra in (0, 3))
    assert slow.config.num_hidden_layers == plain.config.num_hidden_layers + 3
    assert all(
        torch.equal(ours, expected)
        for ours, expected in zip(rows_of(slow, CachedModel), rows_of(plain, CachedModel), strict=True)
    )


@pytest.mark.parametrize("name", STATIC)
def test_a_static_cache_gives_the_same_bits(name, tmp_path, monkeypatch):
    """Left uncompiled: shape checks do not compile."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    plain, slow = (loaded(tmp_path, name, extra_layers=extra) for extra in (0, 3))
    kind = partial(CompiledModel, capacity=48)
    assert all(
        torch.equal(ours, expected) for ours, expected in zip(rows_of(slow, kind), rows_of(plain, kind), strict=True)
    )


@pytest.mark.parametrize("name", EXPANDED)
def test_every_layer_is_called_and_has_a_cache_of_its_own(name, tmp_path):
    model = loaded(tmp_path, name, extra_layers=3)
    cache = make_cache(model, 8)
    model(input_ids=torch.tensor([[1, 2, 3]]), past_key_values=cache)
    assert len(cache.layers) == model.config.num_hidden_layers
    assert [layer.get_seq_length() for layer in cache.layers] == [3] * len(cache.layers)


def test_new_layers_are_copies_in_memory_of_their_own_but_for_the_zeros(tmp_path):
    layers = loaded(tmp_path, "llama (grouped queries)", extra_layers=3).model.layers
    for place, layer in enumerate(layers[2:], 2):
        for (name, new), old in zip(layer.named_parameters(), layers[place % 2].parameters(), strict=True):
            assert new.data_ptr() != old.data_ptr()
            assert torch.equal(
                new, torch.zeros_like(old) if name.endswith(("o_proj.weight", "down_proj.weight")) else old
            )
        assert layer.self_attn.config is layers[0].self_attn.config


def test_data_and_traces_know_the_model_as_the_same(tmp_path):
    loaded(tmp_path, "llama (grouped queries)", extra_layers=0)
    plain, slow = (ModelSource(path=str(tmp_path / "model"), extra_layers=extra) for extra in (0, 3))
    assert describe_model(plain) == describe_model(slow)


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_would_change_is_refused_with_one_line(name):
    with pytest.raises(ValueError, match=REFUSED[name]) as refusal:
        expand(build(BY_NAME[name]), 3)
    assert "leave out extra_layers" in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_branch_that_does_not_end_in_zeros_is_noticed(monkeypatch):
    monkeypatch.setattr(expanded, "_OUTPUTS", frozenset({"o_proj"}))
    with pytest.raises(ValueError, match="its output changes"):
        expand(build(BY_NAME["llama (grouped queries)"]), 1)


def test_a_negative_number_of_layers_is_refused():
    with pytest.raises(ValueError, match="extra_layers is -1"):
        expand(build(BY_NAME["llama (grouped queries)"]), -1)

"""A model with a cache: its body and LM head give the forward of the whole, and caches hold what was fed."""

from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from threading import Barrier

import pytest
import torch
from transformers import AutoModelForCausalLM, ElectraConfig, Gemma2Config, GPT2Config, Llama4TextConfig, LlamaConfig

from decode.loop.decoder import SpeculativeDecoder
from decode.loop.drafter import ModelDrafter
from decode.policies.plain import FixedLength
from lm import CachedModel, Sampling
from lm.cache import insert_rows, make_cache, widen
from lm.forwards import body_and_lm_head, check_outputs, hidden_states, logits_of, recorded
from tests.toys.small_pair import SIZES

LLAMA = LlamaConfig(**SIZES, num_key_value_heads=2)
GPT2 = GPT2Config(vocab_size=20, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=1)
GEMMA = Gemma2Config(**SIZES, num_key_value_heads=2, head_dim=8, final_logit_softcapping=0.5, sliding_window=4)
LLAMA_4 = Llama4TextConfig(**SIZES, num_key_value_heads=2, head_dim=8, intermediate_size_mlp=16, num_local_experts=2)
TOKENS = [1, 2, 3, 4, 5, 6, 7]


def model_of(config):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).double().eval()


@pytest.mark.parametrize(("config", "has_halves"), [(LLAMA, True), (GPT2, True), (LLAMA_4, True), (GEMMA, False)])
def test_models_are_taken_apart_only_where_nothing_follows_the_head(config, has_halves):
    """Llama 4 is its own base model."""
    model = model_of(config)
    assert (body_and_lm_head(model) is not None) == has_halves
    states, expected = hidden_states(model, [TOKENS], [0]), model(torch.tensor([TOKENS])).logits[0].detach()
    torch.testing.assert_close(logits_of(model, states, 40), expected)
    cached = CachedModel(model)
    cached.keep_hidden()
    for length in (3, 5, 6, 7):
        logits = cached.feed(TOKENS[len(cached) : length], 1 if length == 3 else length - len(cached))
        hidden = cached.hidden
        with torch.no_grad():
            expected = model(torch.tensor([TOKENS[:length]]), output_hidden_states=True)
        torch.testing.assert_close(logits, expected.logits[0, -len(logits) :], rtol=0, atol=1e-12)
        torch.testing.assert_close(hidden, expected.hidden_states[-1][0, -len(logits) :], rtol=0, atol=1e-12)


def test_layers_between_hidden_states_and_the_output_layer_decode_and_yield_no_labels():
    sizes = {name: size for name, size in SIZES.items() if name in ElectraConfig().to_dict()}
    model = model_of(ElectraConfig(**sizes, embedding_size=8, is_decoder=True))
    logits = CachedModel(model).feed(TOKENS, 2)
    torch.testing.assert_close(logits, model(torch.tensor([TOKENS])).logits[0, -2:].detach())
    with pytest.raises(ValueError, match="hidden states of 16 numbers and its output layer, which takes 8"):
        check_outputs(model, SIZES["vocab_size"], "target")


@pytest.mark.parametrize("kind", ["heads", "features"])
def test_two_threads_on_one_model_read_their_own_hidden_states(kind):
    """Both are inside a forward at once, where one's hooks saw the other's states."""
    model, meeting = model_of(GEMMA), Barrier(2)
    texts = [TOKENS, TOKENS[::-1]]

    def states_of(text):
        if kind == "heads":
            cached = CachedModel(model)
            cached.keep_hidden()
            cached.feed(text, len(text))
            return cached.hidden
        with torch.inference_mode(), recorded([model.model.layers[0]]) as seen:
            model(torch.tensor([text]))
        return seen[0]

    expected = [states_of(text) for text in texts]
    for module in (model.model.layers[1], model.lm_head):
        module.register_forward_hook(lambda *_: [meeting.wait(20), None][1])
    with ThreadPoolExecutor(2) as pool:
        states = list(pool.map(states_of, texts))
    for own, alone in zip(states, expected, strict=True):
        torch.testing.assert_close(own, alone, rtol=0, atol=0)


def doubled(name):
    def double(_module, _inputs, output):
        setattr(output, name, 2 * getattr(output, name))
        return output

    return double


def with_another_forward(model):
    before, double = model.forward, doubled("logits")
    # as `model.forward = torch.compile(model.forward)` does
    model.forward = wraps(before)(lambda *args, **kwargs: double(model, args, before(*args, **kwargs)))


CHANGES = {
    "another head": lambda model: model.set_output_embeddings(torch.nn.Linear(16, 20, bias=False, dtype=torch.float64)),
    "a hook on the body": lambda model: model.base_model.register_forward_hook(doubled("last_hidden_state")),
    "a hook on the whole": lambda model: model.register_forward_hook(doubled("logits")),
    "another forward": with_another_forward,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_has_been_changed_is_taken_as_it_is_now(change):
    model = model_of(LLAMA)
    CachedModel(model).feed(TOKENS[:3])
    kept = CachedModel(model)
    CHANGES[change](model)
    for cached in (CachedModel(model), kept):
        cached.reset()
        for length in (3, 5):
            with torch.no_grad():
                expected = model(torch.tensor([TOKENS[:length]])).logits[0, -1:]
            torch.testing.assert_close(cached.feed(TOKENS[len(cached) : length]), expected, rtol=0, atol=1e-12)


def test_positions_go_on_beyond_the_first_that_were_prepared():
    model, tokens = model_of(LLAMA), [1 + place % 19 for place in range(600)]
    cached = CachedModel(model)
    cached.feed(tokens[:300])
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0, -300:]
    torch.testing.assert_close(cached.feed(tokens[300:], 300), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("place", [0, 1])
def test_a_layer_that_does_not_hold_what_was_fed_is_named(place):
    cached = CachedModel(model_of(GEMMA))
    cached.feed([1, 2, 3])
    cached.cache.layers[place].length -= 1
    with pytest.raises(AssertionError, match=rf"layer {place} .* holds 3 tokens and the model has 4"):
        cached.feed([4])


@pytest.mark.parametrize("config", [LLAMA, GEMMA])
def test_a_sequence_that_takes_the_place_of_another_is_as_if_alone(config):
    model, gone, long, short = model_of(config), torch.arange(13, 19), torch.arange(1, 7), torch.arange(7, 11)
    cache, new = make_cache(model, 7), make_cache(model, 4)
    with torch.no_grad():
        model(torch.stack([gone, long]), past_key_values=cache)
        model(short[None], past_key_values=new)
        insert_rows(cache, new, torch.tensor([0]), 2)
        mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
        places = {"attention_mask": mask, "position_ids": torch.tensor([[4], [6]]), "past_key_values": cache}
        ours = model(torch.tensor([[11], [12]]), **places).logits[:, 0]
        rows = [torch.cat([row, torch.tensor([token])])[None] for row, token in ((short, 11), (long, 12))]
        alone = torch.stack([model(row).logits[0, -1] for row in rows])
        torch.testing.assert_close(ours, alone, rtol=0, atol=1e-6)
        cache.reorder_cache(torch.tensor([0]))
        for layer in cache.layers:
            layer.drop_first(2)
        places |= {"attention_mask": torch.ones(1, 6).long(), "position_ids": torch.tensor([[5]])}
        ours = model(torch.tensor([[12]]), **places)
        alone = model(torch.cat([short, torch.tensor([11, 12])])[None])
        torch.testing.assert_close(ours.logits[0, 0], alone.logits[0, -1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("capacity", [16, 7])
@pytest.mark.parametrize("num_dropped", [0, 1, 2])
@pytest.mark.parametrize("config", [LLAMA, GEMMA])
def test_a_longer_sequence_takes_the_place_of_another_once_the_cache_is_widened(config, num_dropped, capacity):
    """Rows of 4 positions, of which some are dropped; a sequence of 7 joins, with room to the left or without."""
    model, gone, short, long = model_of(config), torch.arange(13, 17), torch.arange(7, 11), torch.arange(1, 8)
    cache, new = make_cache(model, 8), make_cache(model, 7)
    num_kept = 4 - num_dropped
    mask = torch.tensor([[1] * 4, [0] * num_dropped + [1] * num_kept])
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        model(torch.stack([gone, short]), attention_mask=mask, position_ids=places, past_key_values=cache)
        model(long[None], past_key_values=new)
        for layer in cache.layers:
            layer.drop_first(num_dropped)
        widen(cache, 7, capacity)
        insert_rows(cache, new, torch.tensor([0]), 2)
        mask = torch.tensor([[1] * 8, [0] * (7 - num_kept) + [1] * (num_kept + 1)])
        how = {"attention_mask": mask, "position_ids": torch.tensor([[7], [num_kept]]), "past_key_values": cache}
        ours = model(torch.tensor([[11], [12]]), **how).logits[:, 0]
        rows = [torch.cat([row, torch.tensor([token])])[None] for row, token in ((long, 11), (short[num_dropped:], 12))]
        alone = torch.stack([model(row).logits[0, -1] for row in rows])
    torch.testing.assert_close(ours, alone, rtol=0, atol=1e-6)
    assert cache.layers[0].capacity == max(capacity, 8)


@pytest.mark.parametrize("rows", [[2, 0], [0, 2], [1, 2]])
@pytest.mark.parametrize("config", [LLAMA, GEMMA])
def test_sequences_that_leave_a_batch_leave_the_others_as_they_were(config, rows):
    model, tokens = model_of(config), torch.arange(1, 19).view(3, 6)
    cache = make_cache(model, 2)
    with torch.no_grad():
        model(tokens[:, :5], past_key_values=cache)
        cache.reorder_cache(torch.tensor(rows))
        logits = model(tokens[rows, 5:], past_key_values=cache).logits[:, -1]
        torch.testing.assert_close(logits, model(tokens[rows]).logits[:, -1], rtol=0, atol=1e-6)


def test_a_decoder_goes_on_after_its_models_have_changed_their_dtype():
    model = model_of(LLAMA)
    greedy = {"sampling": Sampling(temperature=0.0), "eos_ids": frozenset()}
    decoder = SpeculativeDecoder(CachedModel(model), ModelDrafter(model, FixedLength(3)), **greedy)
    first = decoder.generate([1, 2, 3], 8).token_ids
    model.float()
    assert decoder.generate([1, 2, 3], 8).token_ids == first
    decoder.target.reset()
    assert decoder.target.feed([1, 2, 3]).dtype == torch.float32

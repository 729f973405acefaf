"""Caches that hold what the model was fed, whatever is done to either."""

import pytest
import torch

from decode.loop.decoder import SpeculativeDecoder
from decode.loop.drafter import ModelDrafter
from decode.policies.plain import FixedLength
from lm import CachedModel, Sampling
from lm.cache import insert_rows, make_cache
from tests.lm.test_body_and_lm_head import GEMMA, LLAMA, model_of


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

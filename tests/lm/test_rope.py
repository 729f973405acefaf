"""A text on one side of a change of rotary frequencies is read as by plain `generate`; one on both is refused."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from configs.schema import ModelSource
from data_gen.labels.branches import check_branches
from decode import ModelDrafter, SpeculativeDecoder
from decode.drafters.pearl import PearlDecoder
from decode.drafters.trees import TreeDrafter
from decode.policies import FixedLength
from lm import CachedModel, Sampling
from lm.forwards import hidden_states, logits_of
from lm.pair import without_weights
from lm.rope import rope_switch_of
from tests.toys.longrope import BOUND, KINDS, model_of, said_by_generate, text_of
from tests.toys.random_pairs import greedy_of

CLOSE = {"rtol": 0, "atol": 1e-5}
"""generate gives its logits in float32."""
GREEDY = {"sampling": Sampling(temperature=0.0), "eos_ids": frozenset()}
SIDES = {"near": (5, BOUND - 5), "far": (BOUND + 2, 12)}
"""(tokens of the prompt, new tokens), the last of which is never fed."""
ACROSS = [(5, BOUND - 3), (BOUND, 2), (BOUND + 1, 2)]
LOOPS = {
    "chains": lambda kind: SpeculativeDecoder(model_of(kind), ModelDrafter(draft_of(kind), FixedLength(4)), **GREEDY),
    "trees": lambda kind: SpeculativeDecoder(model_of(kind), TreeDrafter(draft_of(kind), FixedLength(3)), **GREEDY),
    "pearl": lambda kind: PearlDecoder(model_of(kind), draft_of(kind), gamma=3, **GREEDY),
}


def draft_of(kind):
    """Right about half of the time."""
    return model_of(kind, noise=0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_a_config_alone_tells_the_frequencies_and_layers_that_change_at_two_lengths_are_refused(kind, tmp_path):
    model_of(kind).config.save_pretrained(tmp_path)
    assert rope_switch_of(without_weights(ModelSource(path=str(tmp_path)))) == rope_switch_of(model_of(kind))
    assert rope_switch_of(model_of(kind)).bound == BOUND
    model = model_of("llama", seed=5)
    rope = model_of("llama").config.rope_parameters
    model.config.rope_parameters = {"one": rope, "other": rope | {"original_max_position_embeddings": 2 * BOUND}}
    with pytest.raises(ValueError, match=f"at {BOUND} and {2 * BOUND} tokens"):
        rope_switch_of(model)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_text_on_one_side_is_that_of_generate_and_one_on_both_is_refused(kind, loop):
    decoder = LOOPS[loop](kind)
    for num_prompt, length in SIDES.values():
        prompt = text_of(num_prompt)
        assert list(decoder.generate(prompt, length).token_ids) == greedy_of(model_of(kind), prompt, length)
    for num_prompt, length in ACROSS:
        with pytest.raises(ValueError, match=f"context of {BOUND}; shorten the prompt") as refusal:
            decoder.generate(text_of(num_prompt), length)
        assert "\n" not in str(refusal.value)


def test_a_draft_drafts_up_to_its_own_change_and_the_target_goes_on():
    target = model_of("llama", seed=3)
    target.config.rope_parameters = {"rope_type": "default", "rope_theta": 1e4}
    plain = LlamaForCausalLM(target.config).double().eval()
    decoder = SpeculativeDecoder(plain, ModelDrafter(model_of("llama"), FixedLength(4)), **GREEDY)
    generation = decoder.generate(text_of(8), 20)
    assert list(generation.token_ids) == greedy_of(plain, text_of(8), 20)
    assert [len(played.drafted) for played in generation.rounds][-3:] == [0, 0, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_batches_hold_one_side(kind):
    decoder = LOOPS["chains"](kind)
    for lengths, new in (((4, 7), BOUND - 7), ((BOUND + 2, 20, 30), 12)):
        prompts = [text_of(length, seed=length) for length in lengths]
        generations = decoder.generate_batch(prompts, new, batch_size=2)
        expected = [greedy_of(model_of(kind), ids, new) for ids in prompts]
        assert [list(each.token_ids) for each in generations] == expected
    with pytest.raises(ValueError, match=r"on both sides.*decode the long ones apart"):
        decoder.generate_batch([text_of(4), text_of(30)], 3)


@pytest.mark.parametrize("kind", KINDS)
def test_whole_texts_on_either_side_have_the_laws_of_generate_in_one_batch(kind):
    model = model_of(kind)
    rows = [text_of(length, seed=length) for length in (BOUND, 30, 9, BOUND + 8)]
    starts = [BOUND - 6, 24, 3, BOUND + 2]
    states = hidden_states(model, rows, starts)
    pairs = zip(rows, starts, strict=True)
    expected = [said_by_generate(model, row[: start + 1], row[start + 1 :]) for row, start in pairs]
    torch.testing.assert_close(logits_of(model, states, 40), torch.cat(expected).double(), **CLOSE)
    for start in (3, BOUND - 1):
        with pytest.raises(ValueError, match=f"beyond {BOUND} .*lower data.max_prompt_tokens"):
            hidden_states(model, [text_of(9), text_of(BOUND + 1)], [3, start])
    with pytest.raises(ValueError, match=f"prompt, response and branch have {BOUND + 1} tokens"):
        check_branches(model, BOUND + 1, num_prompt=BOUND)


def test_dynamic_frequencies_are_refused_beyond_the_context_and_cost_nothing_below():
    sizes = {"num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1}
    config = LlamaConfig(**sizes, vocab_size=40, max_position_embeddings=BOUND)
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    model, text = LlamaForCausalLM(config).eval(), text_of(BOUND + 1)
    cached = CachedModel(model)
    expected = said_by_generate(model, text[:4], text[4:BOUND])
    torch.testing.assert_close(cached.feed(text[:BOUND], BOUND - 3), expected, **CLOSE)
    cached.reset()
    for refused in (lambda: cached.feed(text), lambda: hidden_states(model, [text], [BOUND])):
        with pytest.raises(ValueError, match=r"beyond 16 \(rope_type dynamic\)"):
            refused()

"""A forward never gives other laws than plain `generate` where rotary frequencies change with the length of the
text.
"""

import os
import shutil
import subprocess
import sys

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from configs.schema import ModelSource
from lm import CachedModel
from lm.branches.probe import check_length
from lm.forwards import hidden_states, logits_of
from lm.frequencies import frequencies_of
from lm.models.seats import Ask, Seats
from lm.pair import without_weights
from lm.trees.cached import TreeModel
from lm.trees.tree import Tree
from tests.toys.longrope import BOUND, KINDS, model_of, said_by_generate, text_of

CLOSE = {"rtol": 0, "atol": 1e-5}
"""generate gives its logits in float32."""
PROMPTS = (10, BOUND - 1, BOUND, BOUND + 1, 20)


@pytest.mark.parametrize("kind", KINDS)
def test_whether_a_text_is_read_again_is_what_generate_does(kind):
    found = frequencies_of(model_of(kind))
    assert (found.bound, found.reads_again, found.is_dynamic) == (BOUND, kind in ("phi3", "phimoe"), False)
    assert (
        frequencies_of(
            LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, hidden_size=8, vocab_size=8, num_attention_heads=1))
        )
        is None
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_config_alone_tells_the_frequencies_that_the_weights_tell(kind, tmp_path):
    model_of(kind).config.save_pretrained(tmp_path)
    assert frequencies_of(without_weights(ModelSource(path=str(tmp_path)))) == frequencies_of(model_of(kind))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_prompt", PROMPTS)
def test_rows_of_one_forward_across_the_bound_are_those_of_generate(kind, num_prompt):
    model, text = model_of(kind), text_of(num_prompt + 9)
    cached = CachedModel(model, with_hidden=True)
    expected = said_by_generate(model, text[:num_prompt], text[num_prompt:]).double()
    cached.reset()
    torch.testing.assert_close(cached.forward(text, 10), expected, **CLOSE)
    with torch.inference_mode():
        torch.testing.assert_close(model.lm_head(cached.hidden), expected, **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_prompt", PROMPTS)
def test_rolling_back_over_the_bound_leaves_the_laws_of_generate(kind, num_prompt):
    model, text, other = model_of(kind), text_of(num_prompt + 9), text_of(5, seed=1)
    cached = CachedModel(model)
    expected = said_by_generate(model, text[:num_prompt], text[num_prompt:]).double()
    cached.reset()
    for length in range(num_prompt, len(text) + 1):
        rows = cached.forward([*text[:length], *other], 6)
        torch.testing.assert_close(rows[0], expected[length - num_prompt], **CLOSE)
        assert len(cached) == length + 5
        cached.roll_back(length)


@pytest.mark.parametrize("kind", KINDS[2:])
@pytest.mark.parametrize("num_prompt", PROMPTS)
def test_tokens_that_stay_on_the_device_have_the_laws_of_generate(kind, num_prompt):
    model, text = model_of(kind), text_of(num_prompt + 5)
    expected = said_by_generate(model, text[:num_prompt], text[num_prompt:]).double()
    cached = CachedModel(model)
    rows = [
        cached.forward(text[:num_prompt]),
        *(cached.forward_drawn(torch.tensor([token])) for token in text[num_prompt:]),
    ]
    assert not cached.reads_again(num_prompt, len(text))
    torch.testing.assert_close(torch.cat(rows), expected, **CLOSE)


def test_a_model_that_reads_again_says_where_the_host_must_know_all_tokens():
    cached = CachedModel(model_of("phi3"))
    assert cached.reads_again(BOUND, BOUND + 1)
    assert not cached.reads_again(BOUND - 5, BOUND)
    assert not cached.reads_again(BOUND + 1, BOUND + 9)


@pytest.mark.parametrize("kind", ["phi3", "llama"])
def test_rows_of_a_batch_are_those_of_generate_beside_any_other(kind):
    """Short, crossing and long rows in one batch; each is rolled back by one and goes on."""
    model = model_of(kind)
    prompts = [text_of(length, seed=length) for length in (4, BOUND - 2, BOUND, BOUND + 1, 30)]
    texts = [[*prompt, *text_of(6, seed=2)] for prompt in prompts]
    expected = [
        said_by_generate(model, prompt, text[len(prompt) :]).double()
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    seats = Seats(CachedModel(model), len(prompts))
    for num_drafted in (3, 4, 6):
        asks = [
            Ask(seat, text[: len(prompt) + num_drafted], len(prompt) + num_drafted - max(len(seat), len(prompt) - 1))
            for seat, prompt, text in zip(seats.seats, prompts, texts, strict=True)
        ]
        for ask, rows, told, prompt in zip(asks, seats.forward(asks), expected, prompts, strict=True):
            end = len(ask.token_ids) - len(prompt) + 1
            torch.testing.assert_close(rows, told[end - ask.num_rows : end], **CLOSE)
            ask.seat.roll_back(len(ask.token_ids) - 2)


@pytest.mark.parametrize("kind", ["phi3", "llama"])
@pytest.mark.parametrize("num_text", [8, BOUND + 2, 50])
def test_a_tree_on_one_side_of_the_bound_has_the_laws_of_generate(kind, num_text):
    model, text, tree = model_of(kind), text_of(num_text), Tree((5, 6, 7, 8), (-1, -1, 0, 2))
    rows = TreeModel(model).forward_tree(text, tree)
    for node in range(len(tree)):
        path = tree.tokens_of(tree.path(node))
        torch.testing.assert_close(rows[1 + node], said_by_generate(model, text, path)[-1].double(), **CLOSE)


@pytest.mark.parametrize("num_text", [BOUND - 2, BOUND, BOUND + 1])
def test_a_tree_on_both_sides_of_the_bound_is_refused(num_text):
    with pytest.raises(
        ValueError, match=f"Phi3ForCausalLM changes the rotary frequencies .* beyond {BOUND} .*: draft chains"
    ):
        TreeModel(model_of("phi3")).forward_tree(text_of(num_text), Tree((5, 6, 7), (-1, 0, 1)))


@pytest.mark.parametrize("kind", ["phi3", "phimoe", "llama"])
def test_whole_texts_on_either_side_of_the_bound_have_the_laws_of_generate_in_one_batch(kind):
    model = model_of(kind)
    rows = [text_of(length, seed=length) for length in (BOUND, 30, 9, BOUND + 8)]
    starts = [BOUND - 6, 24, 3, BOUND + 2]
    states = hidden_states(model, rows, starts)
    expected = torch.cat(
        [said_by_generate(model, row[: start + 1], row[start + 1 :]) for row, start in zip(rows, starts, strict=True)]
    )
    torch.testing.assert_close(logits_of(model, states, 40), expected.double(), **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_text_across_the_bound_is_refused_with_one_line(kind):
    for start in (3, BOUND - 1):
        with pytest.raises(ValueError, match=f"beyond {BOUND} .*lower data.max_prompt_tokens") as refusal:
            hidden_states(model_of(kind), [text_of(9), text_of(BOUND + 1)], [3, start])
        assert "\n" not in str(refusal.value)
    with pytest.raises(ValueError, match=f"prompt, response and branch have {BOUND + 1} tokens"):
        check_length(model_of(kind), BOUND + 1, num_prompt=BOUND)
    check_length(model_of(kind), BOUND, num_prompt=4)
    check_length(model_of(kind), 40, num_prompt=BOUND + 1)


def test_layers_that_change_at_two_lengths_are_refused():
    model = model_of("llama", seed=5)
    rope = model.config.rope_parameters
    model.config.rope_parameters = {"one": rope, "other": rope | {"original_max_position_embeddings": 2 * BOUND}}
    with pytest.raises(ValueError, match=f"at {BOUND} and {2 * BOUND} tokens"):
        frequencies_of(model)


def test_dynamic_frequencies_are_refused_beyond_the_context_and_cost_nothing_below():
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    config = LlamaConfig(
        num_hidden_layers=1,
        hidden_size=8,
        intermediate_size=8,
        vocab_size=40,
        num_attention_heads=1,
        max_position_embeddings=BOUND,
    )
    config.rope_parameters = rope
    model, text = LlamaForCausalLM(config).eval(), text_of(BOUND + 1)
    cached = CachedModel(model)
    expected = said_by_generate(model, text[:4], text[4:BOUND])
    torch.testing.assert_close(cached.forward(text[:BOUND], BOUND - 3), expected, **CLOSE)
    cached.reset()
    for refused in (lambda: cached.forward(text), lambda: hidden_states(model, [text], [BOUND])):
        with pytest.raises(ValueError, match=r"beyond 16 \(rope_type dynamic\)"):
            refused()


SCRIPT = """
import torch
from tests.toys.longrope import BOUND, model_of, text_of
from lm import CachedModel, CompiledModel
tail = lambda logits, hidden, fed: (logits.clone(), fed.clone())
for kind in ("phi3", "llama"):
    model = model_of(kind)
    compiled, plain = CompiledModel(model, capacity=18), CachedModel(model)
    for num_prompt in (BOUND - 6, BOUND, BOUND + 1):
        text = text_of(num_prompt + 12)
        compiled.reset(), plain.reset()
        for length, num_rows in ((0, 1), (2, 1), (5, 3), (8, 3), (11, 3)):
            rows = [each.forward(text[: num_prompt + length], num_rows) for each in (compiled, plain)]
            torch.testing.assert_close(*rows, rtol=0, atol=1e-5)
            for each in (compiled, plain):
                each.roll_back(num_prompt + length - 1)
        compiled.reset(), plain.reset()
        for length in range(0, 12, 2):
            ours, fed = compiled.forward_then(text[: num_prompt + length], tail)
            torch.testing.assert_close(ours, plain.forward(text[: num_prompt + length]), rtol=0, atol=1e-5)
            assert fed.tolist() == [text[num_prompt + length - 1]]
print("alike")
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for the CPU with g++")
def test_compiled_forwards_across_the_bound_are_the_eager_ones():
    path = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    found = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=env, check=False)
    assert found.stdout.split()[-1:] == ["alike"], found.stderr[-2000:]

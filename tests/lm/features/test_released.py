"""Released directories: every layout computes what its formula says, in 8 bits too; what does not fit is refused."""

from contextlib import suppress
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn import functional

from configs import ModelSource
from lm.features.loading import feature_draft_of
from lm.features.released import max_positions_of, released_layout_of, width_of
from lm.linears import EightBitLinear
from tests.lm.features import released_by_hand as by_hand
from tests.lm.features.released_by_hand import D2T, LAYOUTS, T2D, Truth, released, write
from tests.toys.random_drafts import VOCAB, WIDTH, beside, target


def loaded(source: ModelSource):
    return feature_draft_of(source, target())


def written(directory, layout: str, keys: dict | None = None, tensors: dict | None = None) -> ModelSource:
    """A directory whose config and tensors are changed; ... leaves one out."""
    config, own = (
        {name: value for name, value in (table | (changed or {})).items() if value is not ...}
        for table, changed in zip(released(layout), (keys, tensors), strict=True)
    )
    return ModelSource(path=str(write(directory, config, own)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_directory_written_by_hand_computes_what_its_formula_says(layout, tmp_path):
    config, tensors = released(layout)
    source = ModelSource(path=str(write(tmp_path, config, tensors)))
    draft = loaded(source)
    assert released_layout_of(source) == by_hand.KINDS[layout]
    assert max_positions_of(source) == draft.config.max_position_embeddings
    tapped, model = beside(target(), draft)
    committed, drafted = [1, 2, 3, 4, 5], [6, 0]
    tapped.feed(committed[:-1])
    truth = Truth(target(), committed[:-1])
    for end in (5, 6, 7):
        tokens = (committed + drafted)[:end]
        logits, known = model.feed(tokens[len(model) :])[0], {"truth": truth, "tokens": tokens, "num_known": 4}
        plain, confidence = by_hand.expected(layout, config, tensors, **known)
        # norms and rotary embeddings are float32, as Llama's
        torch.testing.assert_close(logits, plain, rtol=0, atol=1e-5)
        assert width_of(source) == model.hidden_size == model.hidden.shape[-1]
        if getattr(draft, "confidence_head", None):
            torch.testing.assert_close(model.confidence()[0], confidence, rtol=0, atol=1e-5)


def test_numbers_are_as_stored_or_as_asked_and_rotary_frequencies_are_not_rounded(tmp_path):
    source = written(tmp_path, "glide", {}, {name: value.bfloat16() for name, value in released("glide")[1].items()})
    for dtype, expected_dtype in (("auto", torch.bfloat16), ("float64", torch.float64)):
        draft = loaded(replace(source, dtype=dtype))
        assert {parameter.dtype for parameter in draft.parameters()} == {expected_dtype}
        assert {buffer.dtype for buffer in draft.buffers()} == {torch.float32}


def test_the_layout_of_a_language_model_is_none(tmp_path):
    target().save_pretrained(tmp_path)
    for path in (tmp_path, tmp_path / "nothing"):
        assert released_layout_of(ModelSource(path=str(path))) is None


CONFIDENT = {"enable_confidence_head": True, "confidence_head_with_markov": True}
SLIDING = {"layer_types": ["full_attention", "sliding_attention"]}
REQUIRED = ("block_size", "markov_rank", "enable_confidence_head", "num_target_layers")
WRONG_KEYS = [
    # layout, keys that are written in config.json instead (...: left out), message
    ("eagle", {"hidden_size": 32}, "hidden_size 32, and this one has 16"),
    ("eagle", {"hidden_act": "sillu"}, "hidden_act is 'sillu'"),
    ("eagle", {"hidden_size": 2**62}, "hidden_size is 4611686018427387904; write a"),
    ("eagle", {"rope_theta": "x"}, "rope_theta is 'x'; write a number above 0"),
    ("eagle3", {"vocab_size": 9}, "vocab_size 9, and this one has 7"),
    ("eagle3", {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, r"layers \[1, 2, 9\]"),
    ("eagle3", {"eagle_aux_hidden_state_layer_ids": ["a", 2, 3]}, r"layers \['a', 2, 3\]"),
    ("eagle3", {"eagle_aux_hidden_state_layer_ids": None}, "whole numbers from 0, the embedding, to 2"),
    ("eagle3", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "a part of each head"),
    ("eagle3", {"rope_scaling": {"rope_type": "spiral"}}, "spiral"),
    ("eagle3", {"num_attention_heads": 0}, "num_attention_heads is 0; write a whole number"),
    ("eagle3", {"architectures": ["PEagleDraftModel"]}, "of the kind P-EAGLE"),
    ("eagle3", {"eagle_config": {"use_aux_hidden_state": False}}, "eagle_config is .*three of the target's states"),
    ("eagle3", {"model_type": "mamba"}, "model_type mamba"),
    ("glide", {"large_hidden_size": 32}, "is 32, and the target's keys have 16"),
    ("glide", {"large_num_attention_heads": 2}, "num_attention_heads 2, and this one has 4"),
    ("speculators", {"num_hidden_layers": "x"}, "num_hidden_layers is 'x'"),
    ("speculators", {"speculators_model_type": "peagle"}, "of the kind speculators' peagle"),
    ("speculators", {"speculators_model_type": "xpress"}, "of the kind speculators' xpress"),
    ("speculators", {"norm_before_residual": ...}, "norm_before_residual"),
    ("speculators_dspark", {"markov_head_type": "rnn"}, "sample_from_anchor is False; it must be true"),
    ("specforge_dflash", {"architectures": ["DominoDraftModel"]}, "of the kind Domino"),
    ("specforge_dflash", {"dflash_config": {"projector_type": "mlp"}}, "of the kind mlp"),
    ("specforge_dflash", {"dflash_config": 3}, "dflash_config is 3"),
    ("specforge_dflash", {"block_size": 1}, "block_size is 1.*at least 2"),
    ("dspark_dflash", CONFIDENT, "lacks 2 tensors, first confidence_head"),
    ("dspark_rnn", {"target_layer_ids": None}, "target_layer_ids is None"),
    ("dspark_rnn", {"target_layer_ids": [[0]]}, r"target_layer_ids is \[\[0\]\]"),
    ("dspark_rnn", {"target_layer_ids": [-1, 2]}, r"is \[-1, 2\].* to 1, since readers disagree"),
    ("dspark_rnn", {"target_layer_ids": [1, 0]}, r"is \[1, 0\]"),
    ("dspark_rnn", {"markov_rank": "x"}, "markov_rank is 'x'"),
    ("dspark_rnn", {"markov_rank": -1}, "markov_rank is -1"),
    ("dspark_rnn", {"markov_rank": 3}, r"is \[.*expected"),
    ("dspark_rnn", {"markov_rank": None}, "also has 4 tensors"),
    ("speculators_dspark", {"markov_head_type": ...}, "also has 2 tensors"),
    ("dspark_rnn", {"markov_head_type": "gated"}, "lacks 2 tensors"),
    ("dspark_rnn", {"markov_head_type": "lstm"}, "lstm.*vanilla, gated, rnn"),
    ("dspark_rnn", {"enable_confidence_head": False}, "also has 2"),
    ("dspark_rnn", {"hidden_size": 32}, "hidden_size 32, and"),
    ("dspark_rnn", {"vocab_size": 9}, "vocab_size 9"),
    ("dspark_rnn", {"num_target_layers": 5}, "num_hidden_layers 5, and this one has 3"),
    ("dspark_rnn", {"block_size": 0}, "block_size is 0"),
    ("dspark_rnn", {"mask_token_id": 7}, "mask_token_id is 7.*below 7"),
    ("dspark_rnn", SLIDING, "full_attention, or sliding_attention with a sliding_window"),
    ("dspark_rnn", {"model_type": "gemma4_text"}, "gemma4_text.*Qwen3's"),
    *(("dspark_rnn", {name: ...}, f"config.json lacks {name}") for name in REQUIRED),
]
WRONG_ID, WRONG_MASK = D2T.clone(), T2D.clone()
WRONG_ID[-1] = VOCAB
WRONG_MASK[0] = False
_PROJ = "confidence_head.proj.weight"
WRONG_TENSORS = [
    # layout, tensors that are written as well or instead, message
    ("eagle", {"lm_head.weight": torch.zeros(1)}, "also has 1 tensors, first lm_head.weight"),
    ("eagle", {"fc.weight": torch.zeros(WIDTH, WIDTH)}, "fc.weight is .* expected"),
    ("eagle3", {"mask_hidden": torch.zeros(1)}, "of the kind P-EAGLE"),
    ("eagle3", {"d2t": WRONG_ID}, "d2t, which holds offsets"),
    ("eagle3", {"t2d": WRONG_MASK}, "t2d does not mark the 4 of 7"),
    ("speculators", {"d2t": D2T[:2]}, "d2t has shape"),
    ("dspark_rnn", {_PROJ: torch.ones(1, 21, dtype=torch.int32)}, f"{_PROJ} is torch.int32 or"),
    ("dspark_rnn", {_PROJ: torch.full((1, 21), torch.nan)}, f"{_PROJ} is torch.float32 or has NaN"),
]


@pytest.mark.parametrize(
    ("layout", "keys", "tensors", "message"),
    [
        *((layout, keys, {}, message) for layout, keys, message in WRONG_KEYS),
        *((layout, {}, tensors, message) for layout, tensors, message in WRONG_TENSORS),
        ("eagle3", {"num_hidden_layers": 2}, {"layers.1.hidden_norm.weight": D2T.clone()}, "reads the embedding again"),
        ("eagle", {}, {"layers.0.mlp.up_proj.weight": ...}, "lacks 1 tensors, first layers.0.mlp.up"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(layout, keys, tensors, message, tmp_path):
    with pytest.raises(ValueError, match=message) as raised:
        loaded(written(tmp_path, layout, keys, tensors))
    assert "\n" not in str(raised.value)
    assert str(tmp_path) in str(raised.value)


@pytest.mark.parametrize("architectures", ["DSparkQwen3", None, 5, True, {"a": 1}, [None]])
def test_odd_architectures_leave_the_layout_to_the_other_keys(architectures, tmp_path):
    source = written(tmp_path, "dspark_rnn", {"architectures": architectures})
    assert (released_layout_of(source), width_of(source)) == ("dspark", loaded(source).hidden_size)


def test_pickled_weights_are_not_read_and_a_truncated_file_is_named(tmp_path):
    config, tensors = released("eagle")
    write(tmp_path, config, tensors)
    (tmp_path / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pickled \(pytorch_model.bin\).*convert"):
        released_layout_of(ModelSource(path=str(tmp_path)))
    file = write(tmp_path, *released("glide")) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"model.safetensors cannot be read"):
        loaded(ModelSource(path=str(tmp_path)))


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, (0, 1, 2)),
        ({"target_layer_ids": [-1, 0, 1], "architectures": ["Qwen3Eagle3Model"]}, (0, 1, 2)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 0, 1], "use_aux_hidden_state": True}}, (1, 1, 2)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 1]}}, (1, 2, 2)),
    ],
)
def test_layer_ids_are_read_as_their_producer_counts_them(keys, expected, tmp_path):
    """SafeAILab and speculators count hidden states, SpecForge and DeepSpec count layers from 0."""
    source = written(tmp_path, "eagle3", {"eagle_aux_hidden_state_layer_ids": ...} | keys)
    assert loaded(source).target_layer_ids == expected


ODD = (None, "x", -1, 2**70, [], {}, True, 1.5, [[0]])
ODD_KEYS = {
    "eagle3": ("rope_theta", "eagle_config", "rope_parameters.rope_theta", "rope_scaling.type"),
    "speculators": ("transformer_layer_config", "transformer_layer_config.model_type", "draft_vocab_size"),
    "speculators_dspark": ("markov_head_type", "sample_from_anchor", "aux_hidden_state_layer_ids"),
    "specforge_dflash": ("dflash_config.projector_type", "layer_types", "rope_parameters.sliding_attention"),
}


@pytest.mark.parametrize("layout", ODD_KEYS)
def test_an_odd_value_is_refused_or_read(layout, tmp_path):
    for key, odd in product(ODD_KEYS[layout], ODD):
        outer, _, inner = key.rpartition(".")
        keys = {outer: released(layout)[0].get(outer, {}) | {inner: odd}} if outer else {inner: odd}
        for read in (width_of, max_positions_of, loaded):
            with suppress(ValueError):
                read(written(tmp_path, layout, keys))


def test_an_eagle3_draft_with_a_window_reads_texts_that_fit_it(tmp_path):
    layer = released("speculators_qwen3")[0]["transformer_layer_config"]
    layer |= {"use_sliding_window": True, "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
    source = written(tmp_path, "speculators_qwen3", {"transformer_layer_config": layer})
    assert max_positions_of(source) == loaded(source).config.max_position_embeddings == 9


def put_back(layer):
    """The matrix that an 8-bit layer stands for."""
    return layer.weight.double() * layer.scale.double()[:, None]


def drafted(draft):
    """Logits after each of a few tokens."""
    tapped, model = beside(target(), draft)
    tapped.feed([1, 2, 3, 4])
    return torch.cat([model.feed(tokens) for tokens in ([1, 2, 3, 4, 5], [6], [0])])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_draft_computes_what_its_rounded_matrices_say(layout, tmp_path):
    source = written(tmp_path, layout)
    exact, rounded = (loaded(replace(source, quantization=bits)) for bits in (None, "8bit"))
    as_loaded, num_matrices = drafted(exact), 0
    for name, module in exact.named_modules():
        if isinstance(module, nn.Linear):
            weight = put_back(rounded.get_submodule(name))
            half_a_step = module.weight.double().abs().amax(1, keepdim=True) / 254
            assert bool(((weight - module.weight).abs() <= half_a_step * 1.001).all())
            module.weight.data = weight.to(module.weight.dtype)
            num_matrices += 1
    assert num_matrices >= 8
    torch.testing.assert_close(drafted(rounded), drafted(exact), rtol=0, atol=1e-5)
    assert not torch.equal(as_loaded, drafted(rounded)), "8 bits are coarser than 32"
    assert (rounded.dtype, rounded.device) == (exact.dtype, exact.device)


@pytest.mark.parametrize("width", [16, 48, 24, 5])
@pytest.mark.parametrize("num_rows", [1, 16, 17])
def test_widths_and_rows_of_every_kind_have_one_product_in_bfloat16(num_rows, width):
    torch.manual_seed(0)
    linear = nn.Linear(width, 10).bfloat16()
    linear.weight.data[3] = 0
    layer = EightBitLinear(linear)
    inputs = torch.randn(1, num_rows, 2 * width, dtype=torch.bfloat16)[..., :width]
    expected = functional.linear(inputs.double(), put_back(layer), linear.bias.double())
    # bfloat16 has eight bits: half a step for the product and half for the sum with the bias
    torch.testing.assert_close(layer(inputs).double(), expected, rtol=2**-7, atol=2**-7)
    torch.testing.assert_close(layer(inputs[0, 0]).double(), expected[0, 0], rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("quantization", ["4bit", {"quant_method": "hqq", "nbits": 4}])
def test_other_quantisations_are_refused(quantization, tmp_path):
    with pytest.raises(ValueError, match=r"quantization is .*4.*; of feature drafts it is 8bit or null"):
        loaded(replace(written(tmp_path, "eagle3"), quantization=quantization))

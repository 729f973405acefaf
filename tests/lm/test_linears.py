"""Matrices in oneDNN's order: the same products, in float32 on a CPU, and the same texts."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from configs import ModelSource
from decode import ModelDrafter, SpeculativeDecoder
from decode.policies import FixedLength
from lm import Sampling, load_model
from lm.features.loading import feature_draft_of
from lm.linears import PackedLinear
from tests.lm.features.test_released import loaded, target, written
from tests.lm.test_loading import SOURCE, TINY


@pytest.mark.parametrize("shape", [(1, 48), (2, 48), (1, 7, 5), (3, 11, 48), (48,)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_packed_layer_has_the_product_of_its_layer(shape, has_bias):
    torch.manual_seed(0)
    linear = nn.Linear(shape[-1], 10, bias=has_bias)
    inputs = torch.randn(*shape[:-1], 2 * shape[-1])[..., : shape[-1]]
    torch.testing.assert_close(PackedLinear(linear)(inputs), linear(inputs), rtol=1e-5, atol=1e-5)


def test_greedy_texts_of_a_packed_pair_are_those_of_plain_models():
    def written_by(policy, *, packed):
        models = [
            load_model(ModelSource(path=str(TINY / role), dtype="float32", device_map="cpu", packed=packed))
            for role in ("target", "draft")
        ]
        assert any(type(module) is nn.Linear for module in models[0].modules()) is not packed
        drafter = ModelDrafter(models[1], policy)
        decoder = SpeculativeDecoder(models[0], drafter, sampling=Sampling(temperature=0.0), max_draft_length=8)
        return decoder.generate([5, 6, 7, 8, 9], 60).token_ids

    expected = written_by(FixedLength(0), packed=False)
    assert written_by(FixedLength(0), packed=True) == expected
    assert written_by(FixedLength(6), packed=True) == expected


def test_a_feature_draft_is_packed_and_what_it_borrows_is_not(tmp_path):
    of = target()
    draft = feature_draft_of(replace(written(tmp_path, "eagle3"), dtype="float32", packed=True), of)
    assert any(isinstance(module, PackedLinear) for module in draft.modules())
    assert not any(isinstance(module, PackedLinear) for module in of.modules())


def test_what_cannot_be_packed_is_refused(tmp_path):
    message = r"packed is set for .*torch.bfloat16 on cpu.*set dtype: float32 and device_map: cpu"
    with pytest.raises(ValueError, match=message):
        load_model(replace(SOURCE, dtype="bfloat16", packed=True))
    with pytest.raises(ValueError, match=message):
        loaded(replace(written(tmp_path, "eagle3"), dtype="bfloat16", packed=True))
    with pytest.raises(ValueError, match=r"packed is set for .*without quantization"):
        loaded(replace(written(tmp_path, "eagle3"), dtype="float32", quantization="8bit", packed=True))

"""Drafts in 8 bits: every layout computes what its rounded matrices say, at every width that torch's kernel takes."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from configs import ModelSource
from lm import CachedModel, feature_model
from lm.features.eight_bits import EightBitLinear
from lm.features.loading import feature_draft_of
from lm.features.recorder import FeatureRecorder
from tests.lm.features.released_by_hand import LAYOUTS, released, write
from tests.toys.random_drafts import target


def put_back(layer):
    """The matrix that an 8-bit layer stands for."""
    return layer.weight.double() * layer.scale.double()[:, None]


def drafted(draft):
    """Logits after each of a few tokens."""
    tapped = CachedModel(target(), recorder=FeatureRecorder(target(), draft))
    model = feature_model(draft, tapped)
    tapped.feed([1, 2, 3, 4])
    return torch.cat([model.feed(tokens) for tokens in ([1, 2, 3, 4, 5], [6], [0])])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_draft_computes_what_its_rounded_matrices_say(layout, tmp_path):
    source = str(write(tmp_path, *released(layout)))
    exact, rounded = (
        feature_draft_of(ModelSource(path=source, quantization=bits), target()) for bits in (None, "8bit")
    )
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
    source = ModelSource(path=str(write(tmp_path, *released("eagle3"))), quantization=quantization)
    with pytest.raises(ValueError, match=r"quantization is .*4.*; of feature drafts it is 8bit or null"):
        feature_draft_of(source, target())

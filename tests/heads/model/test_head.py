"""Law 4.7: the head, its calibration, and its strictness on disk."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from heads import AcceptanceHead, Provenance
from heads.model.card import description
from heads.model.head import update_config
from heads.model.inputs import Inputs
from heads.model.step import HostHead, StepwiseHead


def filled(depth: int = 3, timing: str = "fed", scalars=False, embedding: bool = False, **provenance) -> AcceptanceHead:
    """A head of width 6 with no weight at zero."""
    head = AcceptanceHead(6, depth, timing, scalars, embedding, provenance=Provenance(**provenance))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return head.eval()


def test_logit_is_the_formula_of_law_4_7():
    head, hidden = filled(), torch.randn(5, 6)
    stream = hidden
    for block in head.blocks:
        z = stream @ block.weight.T + block.bias
        stream = stream + z / (1 + torch.exp(-z))
    torch.testing.assert_close(head(hidden), stream @ head.out.weight[0] + head.out.bias[0])


def test_every_block_has_weights_of_its_own():
    head = filled()
    assert len({parameter.data_ptr() for parameter in head.parameters()}) == 2 * 3 + 2
    head(torch.randn(5, 6)).sum().backward()
    grads = [block.weight.grad for block in head.blocks]
    assert not any(torch.allclose(a, b) for i, a in enumerate(grads) for b in grads[:i])


def test_depth_zero_is_linear_and_one_row_is_scored_as_a_batch_of_rows():
    head, a, b = filled(0, scalars=True), torch.randn(2, 4, 6), torch.randn(2, 4, 2)
    torch.testing.assert_close(head(a[0], b[0]) + head(a[1], b[1]), head(a[0] + a[1], b[0] + b[1]) + head.out.bias)
    head = filled(scalars=True)
    torch.testing.assert_close(head(a, b)[1, 3], head(a[1, 3], b[1, 3]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(((6, 1, "prefix", *inputs), "before it is drawn") for inputs in ((("log_token_prob",),), (False, True))),
        *(((6, 1, "drawn", scalars), "each once") for scalars in (("mood",), ("entropy", "entropy"))),
        *(((0, 1), "hidden_size is 0"), ((4, -1), "depth is -1"), ((4, 1, "later"), "timing")),
    ],
)
def test_an_impossible_head_is_refused(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):  # by the head, or where types are checked
        AcceptanceHead(*arguments)


@pytest.mark.parametrize(
    ("timing", "scalars", "embedding", "read", "text"),
    [
        ("prefix", True, False, ("entropy",), "before the token is drawn"),
        ("candidate", True, False, ("log_token_prob", "entropy"), "once the token is chosen for a tree"),
        ("drawn", ("entropy",), True, ("entropy",), "once the token is drawn"),
        ("prefix", ("text_position",), False, ("text_position",), "from the draft's final hidden state, log(1 + resp"),
    ],
)
def test_a_head_comes_back_from_disk_as_it_was_saved(tmp_path: Path, timing: str, scalars, embedding, read, text: str):
    head = filled(timing=timing, scalars=scalars, embedding=embedding, reject_weight=3.0)
    head.save_pretrained(tmp_path)
    again = AcceptanceHead.from_pretrained(tmp_path)
    inputs = torch.randn(4, 6), torch.rand(4, len(read)), torch.randn(4, 6) if embedding else None
    assert again.config == head.config
    assert (again.timing, again.inputs) == (timing, Inputs(read, embedding))
    assert torch.equal(again(*inputs), head(*inputs))
    assert text in (tmp_path / "README.md").read_text()


def test_inputs_are_given_exactly_if_the_head_takes_them():
    with pytest.raises(ValueError, match="needs scalars"):
        filled(scalars=True)(torch.randn(6))
    with pytest.raises(ValueError, match="takes no embedding"):
        filled()(torch.randn(6), None, torch.randn(6))


def test_scalars_are_read_by_name_and_the_standard_ones_are_written_as_true():
    head, hidden, entropy = filled(2, "drawn", ("entropy",)), torch.randn(6), torch.rand(1)
    on_host = HostHead(StepwiseHead(head), names=("log_token_prob", "entropy"))
    # float32 in two orders of summation, which CPUs choose
    score = on_host.score(hidden.numpy(), [0.0, float(entropy)])
    assert score == pytest.approx(head(hidden, entropy).item(), abs=1e-5)
    named = {scalars: filled(scalars=scalars).config["scalars"] for scalars in (False, True, ("entropy",))}
    assert named == {False: False, True: True, ("entropy",): ["entropy"]}
    assert filled(0, "fed", ("log_token_prob", "entropy")).config["scalars"] is True


def test_calibration_undoes_the_loss_weights():
    head = filled(reject_weight=6.0, accept_weight=1.0, calibration_temperature=2.0)
    assert head.calibration_shift == pytest.approx(math.log(6))
    logit = math.log(0.4 / 0.6)
    for value in (logit, np.array([logit]), torch.tensor([logit], dtype=torch.float64)):
        calibrated = head.calibrated_logit(value)
        assert type(calibrated) is type(value)
        assert np.asarray(calibrated).item() == pytest.approx(math.log(0.8 / 0.2) / 2)
    assert float(head.raw(torch.tensor(logit))) == pytest.approx(0.4)


DAMAGED_TENSORS = {
    "missing": (lambda tensors: tensors.pop("blocks.1.weight"), r"blocks\.1\.weight is missing"),
    "extra": (lambda t: t.update({"blocks.7.weight": torch.zeros(6, 6)}), r"blocks\.7\.weight is not part"),
    "shape": (lambda t: t.update({"blocks.1.weight": torch.zeros(6, 5)}), r"blocks\.1\.weight has shape \(6, 5\)"),
    "nan": (lambda t: t.update({"out.bias": torch.full((1,), torch.nan)}), r"out\.bias has NaN"),
    "large": (
        lambda t: t.update({"blocks.0.weight": t["blocks.0.weight"].double() * 1e30}),
        r"blocks\.0\.weight has NaN or values above 1e\+15",
    ),
    **{
        dtype: (
            lambda t, dtype=dtype: t.update({"out.weight": t["out.weight"].to(getattr(torch, dtype))}),
            rf"out\.weight has dtype torch\.{dtype}, expected float16",
        )
        for dtype in ("int32", "bool", "complex64", "float8_e4m3fn")
    },
}


@pytest.mark.parametrize("damage", DAMAGED_TENSORS)
def test_damaged_tensors_are_refused_and_named(tmp_path: Path, damage: str):
    change, message = DAMAGED_TENSORS[damage]
    filled(2).save_pretrained(tmp_path)
    # load_file maps the file that is overwritten below
    tensors = {name: tensor.clone() for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        AcceptanceHead.from_pretrained(tmp_path)


def test_a_file_that_is_truncated_or_pickled_or_missing_is_refused(tmp_path: Path):
    filled(2).save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(weights).items()}
    weights.write_bytes(weights.read_bytes()[:-7])
    with pytest.raises(ValueError, match="not a complete safetensors"):
        AcceptanceHead.from_pretrained(tmp_path)
    torch.save(tensors, weights)
    with pytest.raises(ValueError, match="not a complete safetensors"):
        AcceptanceHead.from_pretrained(tmp_path)
    weights.rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is a pickled checkpoint.*save_file"):
        AcceptanceHead.from_pretrained(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        AcceptanceHead.from_pretrained(tmp_path)


@pytest.mark.parametrize("missing", ["nothing", "heads/nothing", "no/such/head", "/no/such"])
def test_a_local_path_that_does_not_exist_is_never_looked_up_on_the_hub(missing):
    with pytest.raises(FileNotFoundError, match="no exported head at"):
        AcceptanceHead.from_pretrained(missing)


@pytest.mark.parametrize("content", ['{"hidden_size": 4,', "[]", "", '{"a":' * 10**5])
def test_a_broken_config_is_named(tmp_path: Path, content: str):
    filled(2).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(content)
    for read in (AcceptanceHead.from_pretrained, update_config):
        with pytest.raises(ValueError, match=r"config\.json: .*heads export"):
            read(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("hidden_size", "6"), ("hidden_size", True), ("hidden_size", 2**62), ("num_layers", 1.5)),
        *(("num_layers", 10**9), ("timing", ["fed"]), ("scalars", "entropy"), ("scalars", [["entropy"]])),
        *(("reject_weight", "6"), ("reject_weight", None), ("draft", "a"), ("recommended", []), ("mixing_ratio", {})),
    ],
)
def test_a_config_with_an_impossible_value_is_refused_and_named(tmp_path: Path, key: str, value: object):
    filled(1).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(ValueError, match=key if key != "num_layers" else "num_layers|depth"):
        AcceptanceHead.from_pretrained(tmp_path)


def test_update_config_changes_a_saved_head(tmp_path: Path):
    filled(2, reject_weight=6.0).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert {"timing", "scalars", "accept_weight", "mixing_ratio", "draft", "target", "sampling"} <= config.keys()
    assert (config["num_layers"], config["architectures"], config["reject_weight"]) == (2, ["AcceptanceHead"], 6.0)
    update_config(tmp_path, recommended={"max_rejection_prob": 0.3})
    assert AcceptanceHead.from_pretrained(tmp_path).provenance.recommended == {"max_rejection_prob": 0.3}
    with pytest.raises(ValueError, match="reject_weight is 0"):
        update_config(tmp_path, reject_weight=0.0)


@pytest.mark.parametrize(("depth", "blocks"), [(0, "0 residual blocks of"), (1, "1 residual block of")])
def test_the_card_names_the_blocks_and_the_threshold_with_what_it_maximises(depth: int, blocks: str):
    recommended = {"max_rejection_prob": 0.713, "is_calibrated": False, "costs": "measured; stops measured"}
    recommended |= {"num_prompts": 50, "index_slope": 0.09828}
    card = description(filled(depth, recommended=recommended).config, num_parameters=1)
    for text in (
        blocks,
        "max_rejection_prob 0.713, on the raw probability",
        "the most predicted tokens per second of a fine grid on 50 prompts of the dev split",
        "by replay at these costs: measured; stops",
    ):
        assert text in card
    assert "index_slope" not in card
    assert "none yet; run `acceptance-heads tune`" in description(filled(depth).config, num_parameters=1)

"""Law 4.7: the head, its calibration, and its strictness on disk."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from heads import AcceptanceHead, Provenance
from heads.model.head import check_shape, update_config
from heads.model.inputs import Inputs
from heads.model.step import HostHead, StepwiseHead


def filled(
    depth: int = 3,
    timing: str = "fed",
    scalars: bool | tuple[str, ...] = False,
    embedding: bool = False,
    **provenance: float,
) -> AcceptanceHead:
    """A head of width 6 with no weight at zero."""
    about = Provenance(**provenance)  # type: ignore[arg-type]
    head = AcceptanceHead(6, depth, timing, scalars, embedding, provenance=about)
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


def test_depth_zero_is_linear():
    head, a, b = filled(0, scalars=True), torch.randn(2, 4, 6), torch.randn(2, 4, 2)
    torch.testing.assert_close(head(a[0], b[0]) + head(a[1], b[1]), head(a[0] + a[1], b[0] + b[1]) + head.out.bias)


def test_one_row_is_scored_as_a_batch_of_rows():
    head, hidden, scalars = filled(scalars=True), torch.randn(2, 5, 6), torch.randn(2, 5, 2)
    torch.testing.assert_close(head(hidden, scalars)[1, 3], head(hidden[1, 3], scalars[1, 3]))


@pytest.mark.parametrize("inputs", [(("log_token_prob",), False), (True, True), (False, True)])
def test_a_prefix_head_that_would_read_the_token_is_refused(inputs):
    with pytest.raises(ValueError, match="before it is drawn"):
        AcceptanceHead(6, 1, "prefix", *inputs)


def test_a_prefix_head_comes_back_from_disk_as_it_went(tmp_path: Path):
    head = filled(timing="prefix", scalars=True)
    head.save_pretrained(tmp_path)
    back = AcceptanceHead.from_pretrained(tmp_path)
    assert back.config == head.config
    assert (back.timing, back.inputs) == ("prefix", Inputs(("entropy",)))
    assert "before the token is drawn" in (tmp_path / "README.md").read_text()


def test_a_candidate_head_says_what_it_predicts(tmp_path: Path):
    filled(timing="candidate", scalars=True).save_pretrained(tmp_path)
    assert AcceptanceHead.from_pretrained(tmp_path).timing == "candidate"
    assert "once the token is chosen for a tree" in (tmp_path / "README.md").read_text()


def test_inputs_are_given_exactly_if_the_head_takes_them():
    with pytest.raises(ValueError, match="needs scalars"):
        filled(scalars=True)(torch.randn(6))
    with pytest.raises(ValueError, match="takes no embedding"):
        filled()(torch.randn(6), None, torch.randn(6))


def test_scalars_have_names_and_an_order_of_their_own(tmp_path: Path):
    head = filled(2, "drawn", ("entropy",))
    head.save_pretrained(tmp_path)
    again, hidden, entropy = AcceptanceHead.from_pretrained(tmp_path), torch.randn(4, 6), torch.rand(4, 1)
    assert again.inputs == Inputs(("entropy",), embedding=False)
    assert torch.equal(again(hidden, entropy), head(hidden, entropy))
    numbers = [0.0, float(entropy[0, 0])]
    stepwise = HostHead(StepwiseHead(head), names=("log_token_prob", "entropy"))
    # float32 in two orders of summation, which CPUs choose
    assert stepwise.score(hidden[0].numpy(), numbers) == pytest.approx(head(hidden, entropy)[0].item(), abs=1e-5)
    assert json.loads((tmp_path / "config.json").read_text())["scalars"] == ["entropy"]
    for wrong in (("mood",), ("entropy", "entropy")):
        with pytest.raises(ValueError, match="each once"):
            filled(2, "drawn", wrong)


def test_standard_scalars_are_written_as_true():
    assert (
        filled(scalars=True).config["scalars"]
        is filled(0, "fed", ("log_token_prob", "entropy")).config["scalars"]
        is True
    )
    assert filled().config["scalars"] is False


@pytest.mark.parametrize(("width", "depth", "timing"), [(0, 1, "fed"), (4, -1, "fed"), (4, 1, "later")])
def test_an_impossible_architecture_is_refused(width, depth, timing):
    with pytest.raises(ValueError, match=r"hidden_size|depth|timing"):
        check_shape(width, depth, timing)


def test_calibration_undoes_the_loss_weights():
    head = filled(reject_weight=6.0, accept_weight=1.0, calibration_temperature=2.0)
    assert head.calibration_shift == pytest.approx(math.log(6))
    logit = math.log(0.4 / 0.6)
    for value in (logit, np.array([logit]), torch.tensor([logit], dtype=torch.float64)):
        calibrated = head.calibrated_logit(value)
        assert (calibrated if isinstance(calibrated, float) else calibrated.item()) == pytest.approx(
            math.log(0.8 / 0.2) / 2
        )
        assert type(calibrated) is type(value)
    assert float(head.raw(torch.tensor(logit))) == pytest.approx(0.4)


@pytest.mark.slow
def test_saved_and_loaded_heads_are_the_same_in_a_fresh_process(tmp_path: Path):
    code = """
import sys, torch
from heads import AcceptanceHead
for folder in sys.argv[1:]:
    head = AcceptanceHead.from_pretrained(folder)
    print(head.config, head(*torch.load(folder + "/inputs.pt")).tolist())
"""
    folders, expected = [], []
    for scalars, embedding in [(False, False), (True, False), (True, True)]:
        head = filled(2, "drawn", scalars, embedding, reject_weight=3.0)
        folders.append(tmp_path / str(len(folders)))
        head.save_pretrained(folders[-1])
        inputs = [torch.randn(4, 6), torch.randn(4, 2) if scalars else None, torch.randn(4, 6) if embedding else None]
        torch.save(inputs, folders[-1] / "inputs.pt")
        expected.append(f"{head.config} {head(*inputs).tolist()}")
        assert "Acceptance-prediction head" in (folders[-1] / "README.md").read_text()
    arguments = [sys.executable, "-c", code, *map(str, folders)]
    answer = subprocess.run(arguments, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[3])
    assert answer.stdout.splitlines() == expected


def damage(path: Path, change: str) -> None:
    weights = path / "model.safetensors"
    # load_file maps the file that is overwritten below
    tensors = {name: tensor.clone() for name, tensor in load_file(weights).items()}
    if change == "missing":
        del tensors["blocks.1.weight"]
    elif change == "extra":
        tensors["blocks.7.weight"] = torch.zeros(6, 6)
    elif change == "shape":
        tensors["blocks.1.weight"] = torch.zeros(6, 5)
    elif change == "nan":
        tensors["out.bias"] = torch.full((1,), torch.nan)
    elif change in ("int32", "bool", "complex64", "float8_e4m3fn"):
        tensors["out.weight"] = tensors["out.weight"].to(getattr(torch, change))
    elif change == "large":
        tensors["blocks.0.weight"] = tensors["blocks.0.weight"].double() * 1e30
    elif change == "wide":
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {"hidden_size": 2**62}))
    elif change in {"truncated", "pickled"}:
        weights.write_bytes(weights.read_bytes()[:-7]) if change == "truncated" else torch.save(tensors, weights)
        return
    elif change == "bin":
        weights.unlink()
        torch.save(tensors, path / "pytorch_model.bin")
        return
    save_file(tensors, weights)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("missing", r"blocks\.1\.weight is missing"),
        ("extra", r"blocks\.7\.weight is not part"),
        ("shape", r"blocks\.1\.weight has shape \(6, 5\)"),
        ("nan", r"out\.bias has NaN"),
        ("int32", r"out\.weight has dtype torch\.int32, expected float16"),
        ("bool", r"out\.weight has dtype torch\.bool"),
        ("complex64", r"out\.weight has dtype torch\.complex64"),
        ("float8_e4m3fn", r"out\.weight has dtype torch\.float8_e4m3fn"),
        ("large", r"blocks\.0\.weight has NaN or values above 1e\+15"),
        ("wide", r"hidden_size 4611686018427387904, but no tensor of model\.safetensors has that width"),
        ("truncated", "not a complete safetensors"),
        ("pickled", "not a complete safetensors"),
        ("bin", r"pytorch_model\.bin is a pickled checkpoint.*save_file"),
    ],
)
def test_a_damaged_head_file_is_refused_and_named(tmp_path: Path, change: str, says: str):
    filled(2).save_pretrained(tmp_path)
    damage(tmp_path, change)
    with pytest.raises(ValueError, match=says):
        AcceptanceHead.from_pretrained(tmp_path)


def test_a_head_without_config_is_refused(tmp_path: Path):
    filled(2).save_pretrained(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        AcceptanceHead.from_pretrained(tmp_path)


@pytest.mark.parametrize("content", ['{"hidden_size": 4,', "[]", "", '{"a":' * 10**5])
def test_a_broken_config_is_named(tmp_path: Path, content: str):
    filled(2).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(content)
    for read in (AcceptanceHead.from_pretrained, update_config):
        with pytest.raises(ValueError, match=r"config\.json: .*heads export"):
            read(tmp_path)


def test_config_holds_what_the_design_names(tmp_path: Path):
    filled(2, reject_weight=6.0).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    names = {
        "hidden_size",
        "num_layers",
        "architectures",
        "timing",
        "scalars",
        "accept_weight",
        "reject_weight",
        "mixing_ratio",
        "draft",
        "target",
    }
    assert names | {"sampling", "recommended", "calibration_temperature"} <= config.keys()
    assert (config["num_layers"], config["architectures"], config["reject_weight"]) == (2, ["AcceptanceHead"], 6.0)


def test_update_config_changes_a_saved_head(tmp_path: Path):
    filled(2).save_pretrained(tmp_path)
    update_config(tmp_path, recommended={"max_rejection_prob": 0.3})
    assert AcceptanceHead.from_pretrained(tmp_path).provenance.recommended == {"max_rejection_prob": 0.3}
    with pytest.raises(ValueError, match="reject_weight is 0"):
        update_config(tmp_path, reject_weight=0.0)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("hidden_size", "6"), ("hidden_size", True), ("num_layers", 1.5), ("num_layers", 10**9), ("timing", ["fed"])),
        *(("scalars", "entropy"), ("scalars", [["entropy"]]), ("reject_weight", "6"), ("reject_weight", None)),
        *(("draft", "a"), ("recommended", []), ("mixing_ratio", {})),
    ],
)
def test_a_config_with_a_value_of_another_type_is_refused_and_named(tmp_path: Path, key: str, value: object):
    filled(1).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(ValueError, match=key if key != "num_layers" else "num_layers|depth"):
        AcceptanceHead.from_pretrained(tmp_path)


@pytest.mark.parametrize("missing", ["nothing", "heads/nothing", "no/such/head", "/no/such"])
def test_a_path_where_nothing_is_is_said_at_once_and_never_looked_up(missing):
    with pytest.raises(FileNotFoundError, match="no exported head at"):
        AcceptanceHead.from_pretrained(missing)

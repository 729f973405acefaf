"""Law 4.7: the head, its calibration, its strictness on disk; law 4.1: the models that it fits."""

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from heads import AcceptanceHead, Provenance
from heads.model.card import description
from heads.model.fits import check_fits, description_of
from heads.model.head import update_config
from heads.model.inputs import EARLIER_STANDARD, STANDARD, Inputs
from heads.model.step import HostHead

SHIPPED = sorted(Path(__file__).parents[3].glob("checkpoints/**/heads/*+*/config.json"))
"""Of heads that version 0.2.0 exported."""


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


def test_depth_zero_is_linear_one_row_is_scored_as_a_batch_of_rows_and_inputs_are_those_of_the_head():
    head, a, b = filled(0, scalars=True), torch.randn(2, 4, 6), torch.randn(2, 4, 3)
    torch.testing.assert_close(head(a[0], b[0]) + head(a[1], b[1]), head(a[0] + a[1], b[0] + b[1]) + head.out.bias)
    head = filled(scalars=True)
    torch.testing.assert_close(head(a, b)[1, 3], head(a[1, 3], b[1, 3]))
    with pytest.raises(ValueError, match="needs scalars"):
        head(torch.randn(6))
    with pytest.raises(ValueError, match="takes no embedding"):
        filled()(torch.randn(6), None, torch.randn(6))


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
        ("prefix", True, False, ("entropy", "logit_max_prob"), "state, H(q), logit max q"),
        (
            "candidate",
            True,
            False,
            ("log_token_prob", "entropy", "logit_token_prob"),
            "once the token is chosen for a tree",
        ),
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


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.parent.name)
def test_a_head_of_an_earlier_version_keeps_its_name_its_inputs_and_its_fingerprint(path: Path):
    """Traces hold its logits under the fingerprint, also the shipped ones."""
    head, config = AcceptanceHead.from_pretrained(path.parent), json.loads(path.read_text())
    assert head.inputs.scalars == (EARLIER_STANDARD if config["scalars"] is True else tuple(config["scalars"]))
    assert head.config["scalars"] == config["scalars"]
    assert f"{head.shape_name}-w{config['reject_weight']:g}" == path.parent.name
    shards = list(path.parents[2].glob("record/trace/*/signals/*.safetensors"))
    with safe_open(shards[0], framework="pt") as file:
        assert f"score.{head.fingerprint()}" in file.keys()  # noqa: SIM118


def test_scalars_are_read_by_name_and_standard_ones_of_a_new_head_are_written_by_name():
    head, hidden, entropy = filled(2, "drawn", ("entropy",)), torch.randn(6), torch.rand(1)
    on_host = HostHead(head, names=("log_token_prob", "entropy"))
    # float32 in two orders of summation, which CPUs choose
    score = on_host.score(hidden.numpy(), [0.0, float(entropy)])
    assert score == pytest.approx(head(hidden, entropy).item(), abs=1e-5)
    named = {scalars: filled(scalars=scalars).config["scalars"] for scalars in (False, True, ("entropy",))}
    assert named == {False: False, True: list(STANDARD), ("entropy",): ["entropy"]}
    earlier = filled(0, "fed", EARLIER_STANDARD)
    assert earlier.config["scalars"] is True
    for head in (earlier, filled(0, "fed", True), filled(0, "prefix", True)):
        assert head.shape_name == f"{head.timing}+s-d0"
        assert AcceptanceHead.from_config(head.config).inputs == head.inputs


def test_calibration_undoes_the_loss_weights():
    head = filled(reject_weight=6.0, accept_weight=1.0, calibration_temperature=2.0)
    assert head.calibration_shift == pytest.approx(math.log(6))
    logit = math.log(0.4 / 0.6)
    for value in (logit, np.array([logit]), torch.tensor([logit], dtype=torch.float64)):
        calibrated = head.calibrated_logit(value)
        assert type(calibrated) is type(value)
        assert np.asarray(calibrated).item() == pytest.approx(math.log(0.8 / 0.2) / 2)
    assert float(torch.tensor(logit).sigmoid()) == pytest.approx(0.4)


def with_tensors(directory: Path, **changes: torch.Tensor | None) -> None:
    path = directory / "model.safetensors"
    # load_file maps the file that is overwritten
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()} | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


def with_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def pickled(directory: Path, name: str) -> None:
    path = directory / "model.safetensors"
    torch.save({name: tensor.clone() for name, tensor in load_file(path).items()}, directory / name)
    if name != path.name:
        path.unlink()


TENSORS = [
    ("blocks.1.weight", None, r"Missing key.*blocks\.1\.weight"),
    ("blocks.7.weight", torch.zeros(6, 6), r"Unexpected key.*blocks\.7\.weight"),
    ("blocks.1.weight", torch.zeros(6, 5), r"size mismatch for blocks\.1\.weight.*6, 5"),
    ("out.bias", torch.full((1,), torch.nan), r"out\.bias has NaN"),
    ("blocks.0.weight", torch.full((6, 6), 1e30).double(), r"blocks\.0\.weight has NaN or values above 1e\+15"),
]
TENSORS += [
    (
        "out.weight",
        torch.ones(1, 6).to(getattr(torch, dtype)),
        rf"out\.weight has dtype torch.{dtype}, expected float16",
    )
    for dtype in ("int32", "bool", "complex64", "float8_e4m3fn")
]
VALUES: list[tuple[str, object]] = [
    *(("hidden_size", "6"), ("hidden_size", True), ("hidden_size", 2**62), ("num_layers", 1.5)),
    *(("num_layers", 10**9), ("timing", ["fed"]), ("scalars", "entropy"), ("scalars", [["entropy"]])),
    *(("reject_weight", "6"), ("reject_weight", None), ("draft", "a"), ("recommended", []), ("mixing_ratio", {})),
]
DAMAGES: list[tuple[str, Callable[[Path], object]]] = [
    *((problem, partial(with_tensors, **{name: value})) for name, value, problem in TENSORS),
    *((f"{key}|depth is 10", partial(with_config, **{key: value})) for key, value in VALUES),
    ("not a complete safetensors", lambda head: (head / "model.safetensors").write_bytes(b"cut")),
    ("not a complete safetensors", partial(pickled, name="model.safetensors")),
    (r"pytorch_model\.bin is a pickled checkpoint.*save_file", partial(pickled, name="pytorch_model.bin")),
    (r"no config\.json", lambda head: (head / "config.json").unlink()),
]


@pytest.mark.parametrize(("message", "damage"), DAMAGES)
def test_a_damaged_head_is_refused_and_what_is_wrong_is_named(tmp_path: Path, message: str, damage):
    filled(2).save_pretrained(tmp_path)
    damage(tmp_path)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        AcceptanceHead.from_pretrained(tmp_path)


def test_a_local_path_that_does_not_exist_is_never_looked_up_on_the_hub_and_a_broken_config_is_named(tmp_path: Path):
    for missing in ("nothing", "heads/nothing", "no/such/head", "/no/such"):
        with pytest.raises(FileNotFoundError, match="no exported head at"):
            AcceptanceHead.from_pretrained(missing)
    filled(2).save_pretrained(tmp_path)
    for content in ('{"hidden_size": 4,', "[]", "", '{"a":' * 10**5):
        (tmp_path / "config.json").write_text(content)
        for read in (AcceptanceHead.from_pretrained, update_config):
            with pytest.raises(ValueError, match=r"config\.json: .*heads export"):
                read(tmp_path)


def test_update_config_changes_a_saved_head(tmp_path: Path):
    filled(2, reject_weight=6.0).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert {"timing", "scalars", "accept_weight", "mixing_ratio", "draft", "target", "sampling"} <= config.keys()
    assert (config["num_layers"], config["architectures"], config["reject_weight"]) == (2, ["AcceptanceHead"], 6.0)
    update_config(tmp_path, recommended={"max_rejection_prob": 0.3})
    assert AcceptanceHead.from_pretrained(tmp_path).provenance.recommended == {"max_rejection_prob": 0.3}
    card = tmp_path / "README.md"
    card.write_text("")
    update_config(tmp_path, recommended={"max_rejection_prob": 0.3})
    assert not card.read_text()  # nothing has changed, so nothing is written
    update_config(tmp_path, recommended={"max_rejection_prob": 0.4})
    assert "0.4" in card.read_text()
    with pytest.raises(ValueError, match="reject_weight is 0"):
        update_config(tmp_path, reject_weight=0.0)


def test_the_card_names_the_blocks_and_the_threshold_with_what_it_maximises():
    recommended = {"max_rejection_prob": 0.713, "is_calibrated": False, "costs": "measured; stops measured"}
    recommended |= {"num_prompts": 50, "index_slope": 0.09828}
    for depth, blocks in ((0, "0 residual blocks of"), (1, "1 residual block of")):
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


WARM = {"temperature": 1.0, "top_k": None, "top_p": None}
MODEL = {"path": "models/draft", "name": "draft", "weights": "a" * 64, "commit": None, "revision": None}
MODEL |= {"hidden_size": 4}
ON_HUB = {"path": "org/m", "name": "org/m", "revision": "main"}


def head(**provenance) -> AcceptanceHead:
    return AcceptanceHead(4, 0, provenance=Provenance(**provenance))


OTHERS = [
    {"path": "models/other", "name": "draft", "weights": "b" * 64},
    {"path": "org/draft", "name": "org/draft", "commit": "b" * 40, "weights": "b" * 64},
    {"path": "org/other", "name": "org/other", "commit": "b" * 40},
    {"path": "models/wide", "name": "draft", "hidden_size": 8},
]
SAME_PATH = r"models/draft \(weights b+\), but pair.draft is models/draft \(weights a+\)"
REFUSED = [(one, MODEL, f"trained with {one['path']}, but the ROLE is models/draft; .*allow_foreign") for one in OTHERS]
REFUSED += [
    (MODEL | {"weights": "b" * 64}, MODEL | {"role": "pair.draft"}, SAME_PATH),
    (ON_HUB, ON_HUB | {"revision": "v2"}, r"revision main.*revision v2"),
]
FITTING = [{}, MODEL | {"dtype": "bfloat16"}, {"path": "elsewhere/copy", "name": "copy", "weights": "a" * 64}]
FITTING += [{"path": name, "name": name, "revision": None} for name in ("org/draft", "checkpoints/draft")]


@pytest.mark.parametrize("role", ["draft", "target"])
def test_a_head_of_another_model_or_sampling_is_refused_with_both_named_and_what_is_unknown_passes(role):
    for trained, current, message in REFUSED:
        with pytest.raises(ValueError, match=message.replace("ROLE", role)):
            check_fits(head(**{role: trained}).provenance, "h", **{role: current})
    with pytest.raises(ValueError, match=r"'temperature': 1\.0.*'temperature': 0\.5"):
        check_fits(head(sampling=WARM).provenance, "h", sampling=WARM | {"temperature": 0.5})
    for same in FITTING:
        check_fits(head(**{role: same}).provenance, "h", **{role: MODEL}, sampling=WARM)
    check_fits(head(**{role: ON_HUB}, sampling=WARM).provenance, "h", **{role: ON_HUB}, sampling=WARM)


@pytest.mark.parametrize(("commits", "known"), [("", None), ("a", "a"), ("ab", None)])
def test_a_hub_model_in_memory_is_known_by_the_only_commit_in_the_cache(commits, known, tmp_path, monkeypatch):
    """transformers 5.23 stores no commit in a model, and of several in the cache any may be the one that was loaded."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    config = LlamaConfig(vocab_size=8, hidden_size=4, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    for commit in commits:
        config.save_pretrained(tmp_path / "models--org--name" / "snapshots" / commit)
    made = LlamaForCausalLM(config)
    made.name_or_path = "org/name"
    expected = {"path": "org/name", "name": "org/name", "commit": known, "hidden_size": 4}
    assert description_of(made) == expected
    if known:
        with pytest.raises(ValueError, match=r"was trained with org/name \(commit another\)"):
            check_fits(head(draft=expected | {"commit": "another"}).provenance, "h", draft=description_of(made))


def test_a_model_in_memory_is_known_by_the_directory_that_it_came_from(tmp_path):
    config = LlamaConfig(vocab_size=8, hidden_size=4, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    made = LlamaForCausalLM(config)
    assert description_of(made) == {"hidden_size": 4}
    made.save_pretrained(tmp_path)
    loaded = description_of(LlamaForCausalLM.from_pretrained(tmp_path))
    trained = head(draft=loaded)
    check_fits(trained.provenance, "h", draft=loaded)
    made.lm_head.weight.data += 1
    made.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="weights"):
        check_fits(trained.provenance, "h", draft=description_of(LlamaForCausalLM.from_pretrained(tmp_path)))

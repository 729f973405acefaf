"""What a sweep takes from its data before the first step: scales, the draft's signal, and the optimum at depth 0."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save
from torch.nn.functional import silu

from configs.schema import Config
from heads.command import load_sweep
from heads.measures.histogram import observe
from heads.measures.scores import fit_logistic, measures
from heads.model.formula import Scaling
from heads.model.head import HeadShape
from heads.model.inputs import SIGNALS, Inputs
from heads.training import start as start_module
from heads.training.command import train
from heads.training.stack import HeadStack
from heads.training.start import moments, scaling_of
from heads.training.sweep import Sweep
from store.shards import read_sidecar, write_shard
from tests.toys.made_up import feature_data, make_config, set_keys

DRAWN = {"timings": ("drawn",), "scalars": (True,), "reject_weights": (1.0, 6.0, 12.0)}


def swept(config: Config) -> Sweep:
    train(config)
    return load_sweep(Path(config.heads.dir) / "last.ckpt")


@pytest.fixture(scope="module")
def sweep(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    shapes = {"depths": (0, 1), "normalised": (False, True)}
    trainer = {"max_epochs": 2, "limit_test_batches": 1}
    return swept(make_config(data_dir, tmp_path_factory.mktemp("run"), **DRAWN, **shapes, trainer=trainer))


def kl_of_signal(data_dir: Path, directory: Path) -> float:
    """KL on dev of the signal's logistic, fitted to all training responses."""
    data = feature_data(make_config(data_dir, directory, **DRAWN))

    def observed(split: str):
        features = [batch["drawn"] for batch in data.loader(split)]
        signal = torch.cat([of_batch.scalars[SIGNALS["drawn"]] for of_batch in features])
        return observe(signal[None], torch.cat([of_batch.acceptance_prob for of_batch in features])[None])

    return float(measures(observed("dev"), *fit_logistic(observed("train"))).kl)


def test_every_head_starts_at_the_signal_and_no_head_ends_above_it(sweep: Sweep, data_dir: Path, tmp_path: Path):
    first = dict(zip(map(str, sweep.specs), sweep.history[0]["calibrated_kl"], strict=True))
    signal = kl_of_signal(data_dir, tmp_path)
    for spec, best in zip(sweep.specs, sweep.best_kl.tolist(), strict=True):
        start = first[str(spec)]
        assert start == pytest.approx(signal, abs=0.005) if spec.shape.depth else start < 0.1 * signal
        assert best <= start


def test_linear_heads_are_solved_before_the_first_step_and_adam_leaves_them_alone(sweep: Sweep):
    """The label is a function of linear columns: its heads come near 0 in no step, with any reject weight."""
    for spec, kls in zip(
        sweep.specs, zip(*(entry["calibrated_kl"] for entry in sweep.history), strict=True), strict=True
    ):
        if spec.shape.depth == 0:
            assert len(set(kls)) == 1
            assert kls[0] < (0.05 if spec.shape.inputs.is_normalised else 0.002)
    of_weights = [kl for spec, kl in zip(sweep.specs, sweep.best_kl.tolist(), strict=True) if not spec.shape.depth]
    assert max(of_weights[:3]) - min(of_weights[:3]) < 1e-3
    trained = {id(parameter) for stack in sweep.trained for parameter in stack.parameters()}
    for stack in sweep.by_shape:
        assert all((id(parameter) in trained) == parameter.requires_grad for parameter in stack.parameters())


def test_a_sweep_of_linear_heads_alone_is_solved_too(data_dir: Path, tmp_path: Path):
    settings = {"depths": (0,), "embeddings": (False,)} | DRAWN
    solved = swept(make_config(data_dir, tmp_path, **settings, trainer={"max_epochs": 1}))
    before, after = [entry["calibrated_kl"] for entry in solved.history]
    assert before == after
    assert max(after) < 0.002


def test_a_fit_is_the_same_whether_columns_are_stored_or_read_in_every_pass(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    settings = {"depths": (0,), "embeddings": (False,), "timings": ("fed", "drawn"), "scalars": (True,)}
    weights = []
    num_reads = []
    read = start_module.Start._parts
    for number, size in enumerate((start_module.STORED_BYTES, 0)):
        loaders: list[object] = []
        monkeypatch.setattr(start_module, "STORED_BYTES", size)
        monkeypatch.setattr(start_module.Start, "_parts", lambda *of: loaders.append(of[-1]) or read(*of))  # noqa: B023
        solved = swept(make_config(data_dir, tmp_path / str(number), **settings, trainer={"max_epochs": 1}))
        weights.append([stack.linear_weights() for stack in solved.by_shape])
        num_reads.append(len(loaders))
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=0)
    assert num_reads[0] == 2 < num_reads[1], "once for the curvature and once for all passes, or in every pass"


def test_specdec_s_own_heads_keep_the_paper_s_recipe(data_dir: Path, tmp_path: Path):
    own = swept(make_config(data_dir, tmp_path, timings=("fed",), scalars=(False, True), trainer={"max_epochs": 1}))
    papers = [stack for stack in own.by_shape if stack.shape.is_specdec]
    assert [str(stack.shape) for stack in papers] == ["fed-d0", "fed-d2"]
    for stack in papers:
        assert not stack.is_solved
        assert not stack.hidden_scaling.mean.any()
        assert (stack.hidden_scaling.deviation == 1).all()
    others = [stack for stack in own.by_shape if not stack.shape.is_specdec]
    assert all(stack.hidden_scaling.mean.any() for stack in others)


def scaled(data_dir: Path, directory: Path, factor: float) -> Path:
    """The data with hidden states times a factor."""
    shutil.copytree(data_dir, directory)
    for path in directory.glob("states/*/*.safetensors"):
        sidecar = read_sidecar(path, keys=("rows", "tokens"))
        states = load_file(path)["hidden"] * factor
        write_shard(path, save({"hidden": states}), rows=sidecar["rows"], tokens=sidecar["tokens"])
    set_keys(directory)
    return directory


def test_the_scale_of_hidden_states_changes_next_to_nothing(data_dir: Path, tmp_path: Path):
    """At depth 0 rounding, deeper a little: SiLU of larger numbers is nearer to a ramp."""
    kls = []
    for factor in (2.0, 16.0):  # exact in bfloat16
        data = scaled(data_dir, tmp_path / f"data-{factor}", factor)
        shapes = {"depths": (0, 1), "reject_weights": (1.0,), "timings": ("drawn",), "scalars": (True,)}
        run = swept(make_config(data, tmp_path / f"run-{factor}", **shapes, trainer={"max_epochs": 16}))
        kls.append(run.best_kl.tolist())
    (linear, deep), (linear_16, deep_16) = kls
    assert linear_16 == pytest.approx(linear, abs=1e-6)
    assert deep_16 == pytest.approx(deep, abs=1e-3)


def test_moments_are_those_of_all_tokens_and_a_constant_column_keeps_deviation_1():
    columns = torch.randn(900, 4) * torch.tensor([1.0, 1e-3, 50.0, 0.0]) + torch.tensor([0.0, 3.0, -400.0, 7.0])
    parts = [*columns.split(70), columns[:0]]
    scaling = scaling_of(torch.stack([moments(part) for part in parts]).sum(0))
    torch.testing.assert_close(scaling.mean, columns.double().mean(0))
    expected = columns.double().std(0, correction=0)
    torch.testing.assert_close(scaling.deviation[:3], expected[:3], rtol=1e-4, atol=0)
    assert scaling.deviation[3] == 1


def test_an_exported_head_is_the_trained_form_of_law_4_7():
    """h_0 = h + t (U x + c), h_d = h_{d-1} + SiLU(t (A (h_{d-1} - m) / s + b)), f = w (h_D - m) / s + v x + b."""
    torch.manual_seed(0)
    stack = HeadStack(HeadShape("drawn", Inputs.of(True, True), 2), (1.0,), hidden_size=8, seed=0).double()
    for parameter in stack.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    hidden, scalars, embedding = (
        torch.randn(3, 50, 8).double(),
        torch.randn(50, 3).double(),
        torch.randn(50, 8).double(),
    )
    raw = hidden[0] * 5 + 30
    x = torch.cat([scalars, embedding], -1)
    m, s = raw.mean(0), raw.std(0)
    s[0] = 0.25
    stack.standardise(Scaling(m, s), Scaling(x.mean(0), x.std(0)))
    w = {name: weight[0] for name, weight in stack.weights.items()}
    t, x_std = s.clamp(min=1), (x - x.mean(0)) / x.std(0)
    stream = raw + t * (x_std @ w["mix.weight"].T + w["mix.bias"])
    for index in range(2):
        read = (stream - m) / s @ w[f"blocks.{index}.weight"].T + w[f"blocks.{index}.bias"]
        stream = stream + silu(t * read)
    expected = (stream - m) / s @ w["out.weight"].T + x_std @ w["skip.weight"].T + w["out.bias"]
    logit = stack(*stack.shape.inputs.read(raw, scalars, embedding))
    torch.testing.assert_close(logit[0], expected.squeeze(-1))
    exported = stack.head(0).double()
    torch.testing.assert_close(exported(raw, scalars, embedding), expected.squeeze(-1), atol=1e-4, rtol=1e-4)


def test_the_tokens_of_a_fit_are_limited(data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of large data, linear heads are fitted to the first tokens."""
    monkeypatch.setattr(start_module, "MOST_TOKENS", 200)
    monkeypatch.setattr(start_module, "TOKENS_PER_COLUMN", 1)
    config = make_config(data_dir, tmp_path, **DRAWN, depths=(0,), trainer={"max_epochs": 1})
    few = swept(config)
    data = feature_data(config)
    assert sum(len(batch["drawn"].token) for batch in data.first_tokens(200)) <= 200
    assert sum(len(batch["drawn"].token) for batch in data.first_tokens(10**9)) == sum(
        len(batch["drawn"].token) for batch in data.loader("train")
    )
    assert max(few.best_kl.tolist()) < 0.1

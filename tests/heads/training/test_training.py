"""What a whole run learns, measures and writes, and the settings that follow from its data."""

import io
import json
import pydoc
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import pytorch_lightning as pl
import torch
from safetensors.torch import load_file, save
from torch.nn.functional import binary_cross_entropy

import heads
from configs.schema import Config, HeadsConfig
from heads import AcceptanceHead, train_heads
from heads.command import load_sweep
from heads.training.command import build, settled_training, train
from heads.training.trainer import trainer_arguments
from store.shards import shard_path, write_shard
from tests.heads.conftest import Run
from tests.toys.made_up import feature_data, make_config, set_keys, write_data


def test_a_run_writes_tables_metrics_plots_and_logs_and_ends_with_a_verdict(trained: Run):
    directory = Path(trained.config.heads.dir)
    fed, drawn, *others = trained.output.splitlines()
    assert fed.startswith("Best fed-time head on dev: ")
    assert drawn.startswith("Best drawn-time head on dev: ")
    assert others[-1].startswith(f"all metrics: {directory / 'tables.md'}")
    written = json.loads((directory / "val_metrics.json").read_text())["results"]
    assert list(written) == list(trained.results) == ["dev", "train", "test"]
    assert set(trained.results["dev"]["heads"]) == set(written["dev"]["heads"])
    assert len(written["dev"]["heads"]) == 16
    head = written["test"]["heads"]["drawn+s-d2-w6"]
    assert {"calibrated_kl", "raw_kl", "auroc", "calibrated_ece", "raw_brier", "temperature"} <= head.keys()
    assert {"by_position", "survival", "reliability"} <= head["raw"].keys()
    assert set(written["dev"]["signals"]["fed"]) == {"logit_token_prob"}
    tables = (directory / "tables.md").read_text()
    assert "| logit_token_prob alone (drawn) |" in tables
    assert "by set" not in tables
    plots = {path.stem for path in (directory / "plots").glob("*.png") if path.read_bytes().startswith(b"\x89PNG")}
    assert plots == {"reliability", "along_draft", "learning_curves"}
    assert list((directory / "logs" / "tb").glob("events*"))
    assert "dev/calibrated_kl/fed-d0-w1" in (directory / "logs" / "csv" / "version_0" / "metrics.csv").read_text()
    assert json.loads((directory / "run.json").read_text())["versions"]["torch"]


def test_the_draft_s_own_signal_is_fitted_to_training_responses_and_measured_on_dev(trained: Run):
    """At the optimum residuals are orthogonal to both columns; on dev the same two numbers give the KL."""
    data, measured = feature_data(trained.config), trained.results["dev"]
    for timing in ("fed", "drawn"):
        residuals, kls = {}, {}
        for split in ("train", "dev"):
            batches = [batch[timing] for batch in data.loader(split)]
            signal = torch.cat([batch.scalars["logit_token_prob"] for batch in batches]).double()
            label = torch.cat([batch.acceptance_prob for batch in batches]).double()
            fitted = measured["signals"][timing]["logit_token_prob"]
            prob = (fitted["slope"] * signal + fitted["offset"]).sigmoid()
            residuals[split] = torch.stack([(prob - label).mean(), ((prob - label) * signal).mean()])
            kls[split] = float(binary_cross_entropy(prob, label) - binary_cross_entropy(label, label))
        torch.testing.assert_close(residuals["train"], torch.zeros(2).double(), atol=1e-5, rtol=0)
        assert residuals["dev"].abs().max() > 1e-3, "not fitted to dev"
        assert fitted["calibrated_kl"] == pytest.approx(kls["dev"], abs=1e-5)


def test_the_monitor_is_relative_to_the_signal_of_each_heads_own_timing(data_dir: Path, tmp_path: Path):
    """Labels of prefix heads differ from those of drawn-time heads, and so do their KLs."""
    settings = {"timings": ("drawn", "prefix"), "scalars": (False,), "depths": (0,), "reject_weights": (1.0,)}
    monitor = Monitored()
    config = make_config(data_dir, tmp_path, trainer={"max_epochs": 1, "callbacks": [monitor]}, **settings)
    dev = train(config)["dev"]
    shares = {
        timing: dev["heads"][f"{timing}-d0-w1"]["calibrated_kl"] / dev["signals"][timing][scalar]["calibrated_kl"]
        for timing, scalar in (("drawn", "logit_token_prob"), ("prefix", "logit_max_prob"))
    }
    assert sum(shares.values()) > 1.5 * sum(head["calibrated_kl"] for head in dev["heads"].values())
    assert monitor.values == [pytest.approx(sum(shares.values()) / 2, rel=1e-4)]


def test_best_weights_of_each_head_are_those_of_its_best_validation_and_a_run_warns_of_nothing(data_dir, tmp_path):
    config = make_config(data_dir, tmp_path / "run", learning_rate=0.3, trainer={"max_epochs": 6, "logger": True})
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Checkpoint directory")
        warnings.filterwarnings("error", "The number of training batches")
        results = train(config)
    sweep = load_sweep(tmp_path / "run" / "last.ckpt")
    for index, spec in enumerate(sweep.specs):
        best = min(entry["calibrated_kl"][index] for entry in sweep.history)
        assert results["dev"]["heads"][str(spec)]["calibrated_kl"] == pytest.approx(best, abs=1e-6)


def test_a_sweep_overfits_what_can_be_known(data_dir: Path, tmp_path: Path):
    """Labels are a function of hidden state and log q(y): heads that see both come near zero KL, others do not. The
    label of prefix heads is a function of the hidden state alone: a linear head comes to logit(rate) - ln w, law 4.7.
    """
    by_position = "log_token_prob", "entropy", "text_position"
    settings = {"timings": ("drawn", "prefix"), "scalars": (False, True, by_position, by_position[1:])}
    settings |= {"depths": (0,), "learning_rate": 0.1}
    config = make_config(data_dir, tmp_path / "run", **settings, trainer={"max_epochs": 40})
    assert build(config)[1].timings == ("drawn",), "both read one feature set"
    found = train(config)["dev"]["heads"]
    for name in ("drawn+s-d0-w1", "drawn+s-d0-w6", "drawn+s+text_position-d0-w1", "prefix-d0-w6"):
        assert found[name]["calibrated_kl"] < 0.003
        assert not name.endswith("w6") or found[name]["raw_kl"] > 0.1
    assert found["drawn-d0-w1"]["calibrated_kl"] > 0.02, "log q(y) decides its label too"
    for name in ("prefix+entropy+text_position-d0-w1", "prefix-d0-w1"):
        assert found[name]["raw_kl"] < 0.003


@pytest.mark.slow
def test_a_candidate_head_learns_the_target_s_probability_of_the_token(data_dir: Path, tmp_path: Path):
    """Of the states of a drawn-time head, whose label is another one: each is close to its own."""
    settings = {"scalars": (True,), "depths": (0, 1), "reject_weights": (1.0,), "learning_rate": 0.03}
    settings |= {"timings": ("drawn", "candidate"), "trainer": {"max_epochs": 40}}
    config = make_config(data_dir, tmp_path / "run", **settings)
    results = train(config)["dev"]
    means = {timing: labels["mean_acceptance_prob"] for timing, labels in results["labels"].items()}
    assert means["candidate"] < 0.7 * means["drawn"]
    assert results["heads"]["candidate+s-d1-w1"]["raw_kl"] < 0.01
    assert results["heads"]["drawn+s-d1-w1"]["raw_kl"] < 0.01


def test_labels_without_a_number_that_a_head_learns_and_a_loss_that_is_not_finite_stop_the_run(data_dir, tmp_path):
    data = Path(shutil.copytree(data_dir, tmp_path / "data"))
    for path in (data / "labels").glob("*.safetensors"):
        tensors = load_file(path)
        tensors.pop("target_prob")
        write_shard(path, save(tensors), rows=len(tensors["row_offsets"]) - 1, tokens=len(tensors["token"]))
    small = {"depths": (0,), "trainer": {"max_epochs": 1}}
    train(make_config(data, tmp_path / "drawn", timings=("drawn",), **small))
    with pytest.raises(ValueError, match=r"no tensor 'target_prob'; delete .* and run `acceptance-heads data` again"):
        train(make_config(data, tmp_path / "candidate", timings=("candidate",), **small))
    config = make_config(data_dir, tmp_path / "run", **small)
    sweep, module = build(config)
    with torch.no_grad():
        sweep.by_shape[0].out_bias[0] = torch.nan
        sweep.is_started.fill_(True)
    with pytest.raises(ValueError, match=r"loss of fed-d0-w1 is not finite at step 0"):
        pl.Trainer(**trainer_arguments(config)).fit(sweep, datamodule=module)


@pytest.mark.slow
def test_the_metrics_of_a_split_are_the_means_of_those_of_its_sets(tmp_path: Path):
    data = write_data(tmp_path / "data")
    for split, num in (("dev", 24), ("test", 8)):
        sink, sets = io.BytesIO(), ["large" if row % 4 else "small" for row in range(num)]
        pq.write_table(pa.table({"set": sets}), sink)
        write_shard(shard_path(data, "rows", split, 0), sink.getvalue(), rows=num, tokens=0)
    set_keys(data)
    manifest = json.loads((data / "manifest.json").read_text())
    (data / "manifest.json").write_text(json.dumps(manifest | {"prompts": ["small", "large"]}))
    results = train(make_config(data, tmp_path / "run", trainer={"max_epochs": 1}, timings=("fed", "drawn")))
    assert list(results) == ["dev", "train", "test", "dev/large", "dev/small", "test/large", "test/small"]
    for split in ("dev", "test"):
        parts = [results[f"{split}/{name}"] for name in ("large", "small")]
        for timing, labels in results[split]["labels"].items():
            tokens = [part["labels"][timing]["num_tokens"] for part in parts]
            assert sum(tokens) == labels["num_tokens"]
            for name in (name for name in results[split]["heads"] if name.startswith(timing)):
                whole, *each = (of["heads"][name]["calibrated_kl"] for of in (results[split], *parts))
                # a bin's error is below g'' / 98,304, and g'' of the cross-entropy at most 1 / 4 temperature^2
                error = 1 / (4 * 98_304 * results[split]["heads"][name]["temperature"] ** 2)
                assert np.average(each, weights=tokens) == pytest.approx(whole, abs=error + 1e-9)
    assert parts[0]["labels"] != parts[1]["labels"]
    assert "| dev/small |" in (tmp_path / "run" / "tables.md").read_text()


class CountEpochs(pl.Callback):
    num_epochs = 0

    def on_train_epoch_end(self, *_) -> None:
        self.num_epochs += 1


def test_train_heads_takes_a_directory_with_data_or_a_config_and_calls_callbacks(data_dir, tmp_path, capsys):
    data = Path(shutil.copytree(data_dir, tmp_path / "data"))
    manifest = json.loads((data / "manifest.json").read_text())
    split = {name: {"prompts": num} for name, num in (("train", 64), ("dev", 24), ("test", 8))}
    extended = manifest | {"split": split, "split_weights": [8, 1, 1]}
    (data / "manifest.json").write_text(json.dumps(extended))
    callback = CountEpochs()
    settings = {"depths": (0,), "embeddings": (False,), "learning_rate": 0.1}
    head = train_heads(data, max_epochs=2, callbacks=[callback], force=True, **settings)
    assert (callback.num_epochs, head.shape_name) == (2, "drawn+s-d0")
    assert AcceptanceHead.from_pretrained(data / "heads" / "exported" / "drawn+s-d0-w1").config == head.config
    assert capsys.readouterr().out.count("Best drawn-time head on dev") == 1
    other = train_heads(make_config(data_dir, tmp_path / "unused"), dir=tmp_path / "run", max_epochs=1, force=True)
    assert other.timing == "fed"
    assert not (tmp_path / "unused").exists()
    assert (tmp_path / "run" / "exported").is_dir()


def test_an_object_where_a_path_is_due_is_refused_in_one_line_and_help_shows_every_public_name():
    """By the type check where every call has one."""
    for call, message in (
        (train_heads, r"^the experiment is of type AcceptanceHead; give a Config, or the path of a YAML file$"),
        (AcceptanceHead.from_pretrained, r"^AcceptanceHead is neither a path nor a hub id of a head"),
    ):
        with pytest.raises((ValueError, TypeError), match=rf"{message}|Actual value: AcceptanceHead"):
            call(AcceptanceHead(4, 0))
    text = pydoc.render_doc(heads, renderer=pydoc.plaintext)
    for name in (*heads.__all__, "push_to_hub", "head.calibrated("):
        assert name in text


class Monitored(pl.Callback):
    """Keeps what EarlyStopping would read."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_validation_end(self, trainer, pl_module) -> None:
        self.values += [] if trainer.sanity_checking else [float(trainer.callback_metrics["dev/calibrated_kl"])]


def left_open(data_dir: Path, run: Path, **heads) -> Config:
    config = make_config(data_dir, run, **{"learning_rate": None} | heads)
    return replace(config, trainer={name: value for name, value in config.trainer.items() if name != "max_epochs"})


def with_manifest(data_dir: Path, monkeypatch: pytest.MonkeyPatch, module: str, **draft) -> dict:
    """The data's manifest, which a module then reads from memory."""
    manifest = json.loads((data_dir / "manifest.json").read_text())
    manifest["draft"] |= draft
    monkeypatch.setattr(f"{module}.read_manifest", lambda *_, **__: manifest)
    return manifest


def test_the_rate_follows_from_the_width_and_few_responses_are_read_more_often(data_dir, tmp_path, capsys, monkeypatch):
    for batch_size, num_train, epochs in ((1, None, 7), (8, None, 30), (1, 4, 30), (1, 400, 7)):
        config = left_open(data_dir, tmp_path, batch_size=batch_size, num_train=num_train)  # 64 responses
        assert settled_training(config).trainer["max_epochs"] == epochs
        assert f"trainer.max_epochs {epochs} for {min(num_train or 64, 64)} responses" in capsys.readouterr().out
    for width, rate in ((16, 1e-2), (128, 1e-2), (576, 2.6e-3), (4096, 3.7e-4)):
        with_manifest(data_dir, monkeypatch, "heads.training.command", hidden_size=width)
        assert settled_training(left_open(data_dir, tmp_path)).heads.learning_rate == pytest.approx(rate)


def test_nothing_is_printed_if_everything_is_given_or_by_other_processes(data_dir, tmp_path, capsys, monkeypatch):
    config = make_config(data_dir, tmp_path)
    assert settled_training(config) == config
    steps = replace(left_open(data_dir, tmp_path, learning_rate=1e-3), trainer={"max_steps": 5})
    assert settled_training(steps).trainer == {"max_steps": 5}
    monkeypatch.setattr("heads.training.command.is_first_process", lambda: False)
    assert settled_training(left_open(data_dir, tmp_path)).trainer["max_epochs"]
    assert capsys.readouterr().out == ""
    for axis in ("timings", "depths", "reject_weights"):
        with pytest.raises(ValueError, match=f"heads.{axis} is empty"):
            settled_training(left_open(tmp_path / "no data", tmp_path, **{axis: ()}))


def test_heads_read_the_states_of_their_timings():
    for timings, specdec, states in (
        (("drawn",), False, ("drawn",)),
        (("prefix", "candidate"), False, ("drawn",)),
        (("drawn",), True, ("fed", "drawn")),
        (("fed",), False, ("fed",)),
    ):
        assert HeadsConfig(timings=timings, specdec=specdec).state_timings == states


def test_training_needs_no_prompts(data_dir, tmp_path):
    config = make_config(data_dir, tmp_path / "run", trainer={"max_epochs": 1})
    elsewhere = replace(config.data, prompts=str(tmp_path / "on another machine.jsonl"), num_train=None)
    assert train(replace(config, data=replace(elsewhere, split_weights=None)))["dev"]

"""The whole run: resume bit for bit, two processes, another config refused, overfitting, what is written."""

import json
import os
import shutil
import signal
import subprocess
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from safetensors.torch import load_file, save

from heads.command import load_sweep
from heads.training.command import build, train
from heads.training.trainer import trainer_arguments
from store.shards import write_shard
from tests.data_gen.processes import descendants
from tests.toys.made_up import ROOT, command, environment, make_config


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return torch.load(run_dir / "last.ckpt", weights_only=True)["state_dict"]


class StopAfter(pl.Callback):
    """Ctrl-C after so many batches."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def on_train_batch_end(self, trainer, *args) -> None:
        self.batches -= 1
        if self.batches == 0:
            raise KeyboardInterrupt


class StopWithin(StopAfter):
    """Ctrl-C in the middle of a step."""

    def on_train_batch_end(self, *args) -> None:
        pass

    def on_before_backward(self, trainer, *args) -> None:
        super().on_train_batch_end(trainer)


@pytest.mark.parametrize(
    ("stop", "accumulate", "validate"),
    [
        (StopAfter(13), 1, 8),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                *((StopAfter(3), 1, 8), (StopAfter(8), 1, 8), (StopAfter(11), 3, 8), (StopWithin(13), 1, 8)),
                *((StopAfter(batches), 3, 4) for batches in (4, 5, 6, 7, 12, 13)),
            )
        ),
    ],
)
def test_an_interrupted_run_ends_in_the_very_weights_of_an_uninterrupted_one(
    data_dir: Path, tmp_path: Path, stop, accumulate: int, validate: int
):
    """8 batches an epoch, 3 epochs; stopped inside and at the end of an epoch, inside a forward, and inside an
    accumulated step, also where a validation came within one.
    """
    trainer = {"max_epochs": 3, "accumulate_grad_batches": accumulate, "val_check_interval": validate}
    whole = make_config(data_dir, tmp_path / "whole", trainer=trainer, checkpoint_every_n_steps=1000)
    train(whole)
    broken = make_config(data_dir, tmp_path / "broken", trainer=trainer, checkpoint_every_n_steps=1000)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        train(replace(broken, trainer=broken.trainer | {"callbacks": [stop]}))
    train(broken)
    expected, found = weights(tmp_path / "whole"), weights(tmp_path / "broken")
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


def kill_second_process(arguments: list[str], checkpoint: Path) -> None:
    """Start a run of two processes, kill the second after the first checkpoint, and see that the first ends as well."""
    run = subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment())
    while not checkpoint.is_file() and run.poll() is None:
        time.sleep(0.01)
    [second] = [pid for pid in descendants(run.pid) if "train.py" in Path(f"/proc/{pid}/cmdline").read_text()]
    os.kill(second, signal.SIGKILL)
    assert run.wait(timeout=60) != 0


@pytest.mark.slow
@pytest.mark.parametrize("resumed", [2, 1])
def test_two_processes_of_which_one_was_killed_resume_and_take_the_steps_of_one(
    data_dir: Path, tmp_path: Path, resumed: int
):
    """gloo, 8 responses a batch: the same batches, so the same weights up to rounding; metrics over dev, each token
    once.
    """
    shared = {"timings": ("fed", "drawn"), "scalars": (True,), "learning_rate": 1e-3}
    trainer = {"max_epochs": 10}
    one = make_config(data_dir, tmp_path / "one", **shared, trainer=trainer)
    two = make_config(
        data_dir, tmp_path / "two", **shared, trainer=trainer | {"devices": 2}, checkpoint_every_n_steps=1
    )
    train(one)
    kill_second_process(command(two, tmp_path), tmp_path / "two" / "last.ckpt")
    assert not (tmp_path / "two" / "val_metrics.json").exists()
    two = replace(two, trainer=two.trainer | {"devices": resumed})
    subprocess.run(command(two, tmp_path), cwd=ROOT, check=True, capture_output=True, env=environment())
    expected, found = weights(tmp_path / "one"), weights(tmp_path / "two")
    for name in expected:
        if name.startswith("stacks"):
            torch.testing.assert_close(found[name], expected[name], atol=2e-4, rtol=1e-3)
    metrics = [json.loads((tmp_path / name / "val_metrics.json").read_text())["results"] for name in ("one", "two")]
    for split in ("dev", "train", "test"):
        for timing, labels in metrics[0][split]["labels"].items():
            assert metrics[1][split]["labels"][timing] == pytest.approx(labels, rel=1e-9), "no token is counted twice"
        for name, head in metrics[0][split]["heads"].items():
            assert metrics[1][split]["heads"][name]["calibrated_kl"] == pytest.approx(head["calibrated_kl"], abs=1e-4)


def test_a_run_writes_tables_metrics_plots_and_logs_and_ends_with_a_verdict(data_dir: Path, tmp_path: Path, capsys):
    config = make_config(
        data_dir,
        tmp_path / "run",
        timings=("fed", "drawn"),
        scalars=(False, True),
        trainer={"logger": True},
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Checkpoint directory")
        warnings.filterwarnings("error", "The number of training batches")
        results = train(config)
    fed, drawn, *others = capsys.readouterr().out.splitlines()
    assert fed.startswith("Best fed-time head on dev: ")
    assert drawn.startswith("Best drawn-time head on dev: ")
    assert others[-2].startswith(f"all metrics: {tmp_path / 'run' / 'tables.md'}")
    assert others[-1] == "next: acceptance-heads export --config …"
    written = json.loads((tmp_path / "run" / "val_metrics.json").read_text())
    assert set(results["dev"]["heads"]) == set(written["results"]["dev"]["heads"])
    assert len(results["dev"]["heads"]) == 16
    head = written["results"]["test"]["heads"]["drawn+s-d2-w6"]
    assert {"calibrated_kl", "raw_kl", "auroc", "calibrated_ece", "raw_brier", "temperature"} <= head.keys()
    assert {"by_position", "survival", "reliability"} <= head["raw"].keys()
    assert set(written["results"]["dev"]["signals"]["fed"]) == {"log_token_prob", "negative_entropy"}
    assert "| log_token_prob alone (drawn) |" in (tmp_path / "run" / "tables.md").read_text()
    assert {path.name for path in (tmp_path / "run" / "plots").iterdir()} >= {
        "heat_map.png",
        "reliability.png",
        "learning_curves.png",
    }
    assert list((tmp_path / "run" / "logs" / "tb").glob("events*"))
    assert (
        "dev/calibrated_kl/fed-d0-w1" in (tmp_path / "run" / "logs" / "csv" / "version_0" / "metrics.csv").read_text()
    )
    assert json.loads((tmp_path / "run" / "run.json").read_text())["versions"]["torch"]


def test_a_sweep_overfits_what_can_be_known(data_dir: Path, tmp_path: Path):
    """Labels are a function of hidden state and log q(y): heads that see both come near zero KL, those that see one do
    not.
    """
    config = make_config(
        data_dir,
        tmp_path / "run",
        timings=("drawn",),
        scalars=(False, True),
        depths=(0,),
        learning_rate=0.1,
        trainer={"max_epochs": 40},
    )
    heads = train(config)["dev"]["heads"]
    assert heads["drawn+s-d0-w1"]["calibrated_kl"] < 0.003
    assert heads["drawn+s-d0-w6"]["calibrated_kl"] < 0.003
    assert heads["drawn-d0-w1"]["calibrated_kl"] > 0.02
    assert heads["drawn+s-d0-w6"]["raw_kl"] > 0.1, "raw probabilities of a reject weight of 6 are not calibrated"


def test_a_prefix_head_learns_the_acceptance_rate_beside_a_drawn_time_one(data_dir: Path, tmp_path: Path):
    """That label is a function of the hidden state alone: a linear head of weight w comes to logit(rate) - ln w, law
    4.7's optimum.
    """
    settings = {"timings": ("drawn", "prefix"), "depths": (0,), "learning_rate": 0.1, "trainer": {"max_epochs": 40}}
    _, data = build(config := make_config(data_dir, tmp_path / "run", **settings))
    assert data.timings == ("drawn",), "both read one feature set"
    results = train(config)["dev"]["heads"]
    assert results["prefix-d0-w1"]["raw_kl"] < 0.003
    assert results["prefix-d0-w6"]["calibrated_kl"] < 0.003 < 0.1 < results["prefix-d0-w6"]["raw_kl"]
    assert results["drawn-d0-w1"]["calibrated_kl"] > 0.02, "log q(y) decides its label too"


@pytest.mark.slow
def test_a_candidate_head_learns_the_target_s_probability_of_the_token(data_dir: Path, tmp_path: Path):
    """Of one set of features with a drawn-time head, whose label is another one: each is close to its own."""
    settings = {
        "timings": ("drawn", "candidate"),
        "scalars": (True,),
        "depths": (0, 1),
        "reject_weights": (1.0,),
        "learning_rate": 0.03,
    }
    config = make_config(data_dir, tmp_path / "run", **settings, trainer={"max_epochs": 40})
    results = train(config)["dev"]
    assert (
        results["labels"]["candidate"]["mean_acceptance_prob"]
        < 0.7 * results["labels"]["drawn"]["mean_acceptance_prob"]
    )
    assert results["heads"]["candidate+s-d1-w1"]["raw_kl"] < 0.01
    assert results["heads"]["drawn+s-d1-w1"]["raw_kl"] < 0.01


def test_features_of_an_earlier_version_have_no_label_for_candidate_heads(data_dir: Path, tmp_path: Path):
    shutil.copytree(data_dir, tmp_path / "data")
    for path in (tmp_path / "data").rglob("*.safetensors"):
        tensors = load_file(path)
        tensors.pop("target_prob")
        write_shard(path, save(tensors), rows=len(tensors["row_offsets"]) - 1, tokens=len(tensors["token"]))
    train(
        make_config(tmp_path / "data", tmp_path / "drawn", timings=("drawn",), depths=(0,), trainer={"max_epochs": 1})
    )
    with pytest.raises(ValueError, match=r"no tensor 'target_prob'; delete .* and run `acceptance-heads data` again"):
        train(make_config(tmp_path / "data", tmp_path / "candidate", timings=("candidate",), depths=(0,)))


def test_best_weights_of_each_head_are_those_of_its_best_validation(data_dir: Path, tmp_path: Path):
    config = make_config(data_dir, tmp_path / "run", learning_rate=0.3, trainer={"max_epochs": 6})
    results = train(config)
    sweep = load_sweep(tmp_path / "run" / "last.ckpt")
    for index, spec in enumerate(sweep.specs):
        best = min(entry["calibrated_kl"][index] for entry in sweep.history)
        assert results["dev"]["heads"][str(spec)]["calibrated_kl"] == pytest.approx(best, abs=1e-6)


def test_a_loss_that_is_not_finite_stops_the_run(data_dir: Path, tmp_path: Path):
    config = make_config(data_dir, tmp_path / "run", depths=(0, 2), trainer={"max_epochs": 1})
    sweep, data = build(config)
    with torch.no_grad():
        sweep.items()[0][1].out_bias[0] = torch.nan
    with pytest.raises(ValueError, match=r"loss of fed-d0-w1 is not finite at step 0"):
        pl.Trainer(**trainer_arguments(config)).fit(sweep, datamodule=data)

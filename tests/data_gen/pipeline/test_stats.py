"""The plan before a run, and the statistics after it."""

from pathlib import Path

import numpy as np
import pytest
import torch

from data_gen.pipeline.command import make
from data_gen.pipeline.plan import plan
from data_gen.stats import accepted_length, lower_bounds, stats
from data_gen.store.rows import read_rows
from lm import acceptance_rate, cross_entropy, entropy
from store.shards import list_shards, read_sidecar, rows_path


def test_acceptance_lies_above_both_bounds_for_any_pair_of_distributions():
    torch.manual_seed(0)
    q_logits, p_logits = 2 * torch.randn(2000, 6).double(), 2 * torch.randn(2000, 6).double()
    rate = acceptance_rate(q_logits.softmax(-1), p_logits.softmax(-1)).numpy()
    bounds = lower_bounds(entropy(q_logits).numpy(), cross_entropy(q_logits, p_logits).numpy())
    assert (rate >= bounds["pinsker"] - 1e-9).all()
    assert (rate >= bounds["bretagnolle_huber"] - 1e-9).all()


def test_accepted_length_is_the_mean_run_of_accepted_tokens():
    rates = np.array([0.5, 1.0, 0.2])
    assert accepted_length(rates).tolist() == pytest.approx([0.5 + 0.5 + 0.5 * 0.2, 1.2, 0.2])


@pytest.mark.draws
def test_stats_summarise_a_run_and_draw_its_plots(toy_config, capsys):
    make(toy_config)
    summary = stats(toy_config)
    last = capsys.readouterr().out.splitlines()[-1]
    assert f"a drafted token of train with probability {summary['acceptance_rate_mean']:.2f} on average" in last
    rows = [row for path in list_shards(toy_config.data.dir, "train") for row in read_rows(path).to_pylist()]
    rates = [rate for row in rows for rate in row["acceptance_rate"]]
    assert summary["acceptance_rate_mean"] == pytest.approx(np.mean(rates))
    assert summary["rows"] == summary["prompts_input"] == 8
    assert summary["pinsker_violations"] == summary["bretagnolle_huber_violations"] == 0.0
    assert summary["c"] == pytest.approx((summary["cross_entropy_mean_nats"] / summary["entropy_mean_nats"] - 1) / 2)
    assert Path(toy_config.data.dir, "stats", "train.png").is_file()


def test_stats_refuse_a_corrupted_shard(toy_config):
    make(toy_config)
    path = rows_path(toy_config.data.dir, "train", 0)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="is corrupted: its sha256"):
        stats(toy_config, plots=False)


def test_a_plan_on_every_prompt_is_what_the_run_then_takes(toy_config, with_data):
    config = with_data(toy_config, num_test=0, rows_per_shard=8)
    expected = plan(config, sample=8)
    make(config)
    facts = read_sidecar(rows_path(config.data.dir, "train", 0))
    assert expected["rows"] == facts["rows"] == 8
    assert expected["response_tokens"] == pytest.approx(facts["tokens"], rel=0.25)  # other seeds, so other lengths
    real = sum(path.stat().st_size for path in Path(config.data.dir).rglob("train-*") if path.suffix != ".json")
    assert expected["disk_bytes"] == pytest.approx(real, rel=0.1)
    assert expected["draft_sequence_forwards"] == 16
    assert expected["time_s"] > 0
    assert plan(config, sample=8) == {"rows": 0}


def test_a_plan_without_a_sample_bounds_the_disk_and_warns_when_it_is_too_small(
    toy_config, with_data, capsys, monkeypatch
):
    config = with_data(toy_config, num_test=0)
    bound = plan(config, sample=0)
    assert bound["time_s"] is None
    assert bound["response_tokens"] == 80
    assert "warning" not in capsys.readouterr().out
    usage = type("Usage", (), {"free": 10})()
    monkeypatch.setattr("data_gen.pipeline.plan.shutil.disk_usage", lambda folder: usage)
    plan(config, sample=0)
    assert "warning: not enough free disk space" in capsys.readouterr().out

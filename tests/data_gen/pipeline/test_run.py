"""A whole run on the toy pair: what is on disk, that it obeys law 4.6, and its statistics."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from configs.schema import SamplingConfig
from data_gen.pipeline.command import make
from data_gen.stats import accepted_length, stats
from data_gen.store.rows import COLUMNS, read_rows
from lm import Sampling, acceptance_prob, acceptance_rate, cross_entropy, entropy
from store.shards import list_shards, shard_path
from tests.data_gen.on_disk import hidden_states_of, rows_of, with_data, with_prompts


@torch.no_grad()
@pytest.mark.parametrize(
    "sampling", [SamplingConfig(), SamplingConfig(temperature=0.7, top_k=20), SamplingConfig(temperature=0.0)]
)
def test_labels_equal_an_independent_uncached_computation(toy_config, models, sampling):
    config = replace(toy_config, pair=replace(toy_config.pair, sampling=sampling))
    make(config)
    transform = Sampling(**vars(sampling))
    hidden = {timing: hidden_states_of(config, "train", timing) for timing in ("fed", "drawn")}
    for index, path in enumerate(list_shards(config.data.dir, "train")):
        stored = load_file(shard_path(config.data.dir, "labels", "train", index))
        fed, drawn = (hidden[timing][index].float() for timing in ("fed", "drawn"))
        for number, row in enumerate(read_rows(path).to_pylist()):
            prompt, x, y = row["prompt_ids"], row["response_ids"], torch.tensor(row["draft_ids"])
            inputs = torch.tensor([prompt + x])
            q_logits, p_logits = (
                models[name](inputs).logits[0, len(prompt) - 1 : -1, :260] for name in ("draft", "target")
            )
            q, p = transform.probs(q_logits), transform.probs(p_logits)
            expected = {
                "acceptance_prob": acceptance_prob(y, q, p),
                "acceptance_rate": acceptance_rate(q, p),
                "log_q": q.gather(-1, y[:, None])[:, 0].log(),
                "log_p": p.gather(-1, y[:, None])[:, 0].log(),
                "entropy": entropy(q_logits),
                "cross_entropy": cross_entropy(q_logits, p_logits),
            }
            for name, values in expected.items():
                rtol = 1e-4 if "entropy" in name else 1e-4 + 2**-11  # the others are float16 on disk
                torch.testing.assert_close(
                    torch.tensor(row[name]), values, rtol=rtol, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}"
                )
            assert torch.isfinite(torch.tensor(row["log_q"])).all()
            start, end = stored["row_offsets"][number : number + 2].tolist()
            z = [a if coin else b for a, b, coin in zip(x, row["draft_ids"], row["from_target"], strict=True)]
            over_z = models["draft"].model(torch.tensor([prompt + z])).last_hidden_state[0, len(prompt) :]
            over_x = models["draft"].model(inputs).last_hidden_state[0, len(prompt) - 1 : -1]
            torch.testing.assert_close(fed[start:end], over_z, rtol=0.02, atol=0.02)
            torch.testing.assert_close(drawn[start:end], over_x, rtol=0.02, atol=0.02)
            assert stored["is_drafted"][start:end].tolist() == [not coin for coin in row["from_target"]]
            token_prob = q_logits.log_softmax(-1).gather(-1, y[:, None])[:, 0]
            torch.testing.assert_close(stored["log_token_prob"][start:end], token_prob, rtol=1e-4, atol=1e-4)
            assert stored["token"][start:end].tolist() == row["draft_ids"]


def test_rows_have_the_columns_of_the_design_and_load_with_datasets(made, tmp_path):
    datasets = pytest.importorskip("datasets")
    paths = [str(path) for path in list_shards(made.data.dir, "train")]
    table = datasets.load_dataset("parquet", data_files=paths, split="train", cache_dir=str(tmp_path / "cache"))
    assert tuple(table.column_names) == COLUMNS
    assert len(table) == 8
    for row in table:
        assert len(row["acceptance_prob"]) == len(row["response_ids"]) == len(row["from_target"])
        assert row["finish_reason"] == ("stop" if row["response_ids"][-1] == 1 else "length")


def test_sequential_mode_gives_the_same_data_without_the_columns_that_need_both_models(made, apart_run):
    """The target's states come from decoding in one mode, from one pass in the other."""
    apart = with_data(made, mode="sequential", dir=str(apart_run))
    assert not (apart_run / "stages").exists()
    for row, other in zip(rows_of(apart), rows_of(made), strict=True):
        for name, value in row.items():
            if name in ("acceptance_rate", "cross_entropy"):
                assert value is None
            elif name in ("acceptance_prob", "log_p"):
                values = (torch.tensor(value), torch.tensor(other[name]))
                torch.testing.assert_close(*values, rtol=1e-4 + 2**-10, atol=1e-4)
            else:
                assert value == other[name]
    for path in list_shards(made.data.dir, "train", "labels"):
        found = load_file(Path(apart.data.dir, "labels", path.name))
        expected = load_file(path)
        assert expected.keys() - found.keys() == {"acceptance_rate"}
        for name, values in found.items():
            torch.testing.assert_close(values, expected[name], rtol=1e-4, atol=1e-4)


def test_the_coin_decides_the_mixing_also_where_both_tokens_are_equal(toy_config):
    """A draft that is the target, decoded greedily, proposes X itself everywhere; the coins must not notice."""
    pair = replace(toy_config.pair, draft=toy_config.pair.target, sampling=SamplingConfig(temperature=0.0))
    config = with_data(replace(toy_config, pair=pair), mixing_ratio=0.25)
    make(config)
    assert all(row["draft_ids"] == row["response_ids"] for row in rows_of(config))
    coins = [coin for row in rows_of(config) for coin in row["from_target"]]
    assert 0.1 < sum(coins) / len(coins) < 0.4


def test_a_second_turn_is_asked_with_the_targets_own_reply(toy_config, tmp_path):
    record = {"question_id": 81, "turns": ["first", "second"], "category": "writing"}
    config = with_prompts(toy_config, tmp_path / "turns.jsonl", [record], num_train=1)
    make(config)
    first, second = rows_of(config)
    assert (first["id"], second["id"]) == ("81", "81#2")
    assert second["prompt"].startswith(first["prompt"])
    assert second["prompt"].endswith("<end><u>second\n<a>")


def test_accepted_length_is_the_mean_run_of_accepted_tokens():
    rates = np.array([0.5, 1.0, 0.2])
    assert accepted_length(rates).tolist() == pytest.approx([0.5 + 0.5 + 0.5 * 0.2, 1.2, 0.2])


@pytest.mark.draws
def test_stats_summarise_a_run_and_draw_its_plots(made, capsys):
    summary = stats(made)
    last = capsys.readouterr().out.splitlines()[-1]
    assert f"a drafted token of train with probability {summary['acceptance_rate_mean']:.2f} on average" in last
    rates = [rate for row in rows_of(made) for rate in row["acceptance_rate"]]
    assert summary["acceptance_rate_mean"] == pytest.approx(np.mean(rates))
    assert summary["rows"] == summary["prompts_input"] == 8
    assert summary["pinsker_violations"] == summary["bretagnolle_huber_violations"] == 0.0
    assert summary["c"] == pytest.approx((summary["cross_entropy_mean_nats"] / summary["entropy_mean_nats"] - 1) / 2)
    assert Path(made.data.dir, "stats", "train.png").is_file()

"""A whole run on the toy pair: what is on disk, and that it obeys law 4.6."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from configs.schema import SamplingConfig
from data_gen.pipeline.command import make
from data_gen.store.labels import read_tensors
from data_gen.store.rows import COLUMNS, read_rows
from lm import Sampling, acceptance_prob, acceptance_rate, cross_entropy, entropy
from store.shards import features_path, labels_path, list_shards, rows_path


@pytest.mark.parametrize(
    "sampling", [SamplingConfig(), SamplingConfig(temperature=0.7, top_k=20), SamplingConfig(temperature=0.0)]
)
def test_labels_equal_an_independent_uncached_computation(toy_config, sampling):
    config = replace(toy_config, pair=replace(toy_config.pair, sampling=sampling))
    make(config)
    models = {
        name: AutoModelForCausalLM.from_pretrained(getattr(config.pair, name).path).eval()
        for name in ("target", "draft")
    }
    vocab_size = 260
    transform = Sampling(**vars(sampling))
    for path in list_shards(config.data.dir, "train"):
        index = int(path.stem.split("-")[1])
        stored = read_tensors(labels_path(config.data.dir, "train", index))
        fed, drawn = (
            read_tensors(features_path(config.data.dir, timing, "train", index))["hidden"]
            for timing in ("fed", "drawn")
        )
        for number, row in enumerate(read_rows(path).to_pylist()):
            prompt, x, y = row["prompt_ids"], row["response_ids"], torch.tensor(row["draft_ids"])
            with torch.no_grad():
                logits = {
                    name: model(torch.tensor([prompt + x])).logits[0, len(prompt) - 1 : -1, :vocab_size]
                    for name, model in models.items()
                }
            q, p = transform.probs(logits["draft"]), transform.probs(logits["target"])
            expected = {
                "acceptance_prob": acceptance_prob(y, q, p),
                "acceptance_rate": acceptance_rate(q, p),
                "log_q": q.gather(-1, y[:, None])[:, 0].log(),
                "log_p": p.gather(-1, y[:, None])[:, 0].log(),
                "entropy": entropy(logits["draft"]),
                "cross_entropy": cross_entropy(logits["draft"], logits["target"]),
            }
            for name, values in expected.items():
                rtol = 1e-4 if "entropy" in name else 1e-4 + 2**-11  # the others are float16 on disk
                torch.testing.assert_close(
                    torch.tensor(row[name]), values, rtol=rtol, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}"
                )
            assert torch.isfinite(torch.tensor(row["log_q"])).all()
            start, end = stored["row_offsets"][number : number + 2].tolist()
            z = [a if coin else b for a, b, coin in zip(x, row["draft_ids"], row["from_target"], strict=True)]
            with torch.no_grad():
                over_z = models["draft"].model(torch.tensor([prompt + z])).last_hidden_state[0, len(prompt) :]
                over_x = models["draft"].model(torch.tensor([prompt + x])).last_hidden_state[0, len(prompt) - 1 : -1]
            torch.testing.assert_close(fed[start:end].float(), over_z, rtol=0.02, atol=0.02)
            torch.testing.assert_close(drawn[start:end].float(), over_x, rtol=0.02, atol=0.02)
            assert stored["is_drafted"][start:end].tolist() == [not coin for coin in row["from_target"]]
            token_prob = logits["draft"].log_softmax(-1).gather(-1, y[:, None])[:, 0]
            torch.testing.assert_close(stored["log_token_prob"][start:end], token_prob, rtol=1e-4, atol=1e-4)
            assert stored["token"][start:end].tolist() == row["draft_ids"]


def test_rows_have_the_columns_of_the_design_and_load_with_datasets(toy_config, tmp_path):
    make(toy_config)
    datasets = pytest.importorskip("datasets")
    paths = [str(path) for path in list_shards(toy_config.data.dir, "train")]
    table = datasets.load_dataset("parquet", data_files=paths, split="train", cache_dir=str(tmp_path / "cache"))
    assert tuple(table.column_names) == COLUMNS
    assert len(table) == 8
    assert all(len(row["acceptance_prob"]) == len(row["response_ids"]) == len(row["from_target"]) for row in table)
    assert {row["finish_reason"] for row in table} <= {"stop", "length"}
    assert all((row["response_ids"][-1] == 1) == (row["finish_reason"] == "stop") for row in table)


def test_sequential_mode_gives_the_same_rows_without_the_columns_that_need_both_models(toy_config, with_data, tmp_path):
    make(toy_config)
    other = with_data(toy_config, mode="sequential", dir=str(tmp_path / "sequential"))
    make(other)
    assert not (tmp_path / "sequential" / "stages").exists()
    for path in list_shards(toy_config.data.dir, "train"):
        together, apart = (
            read_rows(path).to_pydict(),
            read_rows(tmp_path / "sequential" / "rows" / path.name).to_pydict(),
        )
        for name in ("acceptance_rate", "cross_entropy"):
            assert apart.pop(name) == [None] * len(apart["id"])
            together.pop(name)
        # the target's states come from decoding in one mode, from one pass in the other
        for name in ("acceptance_prob", "log_p"):
            ours, theirs = (
                torch.tensor([value for row in table.pop(name) for value in row]) for table in (apart, together)
            )
            torch.testing.assert_close(ours, theirs, rtol=1e-4 + 2**-10, atol=1e-4)
        assert apart == together
        stored = read_tensors(labels_path(other.data.dir, "train", int(path.stem.split("-")[1])))
        assert "acceptance_rate" not in stored


def test_each_mixing_is_a_row_of_the_fed_features(toy_config, with_data):
    config = with_data(toy_config, mixes=3, mixing_ratio=0.5)
    make(config)
    rows = read_rows(rows_path(config.data.dir, "train", 0)).to_pylist()
    stored = read_tensors(labels_path(config.data.dir, "train", 0))
    num_tokens = int(stored["row_offsets"][-1])
    assert len(stored["row_offsets"]) == 1 + len(rows)
    assert len(read_tensors(features_path(config.data.dir, "fed", "train", 0))["hidden"]) == 3 * num_tokens
    coins = [coin for row in rows for mix in row["from_target"] for coin in mix]
    assert stored["is_drafted"].tolist() == [not coin for coin in coins]
    assert len({tuple(mix) for mix in rows[0]["from_target"]}) > 1
    probs = [prob for row in rows for prob in row["acceptance_prob"]]
    assert stored["acceptance_prob"].tolist() == pytest.approx(probs, rel=2**-11)
    log_p = [value for row in rows for value in row["log_p"]]
    assert stored["target_prob"].log().tolist() == pytest.approx(log_p, rel=2**-10, abs=1e-4)


def test_the_coin_decides_the_mixing_also_where_both_tokens_are_equal(toy_config, with_data):
    """A draft that is the target, decoded greedily, proposes X itself everywhere; the coins must not notice."""
    pair = replace(toy_config.pair, draft=toy_config.pair.target, sampling=SamplingConfig(temperature=0.0))
    config = with_data(replace(toy_config, pair=pair), mixing_ratio=0.25)
    make(config)
    rows = [row for path in list_shards(config.data.dir, "train") for row in read_rows(path).to_pylist()]
    assert all(row["draft_ids"] == row["response_ids"] for row in rows)
    coins = [coin for row in rows for coin in row["from_target"]]
    assert 0.1 < sum(coins) / len(coins) < 0.4


def test_a_second_turn_is_asked_with_the_targets_own_reply(toy_config, with_data, tmp_path):
    path = tmp_path / "turns.jsonl"
    path.write_text('{"question_id": 81, "turns": ["first", "second"], "category": "writing"}\n')
    config = with_data(toy_config, prompts=str(path), num_train=1, num_test=0, split_weights=(1, 0, 0))
    make(config)
    first, second = read_rows(rows_path(config.data.dir, "train", 0)).to_pylist()
    assert (first["id"], second["id"]) == ("81", "81#2")
    assert second["prompt"].startswith(first["prompt"])
    assert second["prompt"].endswith("<end><u>second\n<a>")

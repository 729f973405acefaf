"""A whole run on the toy pair: what is on disk, and that it obeys law 4.6."""

import contextlib
import json
import os
import resource
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from configs.command import run
from configs.schema import Config, SamplingConfig
from data_gen import shards
from data_gen.features import read_features
from data_gen.rows import COLUMNS, read_rows
from data_gen.run import make
from data_gen.shards import features_path, list_shards, rows_path, verify
from lm import Sampling, acceptance_prob, acceptance_rate, cross_entropy, entropy


def files_of(directory: str | Path) -> dict[str, bytes]:
    """Every shard, sidecar and errors.jsonl."""
    paths = [path for path in Path(directory).rglob("*") if path.is_file() and path.name != "manifest.json"]
    return {str(path.relative_to(directory)): path.read_bytes() for path in paths}


@pytest.mark.parametrize("sampling", [SamplingConfig(), SamplingConfig(temperature=0.7, top_k=20), SamplingConfig(temperature=0.0)])
def test_labels_equal_an_independent_uncached_computation(toy_config, sampling):
    config = replace(toy_config, pair=replace(toy_config.pair, sampling=sampling))
    make(config)
    models = {name: AutoModelForCausalLM.from_pretrained(getattr(config.pair, name).path).eval() for name in ("target", "draft")}
    vocab_size = 260
    transform = Sampling(**vars(sampling))
    for path in list_shards(config.data.dir, "train"):
        index = int(path.stem.split("-")[1])
        fed, drawn = (read_features(features_path(config.data.dir, timing, "train", index)) for timing in ("fed", "drawn"))
        for number, row in enumerate(read_rows(path).to_pylist()):
            prompt, x, y = row["prompt_ids"], row["response_ids"], torch.tensor(row["draft_ids"])
            with torch.no_grad():
                logits = {
                    name: model(torch.tensor([prompt + x])).logits[0, len(prompt) - 1 : -1, :vocab_size] for name, model in models.items()
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
                torch.testing.assert_close(torch.tensor(row[name]), values, rtol=1e-4, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}")
            assert torch.isfinite(torch.tensor(row["log_q"])).all()
            start, end = fed["row_offsets"][number : number + 2].tolist()
            z = [a if coin else b for a, b, coin in zip(x, row["draft_ids"], row["from_target"], strict=True)]
            with torch.no_grad():
                over_z = models["draft"].model(torch.tensor([prompt + z])).last_hidden_state[0, len(prompt) :]
                over_x = models["draft"].model(torch.tensor([prompt + x])).last_hidden_state[0, len(prompt) - 1 : -1]
            torch.testing.assert_close(fed["hidden"][start:end].float(), over_z, rtol=0.02, atol=0.02)
            torch.testing.assert_close(drawn["hidden"][start:end].float(), over_x, rtol=0.02, atol=0.02)
            assert fed["is_drafted"][start:end].tolist() == [not coin for coin in row["from_target"]]
            assert drawn["is_drafted"].all()
            token_prob = logits["draft"].log_softmax(-1).gather(-1, y[:, None])[:, 0]
            torch.testing.assert_close(fed["log_token_prob"][start:end], token_prob, rtol=1e-4, atol=1e-4)
            assert fed["token"][start:end].tolist() == row["draft_ids"]


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
        together, apart = read_rows(path).to_pydict(), read_rows(tmp_path / "sequential" / "rows" / path.name).to_pydict()
        for name in ("acceptance_rate", "cross_entropy"):
            assert apart.pop(name) == [None] * len(apart["id"])
            together.pop(name)
        for name in ("acceptance_prob", "log_p"):  # the target's states come from decoding in one mode, from one pass in the other
            ours, theirs = (torch.tensor([value for row in table.pop(name) for value in row]) for table in (apart, together))
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        assert apart == together
        features = read_features(features_path(other.data.dir, "fed", "train", int(path.stem.split("-")[1])))
        assert "acceptance_rate" not in features


def test_each_mixing_is_a_row_of_the_fed_features(toy_config, with_data):
    config = with_data(toy_config, mixes=3, mixing_ratio=0.5)
    make(config)
    rows = read_rows(rows_path(config.data.dir, "train", 0)).to_pylist()
    fed = read_features(features_path(config.data.dir, "fed", "train", 0))
    assert len(fed["row_offsets"]) == 1 + 3 * len(rows)
    coins = [coin for row in rows for mix in row["from_target"] for coin in mix]
    assert fed["is_drafted"].tolist() == [not coin for coin in coins]
    assert len({tuple(mix) for mix in rows[0]["from_target"]}) > 1
    probs = [prob for row in rows for _ in range(3) for prob in row["acceptance_prob"]]
    assert fed["acceptance_prob"].tolist() == pytest.approx(probs)


def test_the_coin_decides_the_mixing_also_where_both_tokens_are_equal(toy_config, with_data):
    """A draft that is the target, decoded greedily, proposes X itself everywhere; the coins must not notice."""
    pair = replace(toy_config.pair, draft=toy_config.pair.target, sampling=SamplingConfig(temperature=0.0))
    config = with_data(replace(toy_config, pair=pair), mixing_ratio=0.5)
    make(config)
    rows = [row for path in list_shards(config.data.dir, "train") for row in read_rows(path).to_pylist()]
    assert all(row["draft_ids"] == row["response_ids"] for row in rows)
    coins = [coin for row in rows for coin in row["from_target"]]
    assert 0.25 < sum(coins) / len(coins) < 0.75


def test_a_finished_run_writes_nothing_again(toy_config, capsys):
    make(toy_config)
    before = {path: path.stat().st_mtime_ns for path in Path(toy_config.data.dir).rglob("*-0*")}
    make(toy_config)
    assert before == {path: path.stat().st_mtime_ns for path in before}
    assert "(0 made now)" in capsys.readouterr().out


def test_a_lost_or_truncated_shard_is_made_again_byte_for_byte(toy_config):
    make(toy_config)
    whole = files_of(toy_config.data.dir)
    rows_path(toy_config.data.dir, "train", 1).unlink()
    fed = features_path(toy_config.data.dir, "fed", "train", 2)
    fed.write_bytes(fed.read_bytes()[:-5])
    with pytest.raises(ValueError, match="truncated"):
        verify(fed)
    make(toy_config)
    assert files_of(toy_config.data.dir) == whole


def in_a_child(work) -> int:
    """The wait status of a forked child that does `work` (forked, because importing torch anew takes seconds)."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        except SystemExit as end:
            status = int(end.code)  # type: ignore[arg-type]
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1]


def make_and_die(config: Config, write: int) -> None:
    """`make`, with a SIGKILL in the middle of its `write`-th file."""
    whole, count = shards.write_atomic, [0]

    def dying(path: Path, content: bytes) -> None:
        count[0] += 1
        if count[0] == write:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_name(f".{path.name}.{os.getpid()}.partial").write_bytes(content[:7])
            os.kill(os.getpid(), signal.SIGKILL)
        whole(path, content)

    shards.write_atomic = dying
    make(config)


@pytest.mark.parametrize("mode", ["together", "sequential"])
def test_a_run_killed_at_any_write_resumes_to_the_same_bytes(toy_config, with_data, tmp_path, mode):
    """SIGKILL in the middle of the 2nd, 5th, … write: the next run ends with exactly the files of an uninterrupted one."""
    make(with_data(toy_config, mode=mode))
    whole = files_of(toy_config.data.dir)
    directory = tmp_path / "killed"
    config = with_data(toy_config, mode=mode, dir=str(directory))
    for write in (2, 5, 6, 3, 7):
        assert os.WTERMSIG(in_a_child(lambda write=write: make_and_die(config, write))) == signal.SIGKILL
    make(config)
    assert files_of(directory) == whole


def test_another_manifest_is_refused_and_the_key_named(toy_config, with_data):
    make(toy_config)
    for changes, key in (
        ({"seed": 1}, "seed: 0 there, 1 in"),
        ({"mixing_ratio": 0.2}, "mixing_ratio"),
        ({"num_test": 3}, "split.test.prompts"),
    ):
        with pytest.raises(ValueError, match=key):
            make(with_data(toy_config, **changes))
    with pytest.raises(ValueError, match=r"sampling.temperature: 1.0 there, 0.5 in"):
        make(replace(toy_config, pair=replace(toy_config.pair, sampling=SamplingConfig(temperature=0.5))))


def test_moved_models_are_the_same_models_and_trained_ones_are_not(toy_config, tmp_path):
    make(toy_config)
    moved = tmp_path / "elsewhere" / "draft"
    shutil.copytree(toy_config.pair.draft.path, moved)
    config = replace(toy_config, pair=replace(toy_config.pair, draft=replace(toy_config.pair.draft, path=str(moved))))
    make(config)
    weights = bytearray((moved / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (moved / "model.safetensors").write_bytes(weights)
    with pytest.raises(ValueError, match=r"draft\.fingerprint"):
        make(config)


def test_every_prompt_is_accounted_for(toy_config, with_data, tmp_path):
    path = tmp_path / "some.jsonl"
    records = [
        {"id": 1, "prompt": "fine"},
        {"id": 2, "prompt": "  "},
        {"id": 3, "prompt": "x" * 500},
        {"id": 4, "turns": ["one", "", "three"]},
    ]
    path.write_text("\n".join(map(json.dumps, records)))
    config = with_data(toy_config, prompts=str(path), num_train=4, num_test=0, split_weights=(1, 0, 0), rows_per_shard=2)
    make(config)
    problems = {record["id"]: record for record in map(json.loads, (Path(config.data.dir) / "errors.jsonl").read_text().splitlines())}
    assert {name: problem["outcome"] for name, problem in problems.items()} == {
        "2": "skipped",
        "3": "skipped",
        "4#2": "skipped",
        "4#3": "skipped",
    }
    assert problems["2"]["reason"] == "empty prompt"
    assert "503 tokens; data.max_prompt_tokens is 60" in problems["3"]["reason"]
    ids = [row for shard in list_shards(config.data.dir, "train") for row in read_rows(shard, ["id"])["id"].to_pylist()]
    assert sorted(ids) == ["1", "4"]


def test_a_shard_whose_prompts_are_all_skipped_is_an_empty_shard(toy_config, with_data, tmp_path):
    path = tmp_path / "empty.jsonl"
    path.write_text('{"id": 1, "prompt": ""}\n')
    for mode in ("together", "sequential"):
        config = with_data(
            toy_config, prompts=str(path), num_train=1, num_test=0, split_weights=(1, 0, 0), mode=mode, dir=str(tmp_path / mode)
        )
        make(config)
        assert read_rows(rows_path(config.data.dir, "train", 0)).num_rows == 0
        assert read_features(features_path(config.data.dir, "fed", "train", 0))["hidden"].shape == (0, 8)


def test_a_second_turn_is_asked_with_the_targets_own_reply(toy_config, with_data, tmp_path):
    path = tmp_path / "turns.jsonl"
    path.write_text('{"question_id": 81, "turns": ["first", "second"], "category": "writing"}\n')
    config = with_data(toy_config, prompts=str(path), num_train=1, num_test=0, split_weights=(1, 0, 0))
    make(config)
    first, second = read_rows(rows_path(config.data.dir, "train", 0)).to_pylist()
    assert (first["id"], second["id"]) == ("81", "81#2")
    assert second["prompt"].startswith(first["prompt"])
    assert second["prompt"].endswith("<end><u>second\n<a>")


def test_a_model_that_yields_nan_is_refused(toy_config, tmp_path):
    from safetensors.torch import load_file, save_file

    broken = tmp_path / "broken"
    shutil.copytree(toy_config.pair.draft.path, broken)
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    config = replace(toy_config, pair=replace(toy_config.pair, draft=replace(toy_config.pair.draft, path=str(broken))))
    with pytest.raises(ValueError, match=r"draft over the batch of .* yields NaN"):
        make(config)
    assert not list(Path(config.data.dir).rglob("*.parquet"))


def test_lengths_beyond_what_a_model_reads_are_refused(toy_config, with_data):
    with pytest.raises(ValueError, match=r"is 300 and .* reads at most 256 positions"):
        make(with_data(toy_config, max_new_tokens=240))


def test_a_full_disk_ends_in_one_line_and_leaves_nothing_half_written(toy_config, tmp_path):
    """A limit on file size stands for the full disk: a write fails after 3,000 bytes."""

    errors = tmp_path / "errors"

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
        with errors.open("w") as file, contextlib.redirect_stderr(file):
            run({"make": lambda config: make(toy_config)}, default="make", argv=["--pair.target.path=a", "--pair.draft.path=b"])

    assert os.waitstatus_to_exitcode(in_a_child(work)) == 2
    assert "error: no space for" in errors.read_text()
    assert "Traceback" not in errors.read_text()
    left = [path for path in Path(toy_config.data.dir).rglob("*") if path.is_file()]
    assert not [path for path in left if path.suffix == ".partial" or path.suffix == ".parquet"]
    for path in left:
        if path.suffix == ".safetensors":
            verify(path)

"""Bad prompts, models, lengths and disks end in an account of every prompt, or in one line that names the cause."""

import contextlib
import json
import os
import resource
from pathlib import Path

import pytest

from configs.command import run
from data_gen.pipeline.command import make
from data_gen.store.labels import read_tensors
from data_gen.store.rows import read_rows
from store.shards import features_path, list_shards, rows_path, verify_shard
from tests.data_gen.on_disk import in_a_child, with_a_draft_of_nan


def test_every_prompt_is_accounted_for(toy_config, with_data, tmp_path):
    path = tmp_path / "some.jsonl"
    records = [
        {"id": 1, "prompt": "fine"},
        {"id": 2, "prompt": "  "},
        {"id": 3, "prompt": "x" * 500},
        {"id": 4, "turns": ["one", "", "three"]},
    ]
    path.write_text("\n".join(map(json.dumps, records)))
    config = with_data(
        toy_config, prompts=str(path), num_train=4, num_test=0, split_weights=(1, 0, 0), rows_per_shard=2
    )
    make(config)
    problems = {
        record["id"]: record
        for record in map(json.loads, (Path(config.data.dir) / "errors.jsonl").read_text().splitlines())
    }
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
            toy_config,
            prompts=str(path),
            num_train=1,
            num_test=0,
            split_weights=(1, 0, 0),
            mode=mode,
            dir=str(tmp_path / mode),
        )
        with pytest.raises(ValueError, match=r"none of 1 prompts became a row.*empty prompt"):
            make(config)
        assert read_rows(rows_path(config.data.dir, "train", 0)).num_rows == 0
        assert read_tensors(features_path(config.data.dir, "fed", "train", 0))["hidden"].shape == (0, 8)


def test_a_model_that_yields_nan_is_refused(toy_config, tmp_path):
    config = with_a_draft_of_nan(toy_config, tmp_path / "broken")
    with pytest.raises(ValueError, match=r"the draft yields NaN or infinite logits for each of 8 tested ids"):
        make(config)
    assert not list(Path(config.data.dir).rglob("*.parquet"))


def test_lengths_beyond_what_a_model_reads_are_refused_and_the_remedy_works_in_the_same_folder(
    toy_config, with_data, monkeypatch
):
    with monkeypatch.context() as patched:
        patched.setattr("data_gen.pipeline.worker.load_model", lambda *_, **__: pytest.fail("weights are loaded"))
        with pytest.raises(ValueError, match=r"is 300 and .* reads at most 256 positions"):
            make(with_data(toy_config, max_new_tokens=240))
    make(with_data(toy_config, max_new_tokens=4))
    assert list_shards(toy_config.data.dir, "train")


def test_a_full_disk_ends_in_one_line_and_leaves_no_incomplete_file(toy_config, tmp_path):
    """A limit on file size acts as the full disk: a write fails after 2,000 bytes."""
    errors = tmp_path / "errors"

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
        with errors.open("w") as file, contextlib.redirect_stderr(file):
            run(
                {"make": lambda config: make(toy_config)},
                default="make",
                argv=["--pair.target.path=a", "--pair.draft.path=b"],
            )

    assert os.waitstatus_to_exitcode(in_a_child(work)) == 2
    assert "error: no space for" in errors.read_text()
    assert "Traceback" not in errors.read_text()
    paths = [path for path in Path(toy_config.data.dir).rglob("*") if path.is_file()]
    assert not [path for path in paths if path.suffix == ".partial" or path.suffix == ".parquet"]
    for path in paths:
        if path.suffix == ".safetensors":
            verify_shard(path)


def test_a_run_without_a_row_fails_and_says_why(toy_config, with_data):
    with pytest.raises(
        ValueError, match=r"^none of 12 prompts became a row: .* 12 were skipped; .*max_prompt_tokens is 1"
    ):
        make(with_data(toy_config, max_prompt_tokens=1))


def test_a_missing_file_of_split_ids_is_refused_with_stories_too(toy_config, with_data):
    with pytest.raises(FileNotFoundError, match=r"^data\.split_ids is absent\.json"):
        make(with_data(toy_config, prompts="stories", split_ids="absent.json"))

"""A row along which a model yields NaN is a problem of that row alone, in every stage; all other rows are as without
the defect.
"""

import json
import shutil
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from configs.schema import Config
from data_gen.pipeline.command import make
from data_gen.prompts.sets import load_prompts
from data_gen.responses.exchange import Problem, Request, Response
from data_gen.responses.in_process import TargetInProcess
from data_gen.store.labels import read_tensors
from data_gen.store.rows import read_rows
from lm import Sampling
from store.shards import features_path, labels_path, list_shards
from tests.data_gen.on_disk import files_of, rows_of

TILDE = 4 + sorted(map(chr, range(33, 127))).index("~")
"""The token of a character that one prompt has."""


@pytest.fixture
def healthy(toy_config, with_data, prompts_file) -> Config:
    """The toy run, with a tilde in one training prompt of the second shard; three rows may fail."""
    config = with_data(toy_config, max_error_share=0.25, seed=1)
    records = [json.loads(line) for line in prompts_file.read_text().splitlines()]
    for number, record in enumerate(records):  # what a prompt says decides where it goes
        changed = [*records[:number], record | {"input": "~"}, *records[number + 1 :]]
        prompts_file.write_text("".join(json.dumps(each) + "\n" for each in changed))
        if record["id"] in [prompt.id for prompt in load_prompts(config.data, "train")[3:6]]:
            return config
    raise AssertionError("a tilde brings no prompt into the second shard; take another seed")


def poisoned(config: Config, model: str, folder: Path, token: int = TILDE) -> Config:
    """The run into another folder, with a model whose embedding of one token is NaN."""
    broken = folder / f"broken {model}"
    shutil.copytree(getattr(config.pair, model).path, broken)
    weights = load_file(broken / "model.safetensors")
    weights["model.embed_tokens.weight"][token] = float("nan")
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    pair = replace(config.pair, **{model: replace(getattr(config.pair, model), path=str(broken))})
    return replace(config, pair=pair, data=replace(config.data, dir=str(folder / f"data of broken {model}")))


def problems_of(config: Config) -> dict[str, str]:
    """Id -> reason of every error."""
    problems = map(json.loads, (Path(config.data.dir) / "errors.jsonl").read_text().splitlines())
    return {problem["id"]: problem["reason"] for problem in problems if problem["outcome"] == "error"}


def features_of(config: Config, timing: str) -> dict[str, list[torch.Tensor]]:
    """Id of each training row -> everything that a shard of features holds of it."""
    found = {}
    for path in list_shards(config.data.dir, "train"):
        index = int(path.stem.split("-")[1])
        features = read_tensors(labels_path(config.data.dir, "train", index))
        features |= read_tensors(features_path(config.data.dir, timing, "train", index))
        offsets = features.pop("row_offsets").tolist()
        for row, name in enumerate(read_rows(path, ["id"])["id"].to_pylist()):
            found[name] = [features[key][offsets[row] : offsets[row + 1]] for key in sorted(features)]
    return found


def assert_others_are_the_same(broken: Config, whole: Config, failed: set[str]) -> None:
    """Rows and features, bit for bit where every stage sees the batches of the healthy run.

    In sequential mode a later stage no longer has the row that failed, so its batches are others and round otherwise.
    """
    assert rows_of(broken) == [row for row in rows_of(whole) if row["id"] not in failed]
    atol = 1e-6 if whole.data.mode == "sequential" else 0
    for timing in ("fed", "drawn"):
        found, expected = features_of(broken, timing), features_of(whole, timing)
        assert found.keys() == expected.keys() - failed
        for name, features in found.items():
            torch.testing.assert_close(features, expected[name], rtol=0, atol=atol)


@pytest.mark.parametrize("mode", ["together", pytest.param("sequential", marks=pytest.mark.slow)])
def test_a_prompt_that_the_draft_cannot_read_is_a_problem_of_its_row_alone(healthy, with_data, tmp_path, capsys, mode):
    healthy = with_data(healthy, mode=mode)
    broken = poisoned(healthy, "draft", tmp_path)
    make(healthy)
    make(broken)
    (name,) = {row["id"] for row in rows_of(healthy) if "~" in row["prompt"]}
    assert problems_of(broken) == {name: problems_of(broken)[name]}
    assert "the draft has NaN or infinite logits at token 0 of the response" in problems_of(broken)[name]
    assert_others_are_the_same(broken, healthy, {name})
    assert "of 12 prompts, 1 failed and 0 were skipped" in capsys.readouterr().out
    written = files_of(broken.data.dir)
    make(broken)
    assert "(0 made in this run)" in capsys.readouterr().out, "what failed is not asked for again"
    assert files_of(broken.data.dir) == written
    make(broken, retry_errors=True)
    assert "(1 made in this run)" in capsys.readouterr().out


@pytest.mark.parametrize("mode", ["together", pytest.param("sequential", marks=pytest.mark.slow)])
def test_a_prompt_that_the_target_cannot_read_is_a_problem_of_its_row_alone(healthy, with_data, tmp_path, mode):
    healthy = with_data(healthy, mode=mode)
    broken = poisoned(healthy, "target", tmp_path)
    make(healthy)
    make(broken)
    (name,) = {row["id"] for row in rows_of(healthy) if "~" in row["prompt"]}
    assert set(problems_of(broken)) == {name}
    assert "the target has NaN or infinite logits after 0 tokens of its response" in problems_of(broken)[name]
    responses = {row["id"]: row["response_ids"] for row in rows_of(healthy) if row["id"] != name}
    assert {row["id"]: row["response_ids"] for row in rows_of(broken)} == responses


def test_the_target_labels_all_but_the_rows_that_it_cannot_read(healthy, with_data, tmp_path):
    """The responses come from a file, so the target only labels; in the stage of its own where one model is loaded at a
    time.
    """
    make(healthy)
    whole = rows_of(healthy)
    responses = tmp_path / "responses.jsonl"
    responses.write_text(
        "".join(json.dumps({"id": row["id"], "response_ids": row["response_ids"]}) + "\n" for row in whole)
    )
    for mode in ("together", "sequential"):
        healthy = with_data(
            healthy, num_test=0, source="file", responses=str(responses), mode=mode, dir=str(tmp_path / mode)
        )
        (tmp_path / f"of {mode}").mkdir()
        broken = poisoned(healthy, "target", tmp_path / f"of {mode}")
        make(healthy)
        make(broken)
        (name,) = {row["id"] for row in whole if "~" in row["prompt"]}
        assert set(problems_of(broken)) == {name}
        assert_others_are_the_same(broken, healthy, {name})


def test_a_token_that_only_the_mixed_sequence_has_is_a_problem_of_its_row(healthy, tmp_path):
    """The labels of that row are numbers, and its fed-time states are not."""
    make(healthy)
    rows = rows_of(healthy)
    read = {token for row in rows for token in (*row["prompt_ids"], *row["response_ids"])}
    mixed = [{y for y, coin in zip(row["draft_ids"], row["from_target"], strict=True) if not coin} for row in rows]
    token = next(
        token
        for tokens in mixed
        for token in sorted(tokens)
        if token not in read and sum(token in each for each in mixed) == 1
    )
    broken = poisoned(healthy, "draft", tmp_path, token)
    make(broken)
    (name,) = (row["id"] for row, tokens in zip(rows, mixed, strict=True) if token in tokens)
    problems = problems_of(broken)
    assert "fed hidden states are not finite in data.feature_dtype bfloat16" in problems.pop(name)
    assert not problems.keys() & {row["id"] for row in rows}
    assert_others_are_the_same(broken, healthy, {name})


def test_every_mixing_of_a_broken_row_is_left_out(healthy, with_data, tmp_path):
    healthy = with_data(healthy, mixes=2, num_test=0)
    broken = poisoned(healthy, "draft", tmp_path)
    make(healthy)
    make(broken)
    (name,) = problems_of(broken)
    assert rows_of(broken) == [row for row in rows_of(healthy) if row["id"] != name]
    stored = read_tensors(labels_path(broken.data.dir, "train", 1))
    hidden = read_tensors(features_path(broken.data.dir, "fed", "train", 1))["hidden"]
    assert len(hidden) == len(stored["is_drafted"]) == 2 * stored["row_offsets"][-1]


def test_broken_padding_breaks_no_row(healthy, with_data, tmp_path):
    """Untrained embeddings of the padding token may be NaN; prompts of differing length share batches, and 0 * NaN is
    NaN. With this seed no row has the padding token as a token of its own.
    """
    healthy = with_data(healthy, seed=4)
    make(healthy)
    for model in ("draft", "target"):
        broken = poisoned(healthy, model, tmp_path, 0)
        make(broken)
        assert problems_of(broken) == {}
        assert rows_of(broken) == rows_of(healthy)


def test_what_takes_the_place_of_a_broken_sequence_in_a_batch_is_not_broken_by_it(models):
    """The longest prompt and one in the middle are broken; shorter ones take their places, and what is left of them
    stands in the cache.
    """
    requests = [Request(str(number), "", [2, *range(10, 40 - 2 * number), 3]) for number in range(12)]
    for number in (0, 5):
        requests[number].prompt_ids[1] = 9
    broken = deepcopy(models["target"])
    broken.get_input_embeddings().weight.data[9] = float("nan")
    settings = {"vocab_size": 260, "eos_ids": frozenset({1}), "max_new_tokens": 12, "batch_size": 3}
    expected, answers = (
        TargetInProcess(model, Sampling(), **settings).respond(requests, 12, lambda count: None)
        for model in (models["target"], broken)
    )
    assert [isinstance(answer, Problem) for answer in answers] == [number in (0, 5) for number in range(12)]
    assert [answer for answer in answers if isinstance(answer, Response)] == [
        expected[n] for n in range(12) if n not in (0, 5)
    ]


def test_a_share_of_errors_beyond_the_limit_ends_the_run_in_one_line(healthy, with_data, tmp_path):
    broken = with_data(poisoned(healthy, "draft", tmp_path), max_error_share=0.0)
    with pytest.raises(
        ValueError,
        match=r"^1 of 12 prompts ended in an error, above data\.max_error_share 0; .* --retry_errors",
    ):
        make(broken)
    assert len(rows_of(broken)) == 7


def test_a_model_that_fails_on_every_row_ends_the_run_early(healthy, tmp_path):
    """Every prompt begins with token 2."""
    broken = poisoned(healthy, "draft", tmp_path, 2)
    with pytest.raises(
        ValueError,
        match=r"^8 of the last 8 rows of the stage together ended in an error; the latest, p\d+: the draft has",
    ):
        make(broken)
    assert len(list(Path(broken.data.dir).glob("rows/*.parquet"))) == 3

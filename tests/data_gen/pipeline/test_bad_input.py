"""Bad prompts, models, lengths and disks end in an account of every prompt, or in one line that names the cause. A row
along which a model yields NaN is a problem of that row alone, in every stage; all others are as without the defect.
"""

import json
import shutil
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from configs.schema import Config
from data_gen.pipeline.command import make
from data_gen.prompts.sets import load_prompts
from data_gen.responses.exchange import Problem, Request
from data_gen.responses.target import TargetInProcess
from data_gen.store import rows
from data_gen.store.rows import read_rows
from lm import Sampling
from store.shards import list_shards, shard_path
from tests.data_gen.on_disk import (
    broken_copy,
    errors_of,
    files_of,
    hidden_states_of,
    rows_of,
    with_a_draft_of_nan,
    with_data,
    with_prompts,
    write_lines,
)


def test_every_prompt_is_accounted_for(toy_config, tmp_path):
    half = "the prompt has a lone surrogate (half of a character)"
    long = "the prompt has 503 tokens; data.max_prompt_tokens is 60"
    earlier = "an earlier turn of this conversation, 4#2, has no response"
    expected = {
        "whole": "the response has a lone surrogate (half of a character)",
        "2": "empty prompt",
        "3": long,
        "4#2": "empty prompt",
        "4#3": earlier,
        "half": half,
        "inner": half,
    }
    records = [{"id": 1, "prompt": "fine"}, {"id": 2, "prompt": "  "}, {"id": 3, "prompt": "x" * 500}]
    records += [{"id": 4, "turns": ["one", "", "three"]}, {"id": "whole", "prompt": "x"}]
    records += [{"id": "half", "prompt": "\ud83d"}, {"id": "inner", "prompt": "y", "input": "\udc00"}]
    responses = [{"id": name, "response": text} for name, text in {"1": "z", "4": "z", "whole": "\ud83d"}.items()]
    path = write_lines(tmp_path / "responses.jsonl", responses)
    changes = {"num_train": 7, "rows_per_shard": 2, "source": "file", "responses": path, "max_error_share": 1.0}
    config = with_prompts(toy_config, tmp_path / "some.jsonl", records, **changes)
    make(config)
    problems = errors_of(config)
    assert {problem["id"]: problem["reason"] for problem in problems} == expected
    assert {problem["id"] for problem in problems if problem["outcome"] == "error"} == {"whole"}
    assert sorted(row["id"] for row in rows_of(config)) == ["1", "4"]


def test_a_shard_whose_prompts_are_all_skipped_is_an_empty_shard(toy_config, tmp_path):
    config = with_prompts(toy_config, tmp_path / "empty.jsonl", [{"id": 1, "prompt": ""}], num_train=1)
    for mode in ("together", "sequential"):
        config = with_data(config, mode=mode, dir=str(tmp_path / mode))
        with pytest.raises(ValueError, match=r"none of 1 prompts became a row.*empty prompt"):
            make(config)
        assert read_rows(shard_path(config.data.dir, "rows", "train", 0)).num_rows == 0
        assert load_file(shard_path(config.data.dir, "labels", "train", 0))["token"].shape == (0,)
        assert hidden_states_of(config, "train", "fed")[0].shape == (0, 8)


TEMPLATE = "{% if '!' in messages[0]['content'] %}{{ raise_exception('no shouting') }}{% endif %}"


@pytest.mark.parametrize(("refuses", "num_rows"), [("'!'", 2), ("''", 0)])
def test_a_prompt_that_the_chat_template_refuses_is_an_error_of_its_row(refuses, num_rows, toy_config, tmp_path):
    template = TEMPLATE.replace("'!'", refuses) + "{{ messages[0]['content'] }}"
    pair = toy_config.pair
    for role in ("target", "draft"):
        folder = Path(shutil.copytree(getattr(pair, role).path, tmp_path / role))
        (folder / "chat_template.jinja").write_text(template)
        pair = replace(pair, **{role: replace(getattr(pair, role), path=str(folder))})
    records = [{"id": name, "prompt": text} for name, text in {"a": "!", "b": "fine", "c": "so", "d": "y!"}.items()]
    changes = {"num_train": 4, "num_dev": 0, "num_test": 0, "template": "chat", "max_error_share": 1.0}
    config = with_prompts(replace(toy_config, pair=pair), tmp_path / "some.jsonl", records, **changes)
    if not num_rows:
        with pytest.raises(
            ValueError, match=r"prompt \w: the chat template of .* refuses .*: no shouting; remove such"
        ):
            make(config)
        return
    make(config)
    assert sorted(row["id"] for row in rows_of(config)) == ["b", "c"]
    problems = {problem["id"]: (problem["outcome"], problem["reason"]) for problem in errors_of(config)}
    assert sorted(problems) == ["a", "d"]
    assert all(outcome == "error" and "no shouting" in reason for outcome, reason in problems.values())


def test_a_model_that_yields_nan_is_refused(toy_config, tmp_path):
    config = with_a_draft_of_nan(toy_config, tmp_path / "broken")
    with pytest.raises(ValueError, match=r"the draft yields NaN or infinite logits for each of 8 tested ids"):
        make(config)
    assert not list(Path(config.data.dir).rglob("*.parquet"))


def test_lengths_beyond_what_a_model_reads_are_refused_and_the_remedy_works_in_the_same_folder(toy_config, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr("data_gen.pipeline.worker.load_model", lambda *_, **__: pytest.fail("weights are loaded"))
        with pytest.raises(ValueError, match=r"is 300 and .* reads at most 256 positions"):
            make(with_data(toy_config, max_new_tokens=240))
    make(with_data(toy_config, max_new_tokens=4))
    assert list_shards(toy_config.data.dir, "train")


def test_a_run_without_a_row_fails_and_says_why_and_a_missing_file_of_split_ids_is_refused(toy_config):
    complaint = r"^none of 12 prompts became a row: .* 12 were skipped; .*max_prompt_tokens is 1"
    with pytest.raises(ValueError, match=complaint):
        make(with_data(toy_config, max_prompt_tokens=1))
    with pytest.raises(FileNotFoundError, match=r"^data\.split_ids is absent\.json"):
        make(with_data(toy_config, prompts="stories", split_ids="absent.json"))


TILDE = 4 + sorted(map(chr, range(33, 127))).index("~")
"""The token of a character that one prompt has."""
every_mode = pytest.mark.parametrize("mode", ["together", pytest.param("sequential", marks=pytest.mark.slow)])


@pytest.fixture
def healthy(toy_config, tmp_path) -> Config:
    """The toy run, with a tilde in one training prompt of the second shard; three rows may fail."""
    path = Path(shutil.copy(toy_config.data.prompts, tmp_path))
    config = with_data(toy_config, max_error_share=0.25, seed=1, prompts=str(path))
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for number, record in enumerate(records):  # what a prompt says decides where it goes
        changed = [*records[:number], record | {"input": "~"}, *records[number + 1 :]]
        path.write_text("".join(json.dumps(each) + "\n" for each in changed))
        if record["id"] in [prompt.id for prompt in load_prompts(config.data, "train")[3:6]]:
            return config
    raise AssertionError("a tilde brings no prompt into the second shard; take another seed")


def poisoned(config: Config, model: str, token: int = TILDE) -> Config:
    """The run into another folder, with a model whose embedding of one token is NaN."""
    folder = f"{config.data.dir} of broken {model}"
    config = broken_copy(config, model, Path(f"{folder}, its model"), "model.embed_tokens.weight", token)
    return with_data(config, dir=folder)


def both_made(healthy: Config, model: str, token: int = TILDE) -> tuple[Config, dict[str, str]]:
    """The poisoned run, made beside the healthy one, and id -> reason of its errors."""
    broken = poisoned(healthy, model, token)
    make(healthy)
    make(broken)
    return broken, {error["id"]: error["reason"] for error in errors_of(broken) if error["outcome"] == "error"}


def name_of_tilde(healthy: Config) -> str:
    (name,) = {row["id"] for row in rows_of(healthy) if "~" in row["prompt"]}
    return name


def labels_of(config: Config) -> dict[str, list[torch.Tensor]]:
    """Id of each training row -> everything that a shard of labels holds of it."""
    found = {}
    for path in list_shards(config.data.dir, "train"):
        index = int(path.stem.split("-")[1])
        labels = load_file(shard_path(config.data.dir, "labels", "train", index))
        offsets = labels.pop("row_offsets").tolist()
        for row, name in enumerate(read_rows(path, ["id"])["id"].to_pylist()):
            found[name] = [labels[key][offsets[row] : offsets[row + 1]] for key in sorted(labels)]
    return found


def assert_others_are_the_same(broken: Config, whole: Config, failed: set[str]) -> None:
    """Rows and labels, bit for bit but where a later stage lacks the row that failed, so that its batches differ."""
    assert rows_of(broken) == [row for row in rows_of(whole) if row["id"] not in failed]
    atol = 1e-6 if whole.data.mode == "sequential" else 0
    found, expected = labels_of(broken), labels_of(whole)
    assert found.keys() == expected.keys() - failed
    for name, labels in found.items():
        torch.testing.assert_close(labels, expected[name], rtol=0, atol=atol)


@every_mode
@pytest.mark.parametrize(
    ("model", "reason"),
    [("draft", "logits at token 0 of the response"), ("target", "logits after 0 tokens of its response")],
)
def test_a_prompt_that_a_model_cannot_read_is_a_problem_of_its_row_alone(healthy, capsys, mode, model, reason):
    healthy = with_data(healthy, mode=mode)
    broken, problems = both_made(healthy, model)
    name = name_of_tilde(healthy)
    assert problems.keys() == {name}
    assert f"the {model} has NaN or infinite {reason}" in problems[name]
    assert "of 12 prompts, 1 failed and 0 were skipped" in capsys.readouterr().out
    if model == "target":  # where a row of the batch is missing, numbers differ by rounding
        found, expected = ({row["id"]: row["response_ids"] for row in rows_of(config)} for config in (broken, healthy))
        assert name not in found
        assert found | {name: expected[name]} == expected
        return
    assert_others_are_the_same(broken, healthy, {name})
    written = files_of(broken.data.dir)
    make(broken)
    assert "(0 made in this run)" in capsys.readouterr().out, "what failed is not asked for again"
    assert files_of(broken.data.dir) == written
    make(broken, retry_errors=True)
    assert "(1 made in this run)" in capsys.readouterr().out


def test_the_target_labels_all_but_the_rows_that_it_cannot_read(healthy, tmp_path, monkeypatch):
    """The responses come from a file, so the target only labels; in its own stage where one model is loaded at once. A
    run that ends after it has written the labels without the broken row resumes to the same bytes.
    """
    make(healthy)
    path, name = tmp_path / "responses.jsonl", name_of_tilde(healthy)
    records = [{key: row[key] for key in ("id", "response_ids")} for row in rows_of(healthy)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    for mode in ("together", "sequential"):
        again = with_data(healthy, num_test=0, source="file", responses=str(path), mode=mode, dir=str(tmp_path / mode))
        broken, problems = both_made(again, "target")
        assert problems.keys() == {name}
        assert_others_are_the_same(broken, again, {name})
    stopped, calls = with_data(broken, dir=f"{broken.data.dir} stopped"), iter([rows.to_parquet])

    def stop(*arguments, **named):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(rows, "to_parquet", lambda *arguments, **named: next(calls, stop)(*arguments, **named))
        with pytest.raises(KeyboardInterrupt):
            make(stopped)
    make(stopped)
    assert files_of(stopped.data.dir) == files_of(broken.data.dir)


def test_a_token_that_only_the_mixed_sequence_has_is_named_when_its_states_are_computed(healthy):
    """The labels of that row are numbers, its drawn-time states too, and its fed-time states are not."""
    make(healthy)
    rows = rows_of(healthy)
    read = {token for row in rows for token in (*row["prompt_ids"], *row["response_ids"])}
    mixed = [{y for y, coin in zip(row["draft_ids"], row["from_target"], strict=True) if not coin} for row in rows]
    tokens = (token for tokens in mixed for token in sorted(tokens - read))
    token = next(token for token in tokens if sum(token in each for each in mixed) == 1)
    (name,) = (row["id"] for row, tokens in zip(rows, mixed, strict=True) if token in tokens)
    broken, problems = both_made(healthy, "draft", token)
    assert name not in problems
    assert all(states.isfinite().all() for states in hidden_states_of(broken, "train", "drawn"))
    with pytest.raises(ValueError, match=r"fed hidden states of token \d+ of .*labels/train-.* are not finite"):
        hidden_states_of(broken, "train", "fed")


def test_labels_of_a_broken_row_are_left_out(healthy):
    healthy = with_data(healthy, num_test=0)
    broken, (name,) = both_made(healthy, "draft")
    assert rows_of(broken) == [row for row in rows_of(healthy) if row["id"] != name]
    stored = load_file(shard_path(broken.data.dir, "labels", "train", 1))
    assert len(hidden_states_of(broken, "train", "fed")[1]) == len(stored["is_drafted"]) == stored["row_offsets"][-1]


@pytest.mark.parametrize("model", ["draft", "target"])
def test_broken_padding_breaks_no_row(healthy, model):
    """Untrained embeddings of padding may be NaN, and 0 * NaN is NaN. With this seed no row has a padding token."""
    healthy = with_data(healthy, seed=4)
    broken, problems = both_made(healthy, model, 0)
    assert problems == {}
    assert rows_of(broken) == rows_of(healthy)


def test_what_takes_the_place_of_a_broken_sequence_in_a_batch_is_not_broken_by_it(models):
    """The longest prompt and one in the middle are broken; shorter ones take their places, whose cache they left."""
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
    for number, (answer, whole) in enumerate(zip(answers, expected, strict=True)):
        assert isinstance(answer, Problem) if number in (0, 5) else answer == whole


def test_errors_of_more_than_the_allowed_share_or_of_every_row_end_the_run_in_one_line(healthy):
    few = with_data(poisoned(healthy, "draft"), max_error_share=0.0)
    above = r"^1 of 12 prompts ended in an error, above data\.max_error_share 0; .* --retry_errors"
    with pytest.raises(ValueError, match=above):
        make(few)
    assert len(rows_of(few)) == 7
    every = poisoned(with_data(healthy, dir=healthy.data.dir + "-2"), "draft", 2)  # every prompt begins with token 2
    early = r"^8 of the last 8 rows of the stage together ended in an error; the latest, p\d+: the draft has"
    with pytest.raises(ValueError, match=early):
        make(every)
    assert len(list(Path(every.data.dir).glob("rows/*.parquet"))) == 3

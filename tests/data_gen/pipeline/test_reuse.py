"""Responses that one run paid for are labelled anew by another: the rows are those that the other run would have made
by itself.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from configs.schema import ModelSource
from data_gen.pipeline.command import make
from data_gen.pipeline.inspect import responses
from tests.data_gen.on_disk import assert_same_rows, rows_of
from tests.toys.saved_pair import save_toy


@pytest.fixture
def relabelled(toy_config, with_data, tmp_path):
    """relabelled(name, config): `config` over the responses of the toy run, in a folder of its own."""
    make(toy_config)
    path = tmp_path / "responses.jsonl"
    responses(toy_config, out=str(path))
    return lambda name, config: with_data(config, source="file", responses=str(path), dir=str(tmp_path / name))


def test_the_same_settings_give_the_same_rows(toy_config, relabelled):
    again = relabelled("again", toy_config)
    make(again)
    assert_same_rows(rows_of(again), rows_of(toy_config))


def test_another_draft_mixing_ratio_and_timing_are_labelled_as_if_the_target_had_written_for_them(
    toy_config, with_data, relabelled, tmp_path
):
    save_toy(tmp_path / "other", hidden_size=12, seed=7, scale=0.3)
    pair = replace(toy_config.pair, draft=ModelSource(path=str(tmp_path / "other")))
    heads = replace(toy_config.heads, specdec=False)
    other = with_data(replace(toy_config, pair=pair, heads=heads), mixing_ratio=0.5, features=("drawn",))
    afresh, again = with_data(other, dir=str(tmp_path / "afresh")), relabelled("again", other)
    make(afresh)
    make(again)
    assert_same_rows(rows_of(again), rows_of(afresh))
    assert [row["draft_ids"] for row in rows_of(again)] != [row["draft_ids"] for row in rows_of(toy_config)]
    assert not (tmp_path / "again" / "features" / "fed").exists()


def test_a_file_grows_with_its_rows_and_what_was_labelled_from_it_goes_on(toy_config, with_data, tmp_path):
    path = tmp_path / "responses.jsonl"
    few = with_data(toy_config, num_train=4, num_test=2)
    again = with_data(few, source="file", responses=str(path), dir=str(tmp_path / "again"))
    make(few)
    responses(few, out=str(path))
    make(again)
    lines = path.read_bytes()
    make(toy_config)
    responses(toy_config, out=str(path))
    assert path.read_bytes().startswith(lines)
    assert len(path.read_text().splitlines()) == 12
    make(with_data(again, num_train=8, num_test=4))
    assert_same_rows(rows_of(again), rows_of(toy_config))


def test_responses_to_other_prompts_are_errors_that_say_so(toy_config, with_data, relabelled):
    plain = with_data(relabelled("plain", toy_config), template="plain")
    with pytest.raises(ValueError, match="12 of 12 prompts ended in an error"):
        make(plain)
    errors = [json.loads(line) for line in Path(plain.data.dir, "errors.jsonl").read_text().splitlines()]
    assert all("check data.prompts and data.template" in error["reason"] for error in errors)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"id": "p1", "response": "mine"}\n', "responses.jsonl:1 was not written by this command"),
        ('{"id": "NAME", "prompt_ids": [5], "response_ids": [5]}\n', "have different responses to NAME"),
    ],
)
def test_a_file_that_holds_something_else_stays_as_it_is(toy_config, tmp_path, content, message):
    make(toy_config)
    name, path = rows_of(toy_config)[0]["id"], tmp_path / "responses.jsonl"
    path.write_text(content.replace("NAME", name))
    with pytest.raises(ValueError, match=message.replace("NAME", name)):
        responses(toy_config, out=str(path))
    assert path.read_text() == content.replace("NAME", name)


def test_what_the_stage_respond_left_is_written_as_it_is_once_the_rows_are_there(toy_config, with_data, tmp_path):
    config = with_data(toy_config, mode="sequential")
    make(config, stages="respond")
    responses(config, out=str(tmp_path / "early.jsonl"))
    make(config)
    responses(config, out=str(tmp_path / "late.jsonl"))
    assert (tmp_path / "early.jsonl").read_bytes() == (tmp_path / "late.jsonl").read_bytes() != b""

"""Responses from a server and from a file, with everything that can go wrong in between."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import normalizers
from transformers import AutoTokenizer

from data_gen.pipeline.command import make
from data_gen.responses.exchange import Problem, Request, Response
from data_gen.responses.server import request_settings
from data_gen.responses.text import ResponseFile, Spelling
from lm import Sampling
from tests.toys.answering import all_rows, completion, problems


def test_a_servers_text_becomes_rows_with_the_end_of_sequence(served, server, tokenizer):
    server.answer = lambda body, attempt: completion("hi", "stop" if "x" in body["prompt"] else "length")
    make(served)
    rows = all_rows(served)
    assert len(rows) == 12
    for row in rows.values():
        assert row["response_ids"] == tokenizer("hi").input_ids + ([1] if row["finish_reason"] == "stop" else [])
    assert all(body["max_tokens"] == 10 and body["model"] == served.pair.target.path for body in server.bodies)
    assert len({body["seed"] for body in server.bodies}) == 12


def test_passing_failures_of_a_server_are_retried(served, server):
    server.answer = lambda body, attempt: (503, {"error": {"message": "busy"}}) if attempt < 2 else completion("late")
    make(served)
    assert len(all_rows(served)) == 12
    assert len(server.bodies) == 24


def test_what_a_server_answers_wrongly_is_reported_by_prompt(served, server):
    wrong = {
        "Say it \nx": (400, {"error": {"message": "too long"}}),
        "Say it again \nxx": (200, "<html>proxy</html>"),
        "Say it again again \n": (
            200,
            {"id": "c", "object": "text_completion", "created": 0, "model": "m", "choices": []},
        ),
        "Say it again again again \n": completion("\ufffd" * 2, "content_filter"),
    }

    def answer(body, attempt):
        return next((reply for key, reply in wrong.items() if body["prompt"].startswith("<u>" + key)), completion("ok"))

    server.answer = answer
    make(served)
    reasons = problems(served)
    assert len(reasons) + len(all_rows(served)) == 12
    assert any(reason.startswith("refused: ") for reason in reasons.values())
    assert any(reason.startswith("invalid answer from the server") for reason in reasons.values())


def test_a_server_that_does_not_answer_stops_the_run_and_leaves_no_rows(served, server):
    config = replace(
        served,
        data=replace(served.data, server=replace(served.data.server, url="http://127.0.0.1:9/v1", max_retries=0)),
    )
    with pytest.raises(ValueError, match="does not answer after 0 retries"):
        make(config)
    assert not list(Path(config.data.dir).rglob("*.parquet"))


def test_a_server_that_knows_no_such_model_or_refuses_all_stops_the_run(served, server):
    server.answer = lambda body, attempt: (404, {"error": {"message": "no model"}})
    with pytest.raises(ValueError, match="answers 404 for model"):
        make(served)
    server.answer = lambda body, attempt: (400, {"error": {"message": "bad field"}})
    with pytest.raises(ValueError, match=r"(\d+) of the last \1 answers .* are invalid; the latest, p\d+: refused: "):
        make(replace(served, data=replace(served.data, rows_per_shard=8, dir=served.data.dir + "2")))


def test_token_ids_of_a_server_are_taken_as_they_are(served, server, tokenizer):
    server.answer = lambda body, attempt: completion(tokenizer.decode([77, 78]), "length", token_ids=[77, 78])
    make(served)
    assert all(row["response_ids"] == [77, 78] for row in all_rows(served).values())


def test_text_that_does_not_round_trip_is_reported_not_altered(tokenizer):
    request = Request("a", "<u>q\n<a>", tokenizer("<u>q\n<a>").input_ids)
    response = Spelling(tokenizer, frozenset({1})).of_text("caf\u00e9", "stop", request)
    assert isinstance(response, Response)
    assert tokenizer.decode(response.response_ids, skip_special_tokens=True) == "caf\u00e9"

    lowering = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    lowering.backend_tokenizer.normalizer = normalizers.Lowercase()
    answer = Spelling(lowering, frozenset({1})).of_text("Loud", "stop", request)
    assert isinstance(answer, Problem)
    assert "does not round-trip" in answer.reason


def test_a_file_of_responses_is_used_as_it_is(toy_config, with_data, tmp_path, tokenizer):
    path = tmp_path / "responses.jsonl"
    records = [{"id": f"p{number}", "response": "text"} for number in range(9)]
    records += [
        {"id": "p9", "response_ids": [50, 51]},
        {"id": "p10", "response_ids": [50, 1]},
        {"id": "p11", "response": "far too long for it"},
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records[1:]))
    config = with_data(toy_config, source="file", responses=str(path), max_error_share=1.0)
    make(config)
    rows, reasons = all_rows(config), problems(config)
    assert rows["p9"]["response_ids"] == [50, 51]
    assert (rows["p9"]["finish_reason"], rows["p10"]["finish_reason"]) == ("length", "stop")
    assert rows["p1"]["response_ids"] == [*tokenizer("text").input_ids, 1]
    assert "no response in" in reasons["p0"]
    assert "data.max_new_tokens is 10" in reasons["p11"]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"response": "x"}', ":2: expected an id"),
        ('{"id": 1, "text": "x"}', ":2: expected response"),
        (
            '{"id": 1, "prompt_ids": "five", "response_ids": [5]}',
            ":2: expected prompt_ids to be a list of integers, got 'five'",
        ),
        (
            '{"id": 1, "response": "x", "finish_reason": "eos"}',
            ":2: expected finish_reason to be stop or length, got 'eos'",
        ),
        ('{"id": 1, "response_ids": [true]}', ":2: expected response"),
        ('{"id": 1, "response": "x", "turn": 0}', ":2: expected turn to be a whole number from 1"),
    ],
)
def test_a_malformed_line_of_responses_is_named(tmp_path, tokenizer, line, complaint):
    path = tmp_path / "responses.jsonl"
    path.write_text('{"id": 0, "response": "fine"}\n' + line + "\n")
    with pytest.raises(ValueError, match=complaint):
        ResponseFile(str(path), Spelling(tokenizer, frozenset({1})), max_new_tokens=10)


def test_every_kind_of_server_is_told_the_sampling():
    sampling = Sampling(temperature=0.5, top_k=50)
    assert request_settings("vllm", sampling, max_new_tokens=9, eos_ids=[1])["extra_body"] == {
        "top_k": 50,
        "return_token_ids": True,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }
    generation = json.loads(
        request_settings("transformers", sampling, max_new_tokens=9, eos_ids=[1])["extra_body"]["generation_config"]
    )
    assert generation == {
        "do_sample": True,
        "max_new_tokens": 9,
        "eos_token_id": [1],
        "temperature": 0.5,
        "top_k": 50,
        "top_p": 1.0,
    }
    with pytest.raises(ValueError, match="top_k is 50, which an OpenAI server does not support"):
        request_settings("openai", sampling, max_new_tokens=9, eos_ids=[1])

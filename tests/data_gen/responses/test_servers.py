"""Responses from servers and files: the bytes are those of one request at a time, also where servers die; what is wrong
becomes the problem of a row, or stops the run.
"""

import random
import threading
import time
from collections import Counter
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
from tokenizers import normalizers
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from configs.command import run
from configs.schema import ServerConfig
from data_gen.pipeline.command import make
from data_gen.prompts.prompt import Prompt
from data_gen.responses.connection import key_for
from data_gen.responses.exchange import Answers, Exchange, LatestRows, Problem, RefusedError, Request, ShardSpec
from data_gen.responses.server import CompletionsServer, Servers
from data_gen.responses.text import ResponseFile, Spelling
from lm import Sampling
from tests.data_gen.on_disk import files_of, toy_of, with_data, with_server, write_lines
from tests.toys.answering import Answering, all_rows, answering, close_half_way, completion, echo, problems, url_of


def asking(config, *servers, **settings):
    urls = tuple(map(url_of, servers)) if len(servers) > 1 else url_of(servers[0])
    return with_data(with_server(config, url=urls, **{"max_retries": 0} | settings), max_error_share=0.0)


@pytest.fixture(scope="module")
def one_at_a_time(toy_pair, prompts_file, tmp_path_factory):
    """The bytes of the run with one request at a time at one server."""
    config = with_data(toy_of(toy_pair, prompts_file, tmp_path_factory.mktemp("slow") / "data"), source="server")
    with answering(echo) as server:
        make(asking(config, server, concurrency=1))
    return files_of(config.data.dir)


def test_no_server_has_more_requests_under_way_than_its_concurrency(served, server, second):
    most, under_way, lock = Counter(), Counter(), threading.Lock()

    def counted(name, body, attempt):
        with lock:
            under_way[name] += 1
            most[name] = max(most[name], under_way[name])
        time.sleep(0.05)
        with lock:
            under_way[name] -= 1
        return echo(body, attempt)

    server.answer, second.answer = partial(counted, "first"), partial(counted, "second")
    make(asking(served, server, second, concurrency=2))
    assert most == {"first": 2, "second": 2}


@pytest.mark.parametrize("death", [(200, close_half_way), (503, {"error": {"message": "out of memory"}})])
def test_the_others_take_over_the_requests_of_a_server_that_dies_and_the_last_death_stops_the_run(
    served, server, second, one_at_a_time, death, capsys
):
    num_answered = iter(range(100))
    second.answer = lambda body, attempt: echo(body, attempt) if next(num_answered) < 3 else death
    config = asking(served, server, second, concurrency=2)
    make(config)
    assert files_of(config.data.dir) == one_at_a_time
    assert "1 other servers take over its requests" in capsys.readouterr().err
    num_answered = iter(range(100))
    server.answer = second.answer = lambda body, attempt: echo(body, attempt) if next(num_answered) < 8 else death
    config = with_data(config, dir=config.data.dir + "-2")
    with pytest.raises(ValueError, match=r"answers 503 for model|does not answer after 0 retries"):
        make(config)
    server.answer = second.answer = echo
    make(config)
    assert files_of(config.data.dir) == one_at_a_time


def test_a_prompt_at_which_servers_fail_is_the_problem_of_its_row(served, server, second, capsys):
    """The prompt that ends in xx makes every server answer 500; all others are answered."""
    boom = (500, {"error": {"message": "boom"}})
    server.answer = second.answer = lambda body, attempt: boom if "xx" in body["prompt"] else echo(body, attempt)
    config = asking(served, server, second, concurrency=2)
    make(with_data(config, max_error_share=1.0))
    failed = problems(config)
    assert len(failed) + len(all_rows(config)) == 12
    assert failed
    assert all("answers 500" in reason for reason in failed.values())
    assert "take over its requests" not in capsys.readouterr().err


@pytest.mark.parametrize(("variable", "expected"), [(None, "Bearer none"), ("OWN_KEY", "Bearer own"), ("NO_KEY", None)])
def test_a_key_is_sent_only_to_a_server_that_it_was_named_for(served, server, monkeypatch, variable, expected):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    monkeypatch.setenv("OWN_KEY", "own")
    keys = set()

    class Keyed(Answering):
        def do_POST(self) -> None:  # noqa: N802
            keys.add(self.headers["Authorization"])
            super().do_POST()

    server.RequestHandlerClass = Keyed
    config = asking(served, server, api_key_variable=variable)
    with pytest.raises(ValueError, match="NO_KEY, but that environment") if expected is None else nullcontext():
        make(config)
    assert keys == ({expected} if expected else set())
    assert key_for("https://api.openai.com/v1", None) == "secret"


def test_each_server_of_a_list_is_tried_before_the_run(served, server, second):
    for status, failure in ((404, ""), (400, " failed at its first request: .*")):
        second.answer = lambda body, attempt, status=status: (status, {"error": {"message": "no such model"}})
        with pytest.raises(ValueError, match=f"{url_of(second)}{failure} answers {status} for model"):
            make(asking(served, server, second))
    assert {body["max_tokens"] for body in server.bodies} == {1}


def test_the_next_shards_are_asked_for_while_the_last_rows_of_a_shard_are_under_way(served, server, one_at_a_time):
    """The first request is answered only once requests of the second shard (of three prompts each) have come."""
    fourth, lock, num_asked = threading.Event(), threading.Lock(), iter(range(100))

    def answer(body, attempt):
        with lock:
            number = next(num_asked)
        if number == 0:
            assert fourth.wait(20)
        if number == 4:
            fourth.set()
        return echo(body, attempt)

    server.answer = answer
    config = asking(served, server, concurrency=2, timeout_s=30)
    make(config)
    assert files_of(config.data.dir) == one_at_a_time


@pytest.mark.parametrize("mode", ["together", "sequential"])
def test_servers_share_the_requests_and_bytes_do_not_depend_on_when_they_answer(
    served, server, second, one_at_a_time, mode
):
    chance, made = random.Random(5), []

    def late(body, attempt):
        time.sleep(chance.random() / 20)
        return echo(body, attempt)

    server.answer = second.answer = late
    for number in range(2):
        config = asking(with_data(served, mode=mode, dir=f"{served.data.dir}-{number}"), server, second, concurrency=3)
        make(config)
        made.append(files_of(config.data.dir))
    assert made[0] == made[1]
    assert min(len(asked.bodies) for asked in (server, second)) > 4  # each run tries each server twice at most
    if mode == "together":
        assert made[0] == one_at_a_time


def specs(num: int, per_shard: int) -> list[ShardSpec]:
    return [ShardSpec("train", i, tuple(Prompt(f"{i}-{j}", ("hi",)) for j in range(per_shard))) for i in range(num)]


def test_only_the_answers_of_a_few_shards_are_in_memory():
    asked, servers = [], Servers(ServerConfig(concurrency=8), model="m")
    ahead = servers.ahead(specs(50, 4), lambda spec: asked.append(spec.index) or Answers([], []))
    for index, (spec, _) in enumerate(ahead):
        assert spec.index == index
        time.sleep(0.002)
        assert len(asked) <= index + 4  # this shard, the next, and two shards of four for eight requests at once
    assert sorted(asked) == list(range(50))


def test_an_error_of_one_shard_comes_after_the_shards_before_it_and_ends_what_waits(server):
    end = threading.Event()

    def answer(body, attempt):
        number = int(body["prompt"][-1])
        if number == 3:
            return 401, {"error": {"message": "key"}}
        return 200, (lambda handler: end.wait(20)) if number > 3 else completion("hi")[1]

    server.answer, config = answer, ServerConfig(url=url_of(server), concurrency=8, max_retries=0)
    servers = Servers(config, model="m")
    answers = servers.ahead(specs(10, 4), lambda spec: servers.run(servers.ask({"prompt": spec.name})))
    assert [next(answers)[0].index for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="answers 401"):
        next(answers)
    with pytest.raises(ValueError, match="the run has ended"):
        servers.run(servers.ask({"prompt": "late 0"}))
    end.set()


TEXT, EOS = "<u>hi\n<a>", frozenset({1})


def answer_of(config, tokenizer) -> Exchange | Problem:
    settings = {"model": "m", "sampling": Sampling(), "max_new_tokens": 4}
    source = CompletionsServer(config.data.server, Spelling(tokenizer, EOS), **settings)
    request = Request("p", TEXT, tokenizer(TEXT, add_special_tokens=False).input_ids)
    return source.respond([request], 0, lambda count: None)[0]


def test_vllm_reads_the_very_ids_that_labels_use_and_others_that_add_a_second_bos_are_refused(served, server, toy_pair):
    """Read as vLLM does: a list as it is, a text with special tokens unless told otherwise. The chat template has
    written the <u> that the tokenizer adds, as Llama's its BOS.
    """
    tokenizer = AutoTokenizer.from_pretrained(toy_pair / "target")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<u> $A", special_tokens=[("<u>", 2)])
    read = []

    def answer(body, attempt):
        adds, prompt = {"add_special_tokens": body.get("add_special_tokens", True)}, body["prompt"]
        read.append(prompt if isinstance(prompt, list) else tokenizer(prompt, **adds).input_ids)
        return completion("ok", token_ids=tokenizer("ok", add_special_tokens=False).input_ids)

    server.answer = answer
    expected = tokenizer(TEXT, add_special_tokens=False).input_ids
    assert tokenizer(TEXT).input_ids == [2, *expected]
    for prompt_as in ("auto", "token_ids", "text"):
        assert isinstance(answer_of(with_server(served, kind="vllm", prompt_as=prompt_as), tokenizer), Exchange)
    assert read == [expected] * 3
    complaint = r"a server of kind openai adds them again; set data\.server\.prompt_as to token_ids"
    with pytest.raises(ValueError, match=complaint):
        answer_of(served, tokenizer)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"token_ids": [70, 9999]}, "response id 9999 is not one of the tokenizer's"),
        ({"token_ids": [True, 70]}, "response id True is not one"),
        ({"token_ids": "no list"}, "response id 'no list' is not one"),
        ({"token_ids": [70, 71]}, "text differs from its decoded token ids"),
        ({"token_ids": [1, 70], "text": "c"}, "end-of-sequence id at position 0 of a response of 3 tokens"),
        ({"text": "far too long"}, "13 tokens, more than the requested 4"),
        ({"text": None}, "invalid answer from the server"),
        ({"finish_reason": "content_filter"}, "invalid answer from the server"),
        ({"choices": 2}, "expected one choice"),
        ({"usage": {"prompt_tokens": 4}}, "read a prompt of 4 tokens (usage.prompt_tokens), but 5 were sent"),
        ({"truncated": True}, "the server truncated the prompt"),
        ({"usage": {"completion_tokens": 4}}, "generated 4 tokens (usage.completion_tokens), but its text has 3 here"),
        ({"prompt_token_ids": [5]}, "read other prompt ids"),
        ({"finish_reason": "length", "usage": {"completion_tokens": 2}}, "cut the response after 2 of 4 tokens"),
    ],
)
def test_a_lie_becomes_the_problem_of_its_prompt(served, server, tokenizer, fields, reason):
    status, reply = completion(**{"text": "hi", **fields})
    reply |= {name: fields[name] for name in ("usage", "truncated") if name in fields}
    server.answer = lambda body, attempt: (status, reply | {"choices": fields.get("choices", 1) * reply["choices"]})
    answer = answer_of(served, tokenizer)
    assert isinstance(answer, Problem)
    assert answer.outcome == "error"
    assert reason in answer.reason


NO_REPLY = "does not answer after 0 retries"
MOST = r"(\d+) of the last \1 answers of http.* are invalid; .*"


@pytest.mark.parametrize(
    ("reply", "complaint"),
    [
        ((200, close_half_way), NO_REPLY),
        ((200, lambda handler: time.sleep(1)), NO_REPLY),
        (None, NO_REPLY),
        ((200, "<html>sign in</html>"), MOST + "sign in"),
        ((404, {"error": {"message": "no model"}}), "answers 404 for model"),
        ((400, {"error": {"message": "bad field"}}), MOST + "the latest, p.*: http.* answers 400 .*bad field"),
    ],
    ids=["closes half-way", "hangs", "is not there", "a proxy", "has no such model", "refuses all"],
)
def test_a_server_that_answers_no_prompt_stops_the_run_and_no_prompt_counts_as_tried(served, server, reply, complaint):
    server.answer = lambda body, attempt: reply
    url = "http://127.0.0.1:9/v1" if reply is None else served.data.server.url
    timeout_s = 0.2 if complaint == NO_REPLY else 5
    with pytest.raises(ValueError, match=complaint):
        make(with_data(with_server(served, url=url, max_retries=0, timeout_s=timeout_s), rows_per_shard=8))
    assert not list(Path(served.data.dir).rglob("*.parquet"))
    server.answer = lambda body, attempt: completion("ok")
    make(with_data(served, rows_per_shard=8))
    assert len(all_rows(served)) == 12


def test_errors_are_tried_again_and_the_result_is_that_of_a_run_without_them(served, server, capsys):
    """Shards without an error stay, prompts with a response are not asked again, and a retry may fail in between."""
    server.answer = lambda body, attempt: completion("ok" + body["prompt"][-9:-4].strip("\n<>"))
    whole = with_data(served, dir=served.data.dir + "-whole")
    make(whole)
    good, partly = server.answer, with_data(served, max_error_share=0.1)
    no = (400, {"error": {"message": "no"}})
    server.answer = lambda body, attempt: no if "again again again" in body["prompt"] else good(body, 0)
    with pytest.raises(SystemExit, match="2"):
        run({"make": lambda: make(partly)}, argv=["make"])
    assert "above data.max_error_share 0.1" in capsys.readouterr().err
    before, failed = files_of(partly.data.dir), problems(partly)
    with_errors = {name for name in before if '"outcome": "error"' in before.get(name + ".json", b"").decode()}
    server.answer = lambda body, attempt: (401, {"error": {"message": "key"}})
    with pytest.raises(ValueError, match="answers 401"):
        make(partly, retry_errors=True)
    assert files_of(partly.data.dir) == before
    server.answer, server.bodies[:] = good, []
    make(partly, retry_errors=True)
    assert len({body["prompt"] for body in server.bodies}) == len(failed) > 0
    after = files_of(partly.data.dir)
    assert after == files_of(whole.data.dir)
    untouched = {name for name in before if name.startswith("rows/") and name.endswith(".parquet")} - with_errors
    assert untouched
    assert all(before[name] == after[name] for name in untouched)


@pytest.mark.parametrize(
    ("failed", "allowed", "says"),
    [
        ([False] * 32 + [True] * 29, 0.0, "29 of the last 32"),
        ([False] * 32 + [True] * 28, 0.0, None),
        ([True] * 7, 0.0, None),
        ([True] * 8, 0.0, "8 of the last 8"),
        ([True] * 18 + [False], 0.0, "18 of the last 19"),
        ([True] * 18 + [False], 0.95, None),
        ([True] * 32, 1.0, None),
    ],
)
def test_a_run_stops_once_nearly_all_of_its_latest_rows_failed(failed, allowed, says):
    rows = [Problem(f"p{row}", "error", "no answer") if is_failed else None for row, is_failed in enumerate(failed)]
    refused = rf"{says} answers are invalid; the latest, p\d+: no answer; check"
    with pytest.raises(ValueError, match=refused) if says else nullcontext():
        LatestRows(max_error_share=allowed).add(rows, subject="answers are invalid", remedy="check the proxy")


def test_a_servers_text_or_token_ids_become_rows_and_passing_failures_are_retried(served, server, tokenizer):
    def answer(body, attempt):
        if attempt < 2:
            return 503, {"error": {"message": "busy"}}
        if "xx" in body["prompt"]:
            return completion(tokenizer.decode([77, 78]), "length", token_ids=[77, 78])
        return completion("hi", "stop" if "x" in body["prompt"] else "length")

    server.answer = answer
    make(served)
    rows = all_rows(served)
    assert (len(rows), len(server.bodies)) == (12, 24)
    assert {row["finish_reason"] for row in rows.values()} == {"stop", "length"}
    for row in rows.values():
        hi = tokenizer("hi").input_ids + ([1] if row["finish_reason"] == "stop" else [])
        assert row["response_ids"] == ([77, 78] if "xx" in row["prompt"] else hi)
    assert all(body["max_tokens"] == 10 and body["model"] == served.pair.target.path for body in server.bodies)
    assert len({body["seed"] for body in server.bodies}) == 12


def test_text_that_does_not_round_trip_is_reported_not_altered(tokenizer):
    request = Request("a", "<u>q\n<a>", tokenizer("<u>q\n<a>").input_ids)
    answer = Spelling(tokenizer, EOS).answer(request, "stop", text="caf\u00e9")
    assert tokenizer.decode(answer.response_ids, skip_special_tokens=True) == "caf\u00e9"
    lowering = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    lowering.backend_tokenizer.normalizer = normalizers.Lowercase()
    with pytest.raises(RefusedError, match="does not round-trip"):
        Spelling(lowering, EOS).answer(request, "stop", text="Loud")


def test_a_response_is_found_by_id_and_prompt_and_two_to_one_prompt_are_refused(tokenizer, tmp_path):
    """Records without an id are numbered, so prompts of the parts train and test of a set have the same ids."""
    requests = [Request("0", text, tokenizer(text).input_ids) for text in ("<u>a\n<a>", "<u>b\n<a>", "<u>c\n<a>")]
    records = [
        {"id": "0", "prompt_ids": request.prompt_ids, "response_ids": [50 + number]}
        for number, request in enumerate(requests[:2])
    ]
    path = write_lines(tmp_path / "responses.jsonl", [*records, records[0]])
    source = ResponseFile(path, Spelling(tokenizer, EOS), max_new_tokens=4)
    answers = source.respond(requests, 0, lambda count: None)
    assert [answer.response_ids for answer in answers[:2]] == [[50], [51]]
    assert "other prompt_ids for this id" in answers[2].reason
    for second in ({"response_ids": [9]}, {"finish_reason": "stop"}):
        path = write_lines(tmp_path / "two.jsonl", [*records, records[0] | second])
        with pytest.raises(ValueError, match=r"two\.jsonl:3: .*two\.jsonl:1 has another response to"):
            ResponseFile(path, Spelling(tokenizer, EOS), max_new_tokens=4)


def test_a_file_of_responses_is_used_as_it_is(toy_config, tmp_path, tokenizer):
    records = [{"id": f"p{number}", "response": "text"} for number in range(1, 9)]
    records += [{"id": "p9", "response_ids": [50, 51]}, {"id": "p10", "response_ids": [50, 1]}]
    records += [{"id": "p11", "response": "far too long for it"}]
    path = write_lines(tmp_path / "responses.jsonl", records)
    config = with_data(toy_config, source="file", responses=path, max_error_share=1.0)
    make(config)
    rows, reasons = all_rows(config), problems(config)
    assert rows["p9"]["response_ids"] == [50, 51]
    assert (rows["p9"]["finish_reason"], rows["p10"]["finish_reason"]) == ("length", "stop")
    assert rows["p1"]["response_ids"] == [*tokenizer("text").input_ids, 1]
    assert "data.max_new_tokens is 10" in reasons["p11"]
    assert list(reasons) == ["p11"], "the target generates a response to p0, which the file lacks"
    apart = with_data(config, mode="sequential", dir=config.data.dir + "-apart")
    make(apart)
    assert {name: row["response_ids"] for name, row in all_rows(apart).items()} == {
        name: row["response_ids"] for name, row in rows.items()
    }
    assert len(rows["p0"]["response_ids"]) == 10 or rows["p0"]["response_ids"][-1] == 1

"""Servers that lie, hang, close half-way or read a prompt as other ids; what a run keeps of them, and what it tries
again.
"""

import time
from dataclasses import replace

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from configs.command import run
from configs.schema import Config
from data_gen.pipeline.command import make
from data_gen.responses.exchange import LatestRows, Problem, Request, Response
from data_gen.responses.server import CompletionsServer
from data_gen.responses.text import Spelling
from lm import Sampling
from tests.data_gen.on_disk import files_of
from tests.toys.answering import all_rows, close_half_way, completion, problems

TEXT = "<u>hi\n<a>"


def changed(config, **settings):
    """The config with other settings of its server."""
    return replace(config, data=replace(config.data, server=replace(config.data.server, **settings)))


def source(config, tokenizer) -> CompletionsServer:
    return CompletionsServer(
        config.data.server, Spelling(tokenizer, frozenset({1})), model="m", sampling=Sampling(), max_new_tokens=4
    )


def request(tokenizer) -> Request:
    return Request("p", TEXT, tokenizer(TEXT, add_special_tokens=False).input_ids)


def answer_of(config, tokenizer) -> Response | Problem:
    return source(config, tokenizer).respond([request(tokenizer)], 0, lambda count: None)[0]


@pytest.fixture(scope="module")
def adds_bos(toy_pair):
    """A tokenizer that begins every text with <u>, which its chat template has written already: as Llama's with its
    BOS.
    """
    tokenizer = AutoTokenizer.from_pretrained(toy_pair / "target")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<u> $A", special_tokens=[("<u>", 2)])
    return tokenizer


@pytest.mark.parametrize("prompt_as", ["auto", "token_ids", "text"])
def test_vllm_reads_the_very_ids_that_labels_use(served, server, adds_bos, prompt_as):
    """Read as vLLM does: a list as it is, a text with special tokens unless told otherwise."""
    read = []

    def answer(body, attempt):
        tell = {"add_special_tokens": body.get("add_special_tokens", True)}
        read.append(body["prompt"] if isinstance(body["prompt"], list) else adds_bos(body["prompt"], **tell).input_ids)
        return completion("ok", token_ids=adds_bos("ok", add_special_tokens=False).input_ids)

    server.answer = answer
    expected = request(adds_bos).prompt_ids
    assert adds_bos(TEXT).input_ids == [2, *expected]
    assert isinstance(answer_of(changed(served, kind="vllm", prompt_as=prompt_as), adds_bos), Response)
    assert read == [expected]


def test_a_server_that_cannot_be_kept_from_a_second_bos_is_refused(served, adds_bos):
    with pytest.raises(
        ValueError, match=r"a server of kind openai adds them again; set data\.server\.prompt_as to token_ids"
    ):
        answer_of(served, adds_bos)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"token_ids": [70, 9999]}, "response id 9999 is not one of the tokenizer's"),
        ({"token_ids": [True, 70]}, "response id True is not one"),
        ({"token_ids": "no list"}, "token_ids is not a list"),
        ({"token_ids": [70, 71]}, "text differs from its decoded token ids"),
        ({"token_ids": [1, 70], "text": "c"}, "end-of-sequence id at position 0 of a response of 3 tokens"),
        ({"text": "far too long"}, "13 tokens, more than the requested 4"),
        ({"text": None}, "invalid answer from the server"),
        ({"finish_reason": "content_filter"}, "invalid answer from the server"),
        ({"choices": 2}, "expected one choice"),
    ],
)
def test_a_lie_becomes_the_problem_of_its_prompt(served, server, tokenizer, fields, reason):
    status, reply = completion(**{"text": "hi", **fields})
    server.answer = lambda body, attempt: (status, reply | {"choices": fields.get("choices", 1) * reply["choices"]})
    answer = answer_of(served, tokenizer)
    assert isinstance(answer, Problem)
    assert answer.outcome == "error"
    assert reason in answer.reason


@pytest.mark.parametrize("failure", [close_half_way, lambda handler: time.sleep(1)], ids=["closes half-way", "hangs"])
def test_a_server_that_closes_or_hangs_ends_in_one_line(served, server, tokenizer, failure):
    server.answer = lambda body, attempt: (200, failure)
    with pytest.raises(ValueError, match="does not answer after 0 retries"):
        answer_of(changed(served, max_retries=0, timeout_s=0.2), tokenizer)


def test_a_proxy_that_answers_html_to_all_stops_the_run_and_no_prompt_counts_as_tried(served, server):
    server.answer = lambda body, attempt: (200, "<html>sign in</html>")
    with pytest.raises(ValueError, match=r"(\d+) of the last \1 answers of http.* are invalid; .*sign in"):
        make(served)
    server.answer = lambda body, attempt: completion("ok")
    make(served)
    assert len(all_rows(served)) + len(problems(served)) == 12


def test_errors_are_tried_again_and_the_result_is_that_of_a_run_without_them(served, server, with_data, capsys):
    """Shards without an error are not touched, and a prompt that has its response is not asked again."""
    server.answer = lambda body, attempt: completion("ok" + body["prompt"][-9:-4].strip("\n<>"))
    whole = with_data(served, dir=served.data.dir + "-whole")
    make(whole)
    good, partly = server.answer, with_data(served, max_error_share=0.1)
    server.answer = lambda body, attempt: (
        (400, {"error": {"message": "no"}}) if "again again again" in body["prompt"] else good(body, 0)
    )
    argv = ["--pair.target.path=a", "--pair.draft.path=b"]

    def failing(config: Config) -> None:
        make(partly)

    with pytest.raises(SystemExit, match="2"):
        run({"make": failing}, default="make", argv=argv)
    assert "above data.max_error_share 0.1" in capsys.readouterr().err
    before, failed = files_of(partly.data.dir), problems(partly)
    with_errors = {name for name in before if '"outcome": "error"' in before.get(name + ".json", b"").decode()}
    server.answer, server.bodies[:] = good, []
    make(partly, retry_errors=True)
    assert len(server.bodies) == len(failed) > 0
    after = files_of(partly.data.dir)
    assert after == files_of(whole.data.dir)
    untouched = {name for name in before if name.startswith("rows/") and name.endswith(".parquet")} - with_errors
    assert untouched
    assert all(before[name] == after[name] for name in untouched)


def test_a_retry_that_fails_leaves_the_shards_as_they_were(served, server):
    server.answer = lambda body, attempt: (
        (400, {"error": {"message": "no"}}) if "xx" in body["prompt"] else completion("ok")
    )
    make(served)
    before = files_of(served.data.dir)
    server.answer = lambda body, attempt: (401, {"error": {"message": "key"}})
    with pytest.raises(ValueError, match="answers 401"):
        make(served, retry_errors=True)
    assert files_of(served.data.dir) == before


REFUSED = r"{} answers are invalid; the latest, p\d+: no answer; check"


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
    settings = {"subject": "answers are invalid", "remedy": "check the proxy"}
    latest = LatestRows(max_error_share=allowed)
    if says is None:
        latest.add(rows, **settings)
    else:
        with pytest.raises(ValueError, match=REFUSED.format(says)):
            latest.add(rows, **settings)

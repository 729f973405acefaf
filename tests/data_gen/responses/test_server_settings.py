"""What requests to servers contain, and what a server would add to them by itself."""

import json
import shutil
from contextlib import nullcontext
from dataclasses import replace

import pytest
from transformers import GenerationConfig

from configs.schema import ModelSource, ServerConfig
from data_gen.pipeline.command import make
from data_gen.prompts.prompt import say_once
from data_gen.responses.connection import client_of, key_for, proxy_of
from data_gen.responses.exchange import Exchange, Problem, Request
from data_gen.responses.server import CompletionsServer, Servers
from data_gen.responses.settings import check_unsent, request_settings
from data_gen.responses.text import Spelling
from lm import Sampling
from tests.data_gen.on_disk import with_data
from tests.toys.answering import completion


@pytest.mark.parametrize("file", [{}, {"repetition_penalty": 1.3, "top_k": 20, "min_p": 0.1, "typical_p": 0.5}])
def test_every_kind_of_server_gets_the_sampling_whatever_the_models_file_has(file):
    of = {"sampling": Sampling(temperature=0.5, top_k=50), "max_new_tokens": 9, "eos_ids": [1]}
    settings = request_settings("vllm", **of)
    extra = {"top_k": 50, "return_token_ids": True, "min_p": 0.0, "repetition_penalty": 1.0}
    assert settings["extra_body"] == extra
    assert (settings["temperature"], settings["top_p"], settings["presence_penalty"]) == (0.5, 1.0, 0.0)
    generation = json.loads(request_settings("transformers", **of)["extra_body"]["generation_config"])
    merged = GenerationConfig(**generation)
    merged.update(**file, defaults_only=True)  # as `transformers serve` does
    warpers = {"do_sample": True, "temperature": 0.5, "top_k": 50, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}
    expected = warpers | {
        "repetition_penalty": 1.0,
        "no_repeat_ngram_size": 0,
        "max_new_tokens": 9,
        "eos_token_id": [1],
    }
    assert {name: getattr(merged, name) for name in expected} == expected
    with pytest.raises(ValueError, match="top_k is 50, which an OpenAI server does not support"):
        request_settings("openai", **of)


@pytest.mark.parametrize(
    ("server", "sampling", "file", "complaint"),
    [
        (
            {},
            {},
            {"repetition_penalty": 1.3, "top_k": 20},
            r'has repetition_penalty 1.3, top_k 20, .* to \{"repetition',
        ),
        ({}, {}, {"min_p": 0.05}, "has min_p 0.05, which most servers apply"),
        ({}, {"temperature": 0.0}, {"top_k": 20, "no_repeat_ngram_size": 3}, "has no_repeat_ngram_size 3, which"),
        ({}, {"temperature": 0.0}, {"top_k": 20, "temperature": 0.6}, None),
        ({"extra": {"repetition_penalty": 1.0}}, {}, {"repetition_penalty": 1.3}, None),
        (
            {"extra": {"repetition_penalty": 1.1}},
            {},
            {},
            "extra has repetition_penalty 1.1, but labels are made with 1",
        ),
        ({"extra": {"temperature": 0.5}}, {}, {}, "extra has temperature 0.5, but labels are made with 1"),
        ({"kind": "vllm", "extra": {"top_k": 9}}, {"top_k": 9}, {"repetition_penalty": 1.3}, None),
        ({"kind": "vllm", "extra": {"top_k": 8}}, {"top_k": 9}, {}, "extra has top_k 8, but labels are made with 9"),
        ({"kind": "transformers"}, {}, {"repetition_penalty": 1.3, "top_k": 20}, None),
        ({"kind": "transformers"}, {}, {"suppress_tokens": [5]}, "sets suppress_tokens, which `transformers serve`"),
    ],
)
def test_what_a_server_would_apply_by_itself_is_refused(server, sampling, file, complaint):
    config = ServerConfig(**server)
    with pytest.raises(ValueError, match=complaint) if complaint else nullcontext():
        check_unsent(config, Sampling(**sampling), file)


def test_a_run_reads_the_targets_generation_config_and_reports_what_it_cannot_send(served, toy_pair, tmp_path, capsys):
    target = shutil.copytree(toy_pair / "target", tmp_path / "target")
    file = target / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"repetition_penalty": 1.3}))
    config = replace(served, pair=replace(served.pair, target=ModelSource(path=str(target))))
    with pytest.raises(ValueError, match=r"has repetition_penalty 1\.3"):
        make(with_data(config, dir=config.data.dir + "-penalised"))
    say_once.cache_clear()
    make(served)
    assert capsys.readouterr().err.count("note: data.server.kind openai sends temperature and top_p") == 1


@pytest.mark.parametrize(
    ("num_generated", "has_ids", "is_kept"),
    [(2, False, True), (3, False, True), (0, False, True), (9, True, True), (1, False, False), (4, False, False)],
)
def test_a_text_of_another_number_of_tokens_than_were_generated_is_refused_and_ids_need_no_count(
    served, server, tokenizer, num_generated, has_ids, is_kept
):
    """hi is two tokens and end-of-sequence, which servers count or leave out; 0: no count."""
    ids = tokenizer("hi", add_special_tokens=False)["input_ids"]
    status, reply = completion("hi", token_ids=ids if has_ids else None)
    server.answer = lambda body, attempt: (status, reply | {"usage": {"completion_tokens": num_generated}})
    source = CompletionsServer(
        served.data.server, Spelling(tokenizer, frozenset({1})), model="m", sampling=Sampling(), max_new_tokens=4
    )
    [answer] = source.respond([Request("p", "x", tokenizer("x")["input_ids"])], 0, lambda count: None)
    assert isinstance(answer, Exchange if is_kept else Problem)


URL = "http://127.0.0.1:9/v1"


@pytest.mark.parametrize(
    ("key", "complaint"),
    [
        ("sk-abc\n", "KEY has a line break, a space at an end or a character beyond ASCII"),
        ("sk abc ", "KEY has a line break"),
        ("sk-\u2026", "KEY has a line break"),
        ("", "KEY is empty; set it"),
        ("  ", "KEY is empty"),
        ("sk-abc", None),
    ],
)
@pytest.mark.parametrize("variable", ["KEY", "OPENAI_API_KEY"])
def test_a_key_that_no_request_can_carry_is_named(monkeypatch, key, complaint, variable):
    monkeypatch.setenv(variable, key)
    url, name = ("https://api.openai.com/v1", None) if variable == "OPENAI_API_KEY" else (URL, variable)
    with pytest.raises(ValueError, match=complaint) if complaint else nullcontext():
        assert key_for(url, name) == key


def test_a_proxy_that_is_in_the_way_is_named(monkeypatch):
    for variable in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "all_proxy", "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("ALL_PROXY", "nonsense://127.0.0.1:9")
    with pytest.raises(ValueError, match=r"no request to http://127\.0\.0\.1:9/v1 can be made: .*check the proxy"):
        client_of(URL, "key", ServerConfig())
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:8")
    servers = Servers(ServerConfig(url=URL, max_retries=0, timeout_s=2), model="m")
    with pytest.raises(ValueError, match=r"through the proxy http://127\.0\.0\.1:8, which NO_PROXY can except"):
        servers.run(servers.ask({"prompt": "x"}))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    assert proxy_of(URL) == ""

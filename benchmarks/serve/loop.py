"""What stands beside vLLM: our own loop on the embedded trio, its prompts, and heads that requests may name."""

import os
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch

from configs import DataConfig, ModelSource, PairConfig
from data_gen.prompts.pool import load_prompts
from data_gen.prompts.templates import encode
from decode import ModelDrafter, SpeculativeDecoder
from decode.policies.registry import parse_policy
from heads import AcceptanceHead
from lm import Pair, Sampling, load_pair

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
            "set VLLM_PYTHON to the interpreter of an environment with vLLM (see the first lines of "
            "benchmarks/serve/__main__.py)"
        )
    return python


def pair_of_the_trio() -> Pair:
    """The trio's target and draft in float32."""
    target, draft = (ModelSource(path=str(TRIO / role), dtype="float32") for role in ("target", "draft"))
    return load_pair(PairConfig(target=target, draft=draft))


def heads_beside(given: list[str], pair: Pair, folder: Path) -> dict[str, str]:
    """Names and directories: the given heads, one of each timing that says nothing sensible, and one that `auto` can
    use.
    """
    torch.manual_seed(0)
    found = {f"given{place}": path for place, path in enumerate(given)}
    for timing in ("fed", "drawn"):
        head = AcceptanceHead(pair.draft.config.hidden_size, 1, timing, True, True)  # type: ignore[arg-type]
        for parameter in head.parameters():
            torch.nn.init.normal_(parameter, std=0.05)
        torch.nn.init.constant_(head.out.bias, 2.0)
        head.save_pretrained(folder / timing)
        found[timing] = str(folder / timing)
    return found | {"tuned": tuned(found.get("given0", found["drawn"]), folder / "tuned")}


def tuned(path: str, folder: Path) -> str:
    """The same head with what `evaluation tune` would have said of it; a server measures its own times."""
    head = AcceptanceHead.from_pretrained(path)
    said = {
        "t_draft_s": 0.001,
        "t_target_s": 0.005,
        "next_mean": 0.85,
        "index_offset": 0.2,
        "index_slope": 0.7,
        "first_index": 0.8,
    }
    head.provenance = replace(head.provenance, recommended=head.provenance.recommended or said)
    head.save_pretrained(folder)
    return str(folder)


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


def decoded(pair: Pair, heads: dict[str, str], request: dict[str, Any], longest: int) -> dict[str, Any]:
    """The answers of our own loop: the first token comes from the target alone, as vLLM's does."""
    policy = parse_policy(request["policy"], load_head=lambda name: AcceptanceHead.from_pretrained(heads[name]))

    def loop(longest: int) -> SpeculativeDecoder:
        drafter = ModelDrafter(pair.draft, policy, vocab_size=pair.vocab_size)
        return SpeculativeDecoder(
            pair.target, drafter, sampling=Sampling(temperature=0.0), max_draft_length=longest, eos_ids=pair.eos_ids
        )

    first = list(loop(0).generate(request["prompt_ids"], 1).token_ids)
    if first[-1] in pair.eos_ids:
        return {"token_ids": first, "rounds": []}
    generation = loop(longest).generate([*request["prompt_ids"], *first], request["max_tokens"] - 1)
    return {
        "token_ids": [*first, *generation.token_ids],
        "rounds": [[len(one.drafted), one.num_accepted] for one in generation.rounds],
    }

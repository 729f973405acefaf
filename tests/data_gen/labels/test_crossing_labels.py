"""Responses and labels are those that decoding meets where rotary frequencies change with the length of a text, or they
are refused.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from configs.schema import ModelSource
from data_gen.labels.labeller import Labeller
from data_gen.pipeline.command import make
from data_gen.responses.exchange import Exchange, Request
from data_gen.responses.in_process import TargetInProcess
from lm import Sampling
from store.shards import list_shards
from tests.data_gen.on_disk import with_data
from tests.toys.longrope import BOUND, greedy_of, model_of, text_of

GREEDY = Sampling(temperature=0.0)


def said(kind: str, prompts: list[list[int]], **changes) -> list[list[int]]:
    """The responses of a model with the rotary frequencies of this kind."""
    how = {"vocab_size": 40, "eos_ids": frozenset(), "max_new_tokens": 8, "batch_size": 4} | changes
    requests = [Request(str(place), "", prompt) for place, prompt in enumerate(prompts)]
    answers = TargetInProcess(model_of(kind), GREEDY, **how).respond(requests, 0, lambda count: None)
    return [answer.response_ids for answer in answers]


@pytest.mark.parametrize("kind", ["phi3", "llama"])
def test_short_and_long_prompts_asked_together_are_answered_as_by_generate(kind):
    prompts = [text_of(length, seed=length) for length in (3, 30, BOUND - 7, BOUND + 1, 6, 20)]
    assert said(kind, prompts) == [list(greedy_of(model_of(kind), prompt, 8)) for prompt in prompts]


@pytest.mark.slow
def test_an_ended_sequence_whose_place_grows_beyond_the_bound_changes_no_other():
    """One prompt of 9 tokens ends when nobody waits; beside seven that began later, its place would grow to 17."""
    eos_ids = frozenset(range(3, 12))
    by_end: dict[tuple[int, int], list[tuple[list[int], list[int]]]] = {}
    for length, seed in ((length, seed) for length in (9, 8, 6) for seed in range(120)):
        prompt = text_of(length, seed=seed)
        tokens = list(greedy_of(model_of("phi3"), prompt, 8))
        end = next((place for place, token in enumerate(tokens) if token in eos_ids), 8)
        by_end.setdefault((length, end), []).append((prompt, tokens[: end + 1]))
    texts = [*by_end[9, 2][:1], *by_end[8, 1][:7], *by_end[6, 8][:7]]
    assert len(texts) == 15
    prompts, expected = zip(*texts, strict=True)
    assert said("phi3", list(prompts), eos_ids=eos_ids, batch_size=8) == list(expected)


def test_a_request_across_the_bound_is_refused_with_one_line():
    assert said("phi3", [text_of(BOUND - 7)])
    complaint = rf"request 1 has {BOUND - 6} prompt tokens and up to 8 new ones.*beyond {BOUND}.*lower"
    with pytest.raises(ValueError, match=complaint) as refusal:
        said("phi3", [text_of(3), text_of(BOUND - 6)])
    assert "\n" not in str(refusal.value)


def test_labels_of_a_response_across_the_bound_are_refused():
    settings = {"sampling": GREEDY, "vocab_size": 40, "batch_size": 4, "chunk_mb": 1, "feature_dtype": torch.float32}
    labeller = Labeller(draft=model_of("phi3", noise=0.05), target=model_of("phi3"), **settings)

    def labelled(num_prompt: int, num_new: int) -> torch.Tensor:
        exchanges = [Exchange("a", "", text_of(num_prompt), text_of(num_new), "length")]
        uniform = {"uniform": torch.full((num_new,), 0.5, dtype=torch.float64)}
        return labeller.label(exchanges, uniform, with_hidden=True, progress=lambda count: None).columns["log_p"]

    assert len(labelled(BOUND - 7, 8)) == len(labelled(BOUND + 1, 8)) == 8
    for lengths in ((BOUND - 7, 9), (BOUND, 2)):
        with pytest.raises(ValueError, match=f"beyond {BOUND} .*lower data.max_prompt_tokens"):
            labelled(*lengths)


def test_a_run_whose_texts_may_cross_the_bound_is_refused_before_any_prompt_is_asked(toy_config, tmp_path):
    shutil.copytree(toy_config.pair.target.path, tmp_path / "target")
    path = tmp_path / "target" / "config.json"
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "original_max_position_embeddings": 64}
    rope = {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4} | factors}
    path.write_text(json.dumps(json.loads(path.read_text()) | rope))
    config = replace(toy_config, pair=replace(toy_config.pair, target=ModelSource(path=str(tmp_path / "target"))))
    complaint = r"max_new_tokens is 70, and LlamaForCausalLM changes .* beyond 64 .*lower either setting"
    with pytest.raises(ValueError, match=complaint) as refusal:
        make(config)
    assert "\n" not in str(refusal.value)
    assert not list(Path(config.data.dir).rglob("*.parquet"))
    make(with_data(config, max_new_tokens=4))  # the remedy, in the same folder
    assert list_shards(config.data.dir, "train")

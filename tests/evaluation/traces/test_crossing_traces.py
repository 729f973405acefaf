"""A trace reads each response at once: texts across a change of rotary frequencies are refused, those on either side
are recorded right.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch

from configs.command import config_of, parser_for
from data_gen.responses.exchange import Exchange
from decode.experiment import Experiment
from evaluation.__main__ import COMMANDS
from evaluation.traces.coupling import Recorder
from evaluation.traces.recording import record_trace, trace_folder
from lm import Sampling, acceptance_rate
from tests.toys.longrope import BOUND, model_of, said_by_generate, text_of

SAMPLING = Sampling(temperature=3.0)


def trace_of(kind: str, prompt: list[int], response: list[int]):
    recorder = Recorder(model_of(kind, noise=0.05), model_of(kind), SAMPLING, 40, frozenset(), 3)
    return record_trace(recorder, [Exchange("a", "", prompt, response, "length")], max_new_tokens=len(response))


@pytest.mark.parametrize("kind", ["phi3", "llama"])
@pytest.mark.parametrize("num_prompt", [4, BOUND + 1, 30])
def test_a_trace_on_one_side_of_the_bound_has_the_laws_of_generate(kind, num_prompt):
    prompt, response = text_of(num_prompt), text_of(10, seed=3)
    p, q = (
        SAMPLING.probs(said_by_generate(model, prompt, response[:-1]))
        for model in (model_of(kind), model_of(kind, noise=0.05))
    )
    recorded = torch.from_numpy(trace_of(kind, prompt, response).acceptance_rate)
    torch.testing.assert_close(recorded, acceptance_rate(q, p).float(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("num_prompt", [BOUND - 10, BOUND])
def test_a_trace_across_the_bound_is_refused_with_one_line(num_prompt):
    with pytest.raises(
        ValueError, match=f"beyond {BOUND} .*lower decode.max_new_tokens or data.max_prompt_tokens"
    ) as refusal:
        trace_of("phi3", text_of(num_prompt), text_of(10))
    assert "\n" not in str(refusal.value)


def test_a_command_whose_texts_may_cross_the_bound_is_refused_before_anything_is_recorded(tmp_path: Path):
    shutil.copytree("checkpoints/tiny/target", tmp_path / "target")
    path = tmp_path / "target" / "config.json"
    config = json.loads(path.read_text())
    num = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"]) // 2
    factors = {"short_factor": [1.0] * num, "long_factor": [4.0] * num, "original_max_position_embeddings": 256}
    path.write_text(json.dumps(config | {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4} | factors}))
    parser = parser_for(COMMANDS["trace"])
    small = ["--decode.num_dev=1", "--decode.num_test=1", "--decode.max_new_tokens=12", "--decode.max_draft_length=3"]
    where = [
        f"--pair.target.path={tmp_path / 'target'}",
        f"--decode.dir={tmp_path / 'run'}",
        f"--heads.dir={tmp_path / 'heads'}",
    ]
    flags = parser.parse_args(["--config", "configs/tiny.yaml", *where, *small, "--data.max_prompt_tokens", "242"])
    with pytest.raises(
        ValueError,
        match=r"decode.max_draft_length is 257, and LlamaForCausalLM changes .* beyond 256 .*one of the three",
    ):
        trace_folder(Experiment(config_of(parser, flags))).complete()
    assert not list((tmp_path / "run").rglob("*.safetensors"))

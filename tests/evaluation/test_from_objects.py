"""`evaluation.evaluate`: from a YAML, and from loaded models, prompts and policies."""

import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from configs.load import load_config, yaml_of
from decode import HeadPolicy, Policy
from decode.policies import Entropy
from evaluation import evaluate
from evaluation.families import BASELINE
from evaluation.from_objects import _decode_settings
from heads import AcceptanceHead

TINY = Path("checkpoints/tiny")
PROMPTS = [f"What is {number} + 2?" for number in range(6)]
FEW = {"max_new_tokens": 8, "max_draft_length": 3, "perfect_head": False, "t_draft_s": 0.001, "t_target_s": 0.005}


@dataclass(frozen=True)
class Unsure(Policy):
    """A custom policy, which a module elsewhere may define."""

    floor: float = 0.5
    grid: ClassVar = {"floor": (0.2, 0.5)}
    signals = frozenset({"max_prob"})

    def after(self, state, signals):
        return state, signals.max_prob < self.floor


@pytest.fixture(scope="module")
def loaded():
    models = {name: AutoModelForCausalLM.from_pretrained(TINY / name) for name in ("target", "draft")}
    return models | {"tokenizer": AutoTokenizer.from_pretrained(TINY / "target")}


def test_loaded_models_prompts_and_policies_make_an_evaluation_that_a_yaml_continues(loaded, tmp_path, capsys):
    torch_head = AcceptanceHead(96, 0, "drawn", True)
    policies = ["token_prob", "entropy:max_sqrt_entropy=0.4", Unsure(), torch_head]
    result = evaluate(**loaded, prompts=PROMPTS, policies=policies, dir=str(tmp_path), **FEW)
    assert capsys.readouterr().out.count("the loaded model is unmodified") == 2
    assert result.contest.num_prompts == 3
    custom = f"{__name__}:Unsure"
    assert {BASELINE, "token_prob", "entropy", custom, "head_drawn", "oracle"} <= result.contest.results.keys()
    entropy = result.contest.results["entropy"]
    assert entropy.competitor.settings == ({"max_sqrt_entropy": 0.4},)
    assert result.verdict["sentence"].startswith("No verdict: 3 test prompts are too few")
    assert not (tmp_path / "decode" / "report.html").exists()
    assert result.compare(Entropy(max_sqrt_entropy=0.4), BASELINE) == result.contest.gain("entropy")
    config = result.experiment._config
    (tmp_path / "experiment.yaml").write_text(yaml_of(config))
    shards = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
    again = evaluate(str(tmp_path / "experiment.yaml"), num_test=2)
    assert again.contest.num_prompts == 2
    assert {path: path.stat().st_mtime_ns for path in shards} == shards, "nothing is recorded again"
    assert evaluate(config).frame().equals(result.frame())


def test_without_a_directory_the_trace_lives_as_long_as_the_result(loaded):
    result = evaluate(
        target=str(TINY / "target"), draft=str(TINY / "draft"), prompts=PROMPTS[:2], policies=["entropy"], **FEW
    )
    directory = result.experiment.directory
    head = AcceptanceHead(96, 0, "drawn", True)
    assert result.compare(HeadPolicy(head, 0.0), "fixed_length:k=1").value == pytest.approx(0, abs=1)
    assert directory.is_dir()
    del result
    assert not directory.parent.exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "give an experiment, or target, draft and prompts"),
        ({"experiment": "tiny", "target": "a", "draft": "b", "prompts": PROMPTS}, "give an experiment, or target"),
        ({"target": "a", "draft": "b"}, "give an experiment, or target, draft and prompts"),
        ({"experiment": "tiny", "policy": "entropy"}, "'policy' is not a setting of evaluate; it takes allow_foreign"),
        ({"experiment": "tiny", "policies": "entropy"}, "policies is 'entropy'; give a list"),
        ({"experiment": "tiny", "policies": [3]}, "policies has 3; an entry is a name"),
        ({"target": f"{TINY}/target", "draft": f"{TINY}/draft", "prompts": ["one", "one"]}, "prompts has 1 different"),
    ],
)
def test_what_is_missing_or_unknown_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        evaluate(**given)


def test_values_of_one_parameter_are_a_grid_and_heads_are_paths(tmp_path):
    base = load_config("tiny").decode
    head = AcceptanceHead(96, 0, "drawn", True)
    policies = ["entropy:max_sqrt_entropy=0.4", Entropy(max_sqrt_entropy=0.6), "auto:some/head", HeadPolicy(head, 0.3)]
    decode = _decode_settings({"policies": policies, "num_test": 7}, base, heads=tmp_path)
    assert decode == replace(
        base,
        num_test=7,
        policies=("entropy", "head"),
        heads=("some/head", str(next(tmp_path.iterdir()))),
        grid={"entropy": {"max_sqrt_entropy": [0.4, 0.6]}, "head": {"max_rejection_prob": [0.3]}},
    )


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("evaluation", {"torch", "transformers", "pandas"}),
        ("evaluation.report.evaluate", {"transformers", "matplotlib", "scipy.optimize"}),
    ],
)
def test_the_import_alone_is_cheap(module, heavy):
    code = f"import sys, {module}; print(sorted({heavy} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"

"""The repository in `docs/transformers.md`, loaded by its name, decodes as `speculative_generate` does."""

import re
from pathlib import Path

import pytest
import torch

from decode import SpeculativeOutput
from decode.policies import FixedLength
from tests.toys.random_pairs import random_pair

PAGE = Path(__file__).parents[3] / "docs/transformers.md"
PROMPT = torch.tensor([[3, 1, 4, 1, 5]])


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The page's two files in a directory, as they would lie on the hub."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "repository"
    (folder / "custom_generate").mkdir(parents=True)
    [code] = [
        code for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "def generate(" in code
    ]
    (folder / "custom_generate/generate.py").write_text(code)
    (folder / "custom_generate/requirements.txt").write_text("acceptance-heads\n")
    return str(folder)


def test_a_repository_writes_what_plain_generate_writes_in_the_rounds_of_its_policy(repository):
    target, draft = random_pair("llama")
    settings = {"do_sample": False, "max_new_tokens": 30, "repetition_penalty": 1.3, "return_dict_in_generate": True}
    output = target.generate(
        PROMPT,
        custom_generate=repository,
        trust_remote_code=True,
        draft_model=draft,
        policy=FixedLength(4),
        **settings,
    )
    assert isinstance(output, SpeculativeOutput)
    assert output.sequences.tolist() == target.generate(PROMPT, **settings).sequences.tolist()
    assert {len(one.drafted) for one in output.generation.rounds[:-1]} == {4}


def test_what_a_repository_cannot_do_is_refused_as_ours_refuses_it(repository):
    target, draft = random_pair("llama")
    settings = {"custom_generate": repository, "trust_remote_code": True, "draft_model": draft, "max_new_tokens": 4}
    with pytest.raises(ValueError, match="does not support a batch of 2"):
        target.generate(PROMPT.repeat(2, 1), **settings)


def test_a_repository_that_nobody_trusts_is_not_run(repository):
    target, draft = random_pair("llama")
    with pytest.raises(ValueError, match="trust_remote_code"):
        target.generate(PROMPT, custom_generate=repository, trust_remote_code=False, draft_model=draft)

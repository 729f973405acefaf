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


def test_a_repository_is_plain_generate_in_the_rounds_of_its_policy_and_refuses_what_ours_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The page's two files in a directory, as they would lie on the hub."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "repository/custom_generate"
    folder.mkdir(parents=True)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    [code] = [code for code in blocks if "def generate(" in code]
    (folder / "generate.py").write_text(code)
    (folder / "requirements.txt").write_text("acceptance-heads\n")
    target, draft = random_pair("llama")
    ours = {"custom_generate": str(folder.parent), "trust_remote_code": True, "draft_model": draft}
    settings = {"do_sample": False, "max_new_tokens": 30, "repetition_penalty": 1.3, "return_dict_in_generate": True}
    output = target.generate(PROMPT, policy=FixedLength(4), **ours, **settings)
    assert isinstance(output, SpeculativeOutput)
    assert output.sequences.tolist() == target.generate(PROMPT, **settings).sequences.tolist()
    assert {len(one.drafted) for one in output.generation.rounds[:-1]} == {4}
    with pytest.raises(ValueError, match="does not support a batch of 2"):
        target.generate(PROMPT.repeat(2, 1), **ours, max_new_tokens=4)
    with pytest.raises(ValueError, match="trust_remote_code"):  # one that nobody trusts is not run
        target.generate(PROMPT, **ours | {"trust_remote_code": False})

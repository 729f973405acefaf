"""Commands on a feature draft: those of chains take it, hierarchies refuse it in one line, and so do settings that it cannot keep."""

import json
from pathlib import Path

import pytest
import torch

from configs.command import run
from configs.schema import ModelSource
from data_gen.prompts.prompt import Prompt
from data_gen.prompts.templates import encode
from decode.__main__ import COMMANDS
from lm import load_model, load_tokenizer

ROOT = Path(__file__, "../../../..").resolve()
TEXT = "Tom has 3 apples."


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    """Where the config's paths start."""
    monkeypatch.chdir(ROOT)


def called(name: str, kind: str, *flags: str) -> None:
    run(COMMANDS, argv=[name, "--config", "configs/tiny.yaml", "--pair.draft.path", f"checkpoints/tiny/{kind}", *flags])


@pytest.mark.parametrize("kind", ["eagle", "glide"])
def test_generate_writes_what_the_target_writes(kind, capsys):
    flags = ["--prompt", TEXT, "--max_new_tokens", "24", "--policy", "entropy:max_sqrt_entropy=0.4", "--json", "true"]
    called("generate", kind, *flags, "--pair.sampling.temperature", "0", "--pair.target.dtype", "float32")
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    source = ModelSource(path="checkpoints/tiny/target", dtype="float32")
    model, ids = load_model(source), encode(Prompt("prompt", (TEXT,)), load_tokenizer(source), "chat")
    expected = model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)[0, len(ids) :].tolist()
    assert document["token_ids"] == expected
    assert document["counts"]["num_accepted"] > 0


def test_bench_runs_the_policies_that_are_named_and_no_schedule_of_transformers(capsys, tmp_path):
    flags = ["--policies", "[fixed_length:k=2, heuristic]", "--num_prompts", "1", "--num_tokens", "4", "--samplings", "[sampled]"]
    times = ["--decode.t_draft_s", "0.01", "--decode.t_target_s", "0.05", "--decode.dir", str(tmp_path), "--heads.dir", str(tmp_path)]
    called("bench", "eagle", *flags, *times)
    (cell,) = json.loads(capsys.readouterr().out.splitlines()[-1])["cells"]
    assert [arm["family"] for arm in cell["arms"]] == ["target_alone", "fixed_length", "heuristic"]


REFUSED = {
    "hierarchy": ("hierarchy", ["--pair.micro.path", "checkpoints/tiny/micro"], "a feature draft"),
    "the loop's parts": ("bench", ["--parts", "[overheads]", "--num_prompts", "1"], "a feature draft"),
    "compiled": ("generate", ["--prompt", TEXT, "--decode.compile", "true"], "runs eagerly"),
    "extra layers": ("generate", ["--prompt", TEXT, "--pair.draft.extra_layers", "2"], "extra_layers"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_feature_draft_cannot_do_is_refused_in_one_line(what, capsys, tmp_path):
    name, flags, message = REFUSED[what]
    with pytest.raises(SystemExit) as stopped:
        called(name, "eagle", *flags, "--decode.dir", str(tmp_path), "--heads.dir", str(tmp_path))
    error = capsys.readouterr().err
    assert stopped.value.code == 2
    assert message in error
    assert "Traceback" not in error


def test_data_for_heads_is_refused_before_anything_is_written(capsys, tmp_path):
    from data_gen.pipeline.command import make

    flags = ["--config", "configs/tiny.yaml", "--pair.draft.path", "checkpoints/tiny/glide", "--data.dir", str(tmp_path / "data")]
    with pytest.raises(SystemExit):
        run({"make": make}, default="make", argv=flags)
    assert "a feature draft" in capsys.readouterr().err
    assert not (tmp_path / "data").exists()

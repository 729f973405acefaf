"""Commands on a feature draft: those of chains take it, hierarchies refuse it in one line, and so do settings that it
cannot keep.
"""

import json
from pathlib import Path

import pytest
import torch
from pytorch_lightning import Trainer
from safetensors.torch import save_file
from transformers import Qwen3Config

from configs.command import run
from configs.schema import ModelSource
from data_gen.pipeline.command import make
from data_gen.prompts.prompt import Prompt
from data_gen.prompts.templates import encode
from decode.__main__ import COMMANDS as GENERATE
from evaluation.__main__ import COMMANDS as MEASURE
from heads.command import export
from heads.training.command import train
from lm import load_model, load_tokenizer
from lm.features.dspark import DSpark

ROOT = Path(__file__, "../../..").resolve()
COMMANDS = {**GENERATE, **MEASURE}
TEXT = "Tom has 3 apples."


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    """Where the config's paths start."""
    monkeypatch.chdir(ROOT)


def called(name: str, kind: str, *flags: str) -> None:
    run(COMMANDS, argv=[name, "--config", "configs/tiny.yaml", "--pair.draft.path", f"checkpoints/tiny/{kind}", *flags])


@pytest.mark.parametrize(
    ("kind", "tree"), [("eagle", "null"), ("glide", "null"), ("eagle", "eagle2"), ("glide", "cape"), ("draft", "cape")]
)
def test_generate_writes_what_the_target_writes(kind, tree, capsys):
    flags = [
        "--prompt",
        TEXT,
        "--max_new_tokens=24",
        "--policy=entropy:max_sqrt_entropy=0.4",
        "--json=true",
        "--tree",
        tree,
    ]
    called("generate", kind, *flags, "--pair.sampling.temperature", "0", "--pair.target.dtype", "float32")
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    source = ModelSource(path="checkpoints/tiny/target", dtype="float32")
    model, ids = load_model(source), encode(Prompt("prompt", (TEXT,)), load_tokenizer(source), "chat")
    expected = model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)[0, len(ids) :].tolist()
    assert document["token_ids"] == expected
    assert document["counts"]["num_accepted"] > 0


def blocks(directory: Path) -> Path:
    """A directory of DeepSpec's layout for the embedded target, of random weights."""
    own = json.loads((ROOT / "checkpoints/tiny/target/config.json").read_text())
    sizes = {name: own[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")}
    keys = {"block_size": 4, "target_layer_ids": [-1, 3], "num_target_layers": own["num_hidden_layers"]}
    keys |= {"mask_token_id": 0, "markov_rank": 8, "markov_head_type": "rnn", "num_hidden_layers": 2}
    keys |= {"enable_confidence_head": True, "confidence_head_with_markov": True, "head_dim": 16}
    config = Qwen3Config(**sizes, **keys, num_key_value_heads=2, architectures=["Qwen3DSparkModel"])
    directory.mkdir()
    (directory / "config.json").write_text(config.to_json_string())
    torch.manual_seed(0)
    save_file(DSpark(config).state_dict(), directory / "model.safetensors")
    return directory


def test_blocks_write_what_the_target_writes_and_are_no_trees(capsys, tmp_path):
    flags = ["--prompt", TEXT, "--max_new_tokens", "16", "--json", "true", "--policy", "dspark:min_confidence=0.3"]
    flags += ["--pair.draft.path", str(blocks(tmp_path / "blocks")), "--pair.draft.dtype", "float32"]
    flags += ["--pair.sampling.temperature", "0", "--pair.target.dtype", "float32"]
    called("generate", "eagle", *flags)
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    called("generate", "eagle", *flags, "--pair.draft.path", "checkpoints/tiny/eagle", "--policy", "fixed_length:k=0")
    alone = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["token_ids"] == alone["token_ids"]
    counts = document["counts"]
    assert 0 < counts["num_draft_forwards"] < counts["num_drafted"]
    with pytest.raises(SystemExit):
        called("generate", "eagle", *flags, "--tree", "eagle2")
    assert "which is a chain" in capsys.readouterr().err


@pytest.mark.slow
def test_a_length_head_competes_on_a_trace_of_blocks_and_is_no_policy_that_can_run(capsys, tmp_path):
    flags = ["--decode.dir", str(tmp_path), "--decode.max_new_tokens=24", "--pair.draft.dtype=float32", "--json=true"]
    flags += ["--decode.num_dev=4", "--decode.num_test=4", "--decode.policies=[fixed_length]", "--decode.ratios=[]"]
    called("evaluate", "dspark", *flags, "--decode.t_draft_s=0.001", "--decode.t_target_s=0.005")
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {"fixed_length", "length_head", "oracle"} <= {row["family"] for row in document["results"]}
    assert "fixed_length" in document["verdict"]["policy"]


def test_bench_runs_the_policies_that_are_named_and_no_schedule_of_transformers(capsys, tmp_path):
    flags = ["--policies=[fixed_length:k=2, heuristic]", "--num_prompts=1", "--num_tokens=4", "--samplings=[sampled]"]
    times = [
        "--decode.t_draft_s=0.01",
        "--decode.t_target_s=0.05",
        f"--decode.dir={tmp_path}",
        f"--heads.dir={tmp_path}",
    ]
    called("bench", "eagle", *flags, *times, "--json", "true")
    (cell,) = json.loads(capsys.readouterr().out)["cells"]
    families = ["target_alone", "fixed_length", "heuristic", "transformers: no assistant"]
    assert [arm["family"] for arm in cell["arms"]] == families


REFUSED = {
    "hierarchy": ("hierarchy", ["--pair.micro.path", "checkpoints/tiny/micro"], "a feature draft"),
    "an assistant that is not there": (
        "bench",
        ["--race.assistant", "no/such/model", "--num_prompts", "1"],
        "no model with safetensors weights at 'no/such/model'",
    ),
    "a tree of GliDe's": (
        "generate",
        ["--prompt", TEXT, "--pair.draft.path", "checkpoints/tiny/glide", "--tree", "eagle2"],
        "use CaPE's tree",
    ),
    "compiled trees": (
        "generate",
        ["--prompt", TEXT, "--decode.compile", "stop", "--tree", "eagle2"],
        "drafted eagerly",
    ),
    "compiled": ("generate", ["--prompt", TEXT, "--decode.compile", "stop"], "runs eagerly"),
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
    assert not any(tmp_path.iterdir()), "refused before anything is measured"


def test_data_that_a_feature_draft_cannot_make_is_refused_before_anything_is_written(capsys, tmp_path):
    flags = [
        "--config=configs/tiny.yaml",
        "--pair.draft.path=checkpoints/tiny/glide",
        f"--data.dir={tmp_path / 'data'}",
    ]
    with pytest.raises(SystemExit):
        run({"make": make}, default="make", argv=[*flags, "--data.mode", "sequential"])
    assert "a feature draft" in capsys.readouterr().err
    assert not (tmp_path / "data").exists()


@pytest.mark.slow
def test_heads_of_a_feature_draft_from_data_to_a_generation(capsys, tmp_path):
    small = [
        *("--data.num_train", "4"),
        *("--data.num_dev", "2"),
        *("--data.num_test", "2"),
        *("--data.max_new_tokens", "24"),
    ]
    places = [
        *("--data.dir", str(tmp_path / "data")),
        *("--heads.dir", str(tmp_path / "run")),
        *("--decode.dir", str(tmp_path / "decode")),
    ]
    flags = ["--config", "configs/tiny.yaml", "--pair.draft.path", "checkpoints/tiny/eagle", *small, *places]
    run({"make": make}, default="make", argv=flags)
    written = {path: path.read_bytes() for path in sorted((tmp_path / "data").rglob("*.safetensors"))}
    for path in written:
        path.unlink()
    run({"make": make}, default="make", argv=flags)
    assert {path: path.read_bytes() for path in written} == written
    sweep = [
        *("--heads.depths", "[0]"),
        *("--heads.reject_weights", "[1]"),
        *("--heads.timings", "[fed, drawn, candidate]"),
    ]
    sweep += [*("--heads.embeddings", "[true]"), *("--heads.specdec", "false")]
    run(
        {"train": train},
        default="train",
        argv=[*flags, *sweep, "--trainer.max_epochs", "1", "--trainer.accelerator", "cpu"],
        trainer=Trainer,
    )
    run({"export": export}, default="export", argv=[*flags, *sweep, "--force", "true"])
    exported = sorted((tmp_path / "run" / "exported").iterdir())
    heads = [json.loads((path / "config.json").read_text()) for path in exported]
    assert [(head["timing"], head["draft"]["name"], head["mixing_ratio"]) for head in heads] == [
        ("candidate", "eagle", None),
        ("drawn", "eagle", None),
        ("fed", "eagle", None),
    ]
    capsys.readouterr()
    for path, tree in ((exported[1], "null"), (exported[0], "eagle2")):
        policy = f"head:{path},max_rejection_prob=0.4"
        asked = ["--prompt", TEXT, "--max_new_tokens", "16", "--policy", policy, "--json", "true", "--tree", tree]
        run(COMMANDS, argv=["generate", *flags, *asked])
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["counts"]["num_drafted"] > 0
    with pytest.raises(SystemExit):
        run(COMMANDS, argv=["tune", *flags, "--decode.heads", f"[{exported[0]}]"])
    assert "candidate heads, which stop trees" in capsys.readouterr().err

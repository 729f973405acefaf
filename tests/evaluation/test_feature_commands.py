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
from heads.command import export
from heads.training.command import train
from lm import load_model, load_tokenizer
from lm.features.dspark import DSpark
from tests.evaluation.commands import ROOT, printed, refusal, spelt

TEXT = "Tom has 3 apples."


def of(kind: str, *flags: str) -> list[str]:
    return ["--config=configs/tiny.yaml", f"--pair.draft.path=checkpoints/tiny/{kind}", *flags]


@pytest.mark.parametrize(
    ("kind", "tree"), [("eagle", "null"), ("glide", "null"), ("eagle", "eagle2"), ("glide", "cape"), ("draft", "cape")]
)
def test_generate_writes_what_the_target_writes(kind, tree, capsys):
    flags = ["--prompt", TEXT, "--max_new_tokens=24", "--policy=entropy:max_sqrt_entropy=0.4", "--tree", tree]
    flags += ["--pair.sampling.temperature=0", "--pair.target.dtype=float32"]
    _, document = printed(capsys, "generate", *of(kind, *flags))
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
    flags = ["--prompt", TEXT, "--max_new_tokens=16", "--policy=dspark:min_confidence=0.3"]
    flags += [f"--pair.draft.path={blocks(tmp_path / 'blocks')}", "--pair.draft.dtype=float32"]
    flags += ["--pair.sampling.temperature=0", "--pair.target.dtype=float32"]
    argv = ["generate", *of("eagle", *flags)]
    _, document = printed(capsys, *argv)
    _, alone = printed(capsys, *argv, "--pair.draft.path=checkpoints/tiny/eagle", "--policy=fixed_length:k=0")
    assert document["token_ids"] == alone["token_ids"]
    assert 0 < document["counts"]["num_draft_forwards"] < document["counts"]["num_drafted"]
    assert "which is a chain" in refusal(capsys, *argv, "--tree", "eagle2")


@pytest.mark.slow
def test_a_length_head_competes_on_a_trace_of_blocks_and_is_no_policy_that_can_run(capsys, tmp_path):
    flags = {"dir": tmp_path, "max_new_tokens": 24, "num_dev": 4, "num_test": 4, "policies": "[fixed_length]"}
    flags |= {"ratios": "[]", "t_draft_s": 0.001, "t_target_s": 0.005}
    decode = spelt({f"decode.{name}": value for name, value in flags.items()})
    _, document = printed(capsys, "evaluate", *of("dspark", *decode, "--pair.draft.dtype=float32"))
    assert {"fixed_length", "length_head", "oracle"} <= {row["family"] for row in document["results"]}
    assert "fixed_length" in document["verdict"]["policy"]


def test_bench_runs_the_policies_that_are_named_and_no_schedule_of_transformers(capsys, tmp_path):
    flags = ["--policies=[fixed_length:k=2, heuristic]", "--num_prompts=1", "--num_tokens=4", "--samplings=[sampled]"]
    flags += ["--decode.t_draft_s=0.01", "--decode.t_target_s=0.05", f"--decode.dir={tmp_path}"]
    _, document = printed(capsys, "bench", *of("eagle", *flags, f"--heads.dir={tmp_path}"))
    (cell,) = document["cells"]
    families = ["target_alone", "fixed_length", "heuristic", "transformers: no assistant"]
    assert [arm["family"] for arm in cell["arms"]] == families


ASKED, TREE = ["--prompt", TEXT], "--tree=eagle2"
NO_MODEL = "no model with safetensors weights at 'no/such/model'"
REFUSED = {
    "hierarchy": (["--pair.micro.path=checkpoints/tiny/micro"], "a feature draft"),
    "bench": (["--race.assistant=no/such/model", "--num_prompts=1"], NO_MODEL),
    "generate GliDe's tree": ([*ASKED, "--pair.draft.path=checkpoints/tiny/glide", TREE], "use CaPE's tree"),
    "generate compiled trees": ([*ASKED, "--decode.compile=stop", TREE], "drafted eagerly"),
    "generate compiled": ([*ASKED, "--decode.compile=stop"], "runs eagerly"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_feature_draft_cannot_do_is_refused_in_one_line(what, capsys, tmp_path):
    flags, message = REFUSED[what]
    folders = [f"--decode.dir={tmp_path}", f"--heads.dir={tmp_path}"]
    assert message in refusal(capsys, what.partition(" ")[0], *of("eagle", *flags, *folders))
    assert not any(tmp_path.iterdir()), "refused before anything is measured"


def test_data_that_a_feature_draft_cannot_make_is_refused_before_anything_is_written(capsys, tmp_path):
    flags = of("glide", f"--data.dir={tmp_path / 'data'}", "--data.mode", "sequential")
    with pytest.raises(SystemExit):
        run({"make": make}, default="make", argv=flags)
    assert "a feature draft" in capsys.readouterr().err
    assert not (tmp_path / "data").exists()


@pytest.mark.slow
def test_heads_of_a_feature_draft_from_data_to_a_generation(capsys, tmp_path):
    small = {"data.num_train": 4, "data.num_dev": 2, "data.num_test": 2, "data.max_new_tokens": 24}
    folders = {"data.dir": tmp_path / "data", "heads.dir": tmp_path / "run", "decode.dir": tmp_path / "decode"}
    flags = of("eagle", *spelt(small | folders))
    run({"make": make}, default="make", argv=flags)
    written = {path: path.read_bytes() for path in sorted((tmp_path / "data").rglob("*.safetensors"))}
    for path in written:
        path.unlink()
    run({"make": make}, default="make", argv=flags)
    assert {path: path.read_bytes() for path in written} == written
    sweep = {"depths": "[0]", "reject_weights": "[1]", "timings": "[fed, drawn, candidate]", "embeddings": "[true]"}
    heads = [*flags, *spelt({f"heads.{name}": value for name, value in (sweep | {"specdec": "false"}).items()})]
    trainer = ["--trainer.max_epochs=1", "--trainer.accelerator=cpu"]
    run({"train": train}, default="train", argv=[*heads, *trainer], trainer=Trainer)
    run({"export": export}, default="export", argv=[*heads, "--force", "true"])
    exported = sorted((tmp_path / "run" / "exported").iterdir())
    configs = [json.loads((path / "config.json").read_text()) for path in exported]
    facts = [(config["timing"], config["draft"]["name"], config["mixing_ratio"]) for config in configs]
    assert facts == [("candidate", "eagle", None), ("drawn", "eagle", None), ("fed", "eagle", None)]
    for path, tree in ((exported[1], "null"), (exported[0], "eagle2")):
        own = ["--prompt", TEXT, "--max_new_tokens=16", f"--policy=head:{path},max_rejection_prob=0.4", "--tree", tree]
        assert printed(capsys, "generate", *flags, *own)[1]["counts"]["num_drafted"] > 0
    problem = refusal(capsys, "tune", *flags, "--decode.heads", f"[{exported[0]}]")
    assert "candidate heads, which stop trees" in problem

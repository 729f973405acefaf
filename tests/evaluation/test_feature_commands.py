"""Commands on a feature draft: those of chains take it, hierarchies refuse it in one line, and so do settings that it
cannot keep.
"""

import json

import pytest
import torch
from pytorch_lightning import Trainer

from configs.command import run
from configs.schema import ModelSource
from data_gen.pipeline.command import make
from data_gen.prompts.prompt import Prompt
from data_gen.prompts.templates import encode
from heads.command import export
from heads.training.command import train
from lm.pair import load_model, load_tokenizer
from tests.evaluation.commands import printed, refusal, spelt

TEXT = "Tom has 3 apples."


def of(kind: str, *flags: str) -> list[str]:
    return ["--config=configs/tiny.yaml", f"--pair.draft.path=checkpoints/tiny/{kind}", *flags]


CHAINS = [(kind, "null") for kind in ("eagle", "glide", "dspark")]
TREES = [("eagle", "eagle2"), ("glide", "cape"), ("draft", "cape")]


@pytest.mark.parametrize(("kind", "tree"), CHAINS + TREES)
def test_generate_writes_what_the_target_writes(kind, tree, capsys):
    flags = ["--prompt", TEXT, "--max_new_tokens=24", "--policy=entropy:max_sqrt_entropy=0.4", "--tree", tree]
    flags += ["--pair.sampling.temperature=0", "--pair.target.dtype=float32", "--pair.draft.dtype=float32"]
    _, document = printed(capsys, "generate", *of(kind, *flags))
    source = ModelSource(path="checkpoints/tiny/target", dtype="float32")
    model, ids = load_model(source), encode(Prompt("prompt", (TEXT,)), load_tokenizer(source), "chat")
    expected = model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)[0, len(ids) :].tolist()
    assert document["token_ids"] == expected
    assert document["counts"]["num_accepted"] > 0


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
    "data": (["--pair.draft.path=checkpoints/tiny/glide", "--data.mode=sequential"], "a feature draft"),
    "bench": (["--race.assistant=no/such/model", "--num_prompts=1"], NO_MODEL),
    "generate a block's tree": ([*ASKED, "--pair.draft.path=checkpoints/tiny/dspark", TREE], "which is a chain"),
    "generate GliDe's tree": ([*ASKED, "--pair.draft.path=checkpoints/tiny/glide", TREE], "use CaPE's tree"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_feature_draft_cannot_do_is_refused_in_one_line(what, capsys, tmp_path):
    flags, message = REFUSED[what]
    folders = [f"--{name}.dir={tmp_path}" for name in ("data", "decode", "heads")]
    assert message in refusal(capsys, what.partition(" ")[0], *of("eagle", *flags, *folders))
    assert not any(tmp_path.iterdir()), "refused before anything is measured"


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
    exported = sorted(path.parent for path in (tmp_path / "run" / "exported").glob("*/config.json"))
    configs = [json.loads((path / "config.json").read_text()) for path in exported]
    facts = [(config["timing"], config["draft"]["name"], config["mixing_ratio"]) for config in configs]
    assert facts == [("candidate", "eagle", None), ("drawn", "eagle", None), ("fed", "eagle", None)]
    for path, tree in ((exported[1], "null"), (exported[0], "eagle2")):
        own = ["--prompt", TEXT, "--max_new_tokens=16", f"--policy=head:{path},max_rejection_prob=0.4", "--tree", tree]
        assert printed(capsys, "generate", *flags, *own)[1]["counts"]["num_drafted"] > 0
    problem = refusal(capsys, "tune", *flags, "--decode.heads", f"[{exported[0]}]")
    assert "candidate heads, which stop trees" in problem

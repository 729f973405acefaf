"""What a config names is settled in one place: heads apart by name, each checked at every entrance, one way to
override.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from data_gen.prompts.prompt import say_once
from data_gen.prompts.sets import load_prompts
from decode.experiment import Experiment, names_apart
from heads import AcceptanceHead
from heads.model.head import Provenance
from tests.evaluation.commands import called, config_with, refusal, spelt

FOREIGN = {"path": "somewhere/else", "name": "else", "weights": "0" * 64}
COLD = {"temperature": 0.25, "top_k": None, "top_p": None}
SMALL = {"num_dev": 1, "num_test": 1, "max_new_tokens": 8, "max_draft_length": 4, "t_draft_s": 0.01, "t_target_s": 0.05}


def saved(path: Path, *, depth: int = 0, **provenance) -> str:
    AcceptanceHead(96, depth, "drawn", provenance=Provenance(**provenance)).save_pretrained(path)
    return str(path)


def flags(directory: Path, *heads: str, **decode: object) -> list[str]:
    decode = SMALL | {"dir": directory / "decode", "heads": json.dumps(heads)} | decode
    settings = {f"decode.{name}": value for name, value in decode.items()}
    return ["--config=configs/tiny.yaml", f"--heads.dir={directory / 'heads'}", *spelt(settings)]


def experiment(directory: Path, *heads: str, **decode: object) -> Experiment:
    return Experiment(config_with(flags(directory, *heads, **decode), "evaluate"))


ENTRANCES = {
    "generate": ["--prompt", "Hello", "--policy", "head"],
    **{name: [] for name in ("evaluate", "tune", "bench", "costs")},
    "replay": ["--policy", "head"],
    "tables": ["--paper", "specdec++"],
    "trace": ["--decode.trace_hidden", "false"],
    "hierarchy": ["--level_heads", '["{head}", "{head}"]'],
}


@pytest.mark.parametrize(
    "own",
    [
        {"ratios": "[5, -1]"},
        {"t_target_s": "null"},
        {"stop_share": -1, "t_draft_s": "null", "t_target_s": "null"},
        {"grid": '{"entropy": {"scale": []}}'},
    ],
)
def test_what_an_evaluation_cannot_use_is_refused_before_it_records(own, tmp_path, capsys):
    with pytest.raises(SystemExit):
        called("evaluate", *flags(tmp_path, **own))
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert not (tmp_path / "decode" / "trace").exists()
    assert not (tmp_path / "decode" / "costs.jsonl").exists()


@pytest.mark.parametrize("name", ENTRANCES)
def test_a_foreign_head_is_refused_at_every_entrance_before_anything_is_written(name, tmp_path, capsys):
    for what, other, named in (
        ("draft", FOREIGN, ("somewhere/else", "checkpoints/tiny")),
        ("target", FOREIGN, ("somewhere/else", "checkpoints/tiny")),
        ("sampling", COLD, ("0.25", "1.0")),
    ):
        path = saved(tmp_path / what, **{what: other})
        own = [flag.replace("{head}", path) for flag in ENTRANCES[name]]
        problem = refusal(capsys, name, *flags(tmp_path, path), *own)
        assert problem.startswith("error: the head ")
        assert all(part in problem for part in ("allow_foreign_heads", *named)), what
        assert not (tmp_path / "decode").exists()


def test_one_setting_lets_foreign_heads_in(tmp_path, capsys):
    path = saved(tmp_path / "head", draft=FOREIGN, target=FOREIGN, sampling=COLD)
    called("generate", *flags(tmp_path, path, allow_foreign_heads="true"), *ENTRANCES["generate"], "--json=true")
    assert json.loads(capsys.readouterr().out)["policy"] == "head"


def test_two_heads_of_one_name_are_told_apart_by_names_as_short_as_they_can_be(tmp_path):
    first, second = saved(tmp_path / "a" / "best"), saved(tmp_path / "b" / "best", depth=2)
    settled = experiment(tmp_path, first, second)
    assert {name: head.depth for name, head in settled.heads.items()} == {"a/best": 0, "b/best": 2}
    assert settled.head_paths == {"a/best": first, "b/best": second}
    for paths, names in (
        ((), []),
        (("runs/a/best", "runs/b/worst"), ["best", "worst"]),
        (("a/best", "b/best", "b/other"), ["a/best", "b/best", "other"]),
        (("a/x/best", "b/x/best"), ["a/x/best", "b/x/best"]),
        (("x/best", "a/x/best", "best"), ["x/best", "a/x/best", "best"]),
        (("a/best", "a/best"), ["best"]),
    ):
        assert names_apart(paths) == names


def test_a_set_that_no_head_saw_is_halved_whole_and_the_training_set_keeps_its_splits(tmp_path):
    file = tmp_path / "foreign.jsonl"
    file.write_text("".join(json.dumps({"id": i, "prompt": f"Prompt {i}"}) + "\n" for i in range(7)))
    sets = {"datasets": json.dumps(["stories", str(file)]), "num_dev": 50}
    settled = experiment(tmp_path, **sets, num_test=2)
    dev, test = (settled.prompts("foreign", split) for split in ("dev", "test"))
    assert (len(dev), len(test)) == (3, 2)
    assert not {prompt.id for prompt in dev} & {prompt.id for prompt in test}
    assert len(settled.prompts("stories", "dev")) == 50
    settled = experiment(tmp_path, **sets, num_test=5, transfer_weights="[2, 5]")
    assert [len(settled.prompts("foreign", split)) for split in ("dev", "test")] == [2, 5]


def test_prompts_of_the_training_data_are_left_out_of_a_transfer_set(tmp_path, capsys):
    """Of 60 prompts 30 train heads and 10 choose them; the other set has ten of each, and twenty new ones."""
    trained = tmp_path / "trained.jsonl"
    trained.write_text("".join(json.dumps({"prompt": f"Prompt {i}"}) + "\n" for i in range(60)))
    mixed = tmp_path / "mixed.jsonl"
    sizes = spelt({"data.prompts": str(trained), "data.num_train": 30, "data.num_dev": 10, "data.num_test": 20})
    every = flags(tmp_path, datasets=json.dumps([str(trained), str(mixed)]), num_dev=9, num_test=9)
    settled = Experiment(config_with([*every, *sizes], "evaluate"))
    known = [*load_prompts(settled.data, "train")[:10], *load_prompts(settled.data, "dev")]
    texts = [prompt.turns[0] for prompt in known]
    new = [f"New {i}" for i in range(20)]
    mixed.write_text("".join(json.dumps({"id": text, "text": text}) + "\n" for text in [*texts, *new]))
    say_once.cache_clear()
    chosen = [prompt.turns[0] for split in ("dev", "test") for prompt in settled.prompts("mixed", split)]
    assert set(chosen) <= set(new)
    assert len(chosen) == 18
    lines = [line for line in capsys.readouterr().err.splitlines() if "are also in the training data" in line]
    assert sum(int(line.split(": ")[1].split()[0]) for line in lines) == 20
    mixed.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    with pytest.raises(ValueError, match=r"all \d+ dev prompts of .*mixed\.jsonl .* are also in the training data"):
        settled.prompts("mixed", "dev")


def test_every_set_of_several_to_train_on_is_a_training_set_and_keeps_its_splits(tmp_path):
    files = {name: tmp_path / f"{name}.jsonl" for name in ("one", "two", "foreign")}
    for file in files.values():
        file.write_text("".join(json.dumps({"id": i, "question_": f"Prompt {i}"}) + "\n" for i in range(40)))
    sets = [{"path": str(files[name]), "columns": {"prompt": "question_"}, "weight": 2} for name in ("one", "two")]
    where = spelt({"data.prompts": json.dumps(sets), "data.split_weights": "[2, 1, 1]"})
    every = flags(tmp_path, datasets=json.dumps([str(file) for file in files.values()]), num_test=2)
    settled = Experiment(config_with([*every, *where], "evaluate"))
    assert [settled.is_training_set(name) for name in settled.datasets] == [True, True, False]
    train = set(load_prompts(replace(settled.data, num_train=15, prompts=settled.training_sets["two"]), "train"))
    assert len(train) == 15
    assert len(settled.prompts("two", "test")) == 2
    assert not train & set(settled.prompts("two", "test"))

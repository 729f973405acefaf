"""What a config names is settled in one place: heads apart by name, each checked at every entrance, one way to
override.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from configs.command import config_of, parser_for, run
from data_gen.prompts.sets import load_prompts
from decode.__main__ import COMMANDS as GENERATE
from decode.experiment import Experiment, names_apart
from evaluation.__main__ import COMMANDS as MEASURE
from heads import AcceptanceHead
from heads.model.provenance import Provenance

COMMANDS = {**GENERATE, **MEASURE}
ROOT = Path(__file__, "../../..").resolve()
FOREIGN = {"path": "somewhere/else", "name": "else", "weights": "0" * 64}
SMALL = ["--decode.num_dev=1", "--decode.num_test=1", "--decode.max_new_tokens=8", "--decode.max_draft_length=4"]
TIMES = ["--decode.t_draft_s", "0.01", "--decode.t_target_s", "0.05"]


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    """Where the config's paths start."""
    monkeypatch.chdir(ROOT)


def saved(path: Path, *, depth: int = 0, **provenance) -> str:
    AcceptanceHead(96, depth, "drawn", provenance=Provenance(**provenance)).save_pretrained(path)
    return str(path)


def flags(directory: Path, *heads: str) -> list[str]:
    where = ["--decode.dir", str(directory / "decode"), "--heads.dir", str(directory / "heads")]
    return ["--config", "configs/tiny.yaml", *where, "--decode.heads", json.dumps(heads), *SMALL, *TIMES]


def experiment(directory: Path, *heads: str) -> Experiment:
    parser = parser_for(COMMANDS["evaluate"])
    return Experiment(config_of(parser, parser.parse_args(flags(directory, *heads))))


ENTRANCES = {
    "generate": ["--prompt", "Hello", "--policy", "head"],
    "evaluate": [],
    "tune": [],
    "replay": ["--policy", "head"],
    "bench": [],
    "costs": [],
    "tables": ["--paper", "specdec++"],
    "trace": ["--decode.trace_hidden", "false"],
}


@pytest.mark.parametrize(
    "own",
    [
        ["--decode.ratios", "[5, -1]"],
        ["--decode.t_target_s", "null"],
        ["--decode.stop_share=-1", "--decode.t_draft_s", "null", "--decode.t_target_s", "null"],
        ["--decode.grid", '{"entropy": {"scale": []}}'],
    ],
)
def test_what_an_evaluation_cannot_use_is_refused_before_it_records(own, tmp_path, capsys):
    with pytest.raises(SystemExit):
        run(COMMANDS, argv=["evaluate", *flags(tmp_path), *own])
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert not (tmp_path / "decode" / "trace").exists()
    assert not (tmp_path / "decode" / "costs.jsonl").exists()


@pytest.mark.parametrize("name", [*ENTRANCES, "hierarchy"])
@pytest.mark.parametrize("what", ["draft", "target", "sampling"])
def test_a_foreign_head_is_refused_at_every_entrance_before_anything_is_written(name, what, tmp_path, capsys):
    other = {"sampling": {"temperature": 0.25, "top_k": None, "top_p": None}}.get(what, FOREIGN)
    path = saved(tmp_path / "head", **{what: other})
    own = ENTRANCES[name] if name in ENTRANCES else ["--level_heads", json.dumps([path, path])]
    with pytest.raises(SystemExit) as stopped:
        run(COMMANDS, argv=[name, *flags(tmp_path, path), *own])
    problem = capsys.readouterr().err.splitlines()[-1]
    assert stopped.value.code == 2
    assert problem.startswith("error: the head ")
    assert "allow_foreign_heads" in problem
    assert (
        ("0.25" in problem and "1.0" in problem)
        if what == "sampling"
        else ("somewhere/else" in problem and "checkpoints/tiny" in problem)
    )
    assert not (tmp_path / "decode").exists()


def test_one_setting_lets_foreign_heads_in(tmp_path, capsys):
    path = saved(
        tmp_path / "head", draft=FOREIGN, target=FOREIGN, sampling={"temperature": 0.25, "top_k": None, "top_p": None}
    )
    argv = [
        "generate",
        *flags(tmp_path, path),
        *ENTRANCES["generate"],
        "--decode.allow_foreign_heads=true",
        "--json=true",
    ]
    run(COMMANDS, argv=argv)
    assert json.loads(capsys.readouterr().out)["policy"] == "head"


def test_two_heads_of_one_name_are_told_apart(tmp_path):
    first, second = saved(tmp_path / "a" / "best"), saved(tmp_path / "b" / "best", depth=2)
    settled = experiment(tmp_path, first, second)
    assert {name: head.depth for name, head in settled.heads.items()} == {"a/best": 0, "b/best": 2}
    assert settled.head_paths == {"a/best": first, "b/best": second}


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        ((), []),
        (("runs/a/best", "runs/b/worst"), ["best", "worst"]),
        (("a/best", "b/best", "b/other"), ["a/best", "b/best", "other"]),
        (("a/x/best", "b/x/best"), ["a/x/best", "b/x/best"]),
        (("x/best", "a/x/best", "best"), ["x/best", "a/x/best", "best"]),
        (("a/best", "a/best"), ["best"]),
    ],
)
def test_names_are_as_short_as_they_can_be_and_different(paths, names):
    assert names_apart(paths) == names


def test_a_set_that_no_head_saw_is_halved_whole_and_the_training_set_keeps_its_splits(tmp_path):
    file = tmp_path / "foreign.jsonl"
    file.write_text("".join(json.dumps({"id": i, "prompt": f"Prompt {i}"}) + "\n" for i in range(7)))
    parser = parser_for(COMMANDS["evaluate"])
    where = ["--decode.datasets", json.dumps(["stories", str(file)]), "--decode.num_dev=50", "--decode.num_test=2"]
    settled = Experiment(config_of(parser, parser.parse_args([*flags(tmp_path), *where])))
    dev, test = (settled.prompts("foreign", split) for split in ("dev", "test"))
    assert (len(dev), len(test)) == (3, 2)
    assert not {prompt.id for prompt in dev} & {prompt.id for prompt in test}
    assert len(settled.prompts("stories", "dev")) == 50
    where[-1], few = "--decode.num_test=5", ["--decode.transfer_weights", "[2, 5]"]
    settled = Experiment(config_of(parser, parser.parse_args([*flags(tmp_path), *where, *few])))
    assert [len(settled.prompts("foreign", split)) for split in ("dev", "test")] == [2, 5]


def test_every_set_of_several_to_train_on_is_a_training_set_and_keeps_its_splits(tmp_path):
    files = {name: tmp_path / f"{name}.jsonl" for name in ("one", "two", "foreign")}
    for file in files.values():
        file.write_text("".join(json.dumps({"id": i, "question_": f"Prompt {i}"}) + "\n" for i in range(40)))
    sets = [{"path": str(files[name]), "columns": {"prompt": "question_"}, "weight": 2} for name in ("one", "two")]
    parser = parser_for(COMMANDS["evaluate"])
    where = [
        "--data.prompts",
        json.dumps(sets),
        "--data.split_weights=[2, 1, 1]",
        "--decode.num_dev=1",
        "--decode.num_test=2",
    ]
    every = ["--decode.datasets", json.dumps([str(file) for file in files.values()])]
    settled = Experiment(config_of(parser, parser.parse_args([*flags(tmp_path), *where, *every])))
    assert [settled.is_training_set(name) for name in settled.datasets] == [True, True, False]
    train = set(load_prompts(replace(settled.data, num_train=15, prompts=settled.training_sets["two"]), "train"))
    assert len(train) == 15
    assert len(settled.prompts("two", "test")) == 2
    assert not train & set(settled.prompts("two", "test"))

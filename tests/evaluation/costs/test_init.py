"""`init`: a YAML that runs as it is, of as many prompts as there are, and never over a file that is there."""

import json
import shlex
import shutil
from pathlib import Path

import pytest

from configs.schema import Config
from data_gen.pipeline.stages import settled
from data_gen.pipeline.worker import check_lengths
from decode.experiment import Experiment
from evaluation.costs.init import init, plan
from tests.evaluation.commands import ROOT, config_with

PAIR = {name: str(ROOT / "checkpoints" / "tiny" / name) for name in ("target", "draft")}


@pytest.fixture(autouse=True)
def in_an_empty_folder_without_a_sample(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("evaluation.costs.init._SAMPLE", 0)  # nothing is timed


def prompts(count: int, field: str = "prompt") -> str:
    lines = [json.dumps({field: f"How many is {n} and 2?"}) for n in range(count)]
    Path("prompts.jsonl").write_text("\n".join(lines) + "\n")
    return "prompts.jsonl"


def parsed(path: Path) -> Config:
    return config_with(["--config", str(path)])


def test_the_yaml_parses_and_splits_what_is_there(capsys):
    path = init(**PAIR, prompts=prompts(200), temperature=0.7, top_p=0.9, out="mine.yaml")
    lines = path.read_text().splitlines()
    assert sum(not line.startswith("#") for line in lines) <= 10
    comments = [line.removeprefix("#").strip() for line in lines if line.startswith("#")]
    assert any(line.startswith("response tokens") for line in comments)
    assert any(line.startswith("evaluate: measures this machine once") for line in comments)
    assert capsys.readouterr().out.endswith("wrote mine.yaml; next: acceptance-heads all --config mine.yaml\n")
    config = parsed(path)
    assert (config.pair.sampling.temperature, config.pair.sampling.top_p) == (0.7, 0.9)
    assert (config.data.dir, config.heads.dir) == ("data/mine", "checkpoints/runs/mine")
    data = settled(config.data)
    assert (data.num_train, data.num_dev, data.num_test) == (160, 20, 20)
    assert config.decode.num_dev <= data.num_dev
    assert config.decode.num_test <= data.num_test


@pytest.mark.parametrize(
    "name", ["run, two", "exp #1", "v{2}", "a: b", "[x]", "it's", "1", "null", "- a", "*b", "\xe9"]
)
def test_a_yaml_of_any_name_is_read_as_it_was_meant(name, capsys):
    path = init(**PAIR, prompts=prompts(20), out=f"{name}.yaml")
    config = parsed(path)
    assert (config.data.dir, config.decode.dir) == (f"data/{name}", f"data/{name}/decode")
    assert config.heads.dir == f"checkpoints/runs/{name}"
    shown = capsys.readouterr().out
    command = shown.rsplit("next: ", 1)[1].strip()
    assert shlex.split(command) == ["acceptance-heads", "all", "--config", f"{name}.yaml"]
    assert "one prompt as the models read it" in shown


def test_texts_fit_the_positions_of_short_models(tmp_path):
    pair = {}
    for name, source in PAIR.items():
        pair[name] = str(shutil.copytree(source, tmp_path / name))
        path = tmp_path / name / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": 256}))
    config = parsed(init(**pair, prompts=prompts(20)))
    check_lengths(config.pair, config.data)
    assert config.data.max_new_tokens == config.decode.max_new_tokens
    assert config.data.max_prompt_tokens + config.decode.max_new_tokens + config.decode.max_draft_length == 256


def test_the_parts_of_few_prompts_are_said_once(capsys):
    config = parsed(init(**PAIR, prompts=prompts(20)))
    capsys.readouterr()
    plan(config, sample=0)
    assert Experiment(config).data.num_train == 16, "evaluation settles the same section"
    lines = capsys.readouterr().out.splitlines()
    parts = "prompts.jsonl: 20 prompts, 16 for train, 2 for dev and 2 for test"
    assert [line for line in lines if "for train" in line] == [parts]
    assert not [line for line in lines if line.startswith("next:")], "an experiment from Python has no command"


def test_what_init_cannot_do_is_refused():
    path = prompts(20, "query")
    with pytest.raises(ValueError, match="map one of them"):
        init(**PAIR, prompts=path)
    assert 'columns: {"prompt": "query"}' in init(**PAIR, prompts=path, column="query").read_text()
    with pytest.raises(ValueError, match="already exists; choose another --out, or pass --force"):
        init(**PAIR, prompts=prompts(20))
    init(**PAIR, prompts=prompts(30), force=True)
    with pytest.raises(ValueError, match="has 9 prompts; give at least 10"):
        init(**PAIR, prompts=prompts(9), force=True)


def test_a_draft_without_logits_for_all_tokens_is_refused_before_a_yaml_is_written(tmp_path: Path):
    draft = shutil.copytree(PAIR["draft"], tmp_path / "narrow")
    path = draft / "config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | {"vocab_size": 100}))
    with pytest.raises(ValueError, match=r"draft has logits for 100 ids and \d+ are in use; resize its embeddings"):
        init(target=PAIR["target"], draft=str(draft), prompts=prompts(20), out="narrow.yaml")
    assert not Path("narrow.yaml").exists()

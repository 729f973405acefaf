"""`init`: a YAML that runs as it is, of as many prompts as there are, and never over a file that is there."""

import json
import shlex
import shutil
from pathlib import Path

import pytest

from configs.schema import Config, SamplingConfig
from data_gen.pipeline.checks import check_lengths
from data_gen.pipeline.stages import settled
from data_gen.prompts.sets import SPLITS, load_prompts
from decode.experiment import Experiment
from evaluation.costs.init import init, plan
from evaluation.costs.machine import key_of
from tests.evaluation.commands import ROOT, called, config_with

PAIR = {name: str(ROOT / "checkpoints" / "tiny" / name) for name in ("target", "draft")}


@pytest.fixture(autouse=True)
def in_an_empty_folder_without_a_sample(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("evaluation.costs.init._SAMPLE", 0)  # nothing is timed


def prompts(count: int, field: str = "prompt", *, num_repeats: int = 0) -> str:
    numbers = [*range(count), *(index % count for index in range(num_repeats))]
    lines = [json.dumps({field: f"How many is {n} and 2?"}) for n in numbers]
    Path("prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return "prompts.jsonl"


def changed(source: str, path: Path, **settings: object) -> str:
    """A copy of a model with other entries of generation_config.json, or of config.json."""
    is_of_model = settings.keys() & {"max_position_embeddings", "vocab_size"}
    file = Path(shutil.copytree(source, path), "config.json" if is_of_model else "generation_config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return str(path)


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
    "name",
    ["run, two", "exp #1", "v{2}", "a: b", "[x]", "it's", "1", "null", "- a", "*b", "\xe9", "\U0001f600", "a\\b"],
)
def test_a_yaml_of_any_name_is_read_as_it_was_meant(name, capsys):
    path = init(**PAIR, prompts=prompts(20), out=f"{name}.yaml")
    config = parsed(path)
    assert (config.data.dir, config.decode.dir) == (f"data/{name}", f"data/{name}/decode")
    assert config.heads.dir == f"checkpoints/runs/{name}"
    shown = capsys.readouterr().out
    assert shlex.split(shown.rsplit("next: ", 1)[1]) == ["acceptance-heads", "all", "--config", f"{name}.yaml"]
    assert "one prompt as the models read it" in shown


def test_texts_fit_the_positions_of_short_models(tmp_path):
    pair = {name: changed(path, tmp_path / name, max_position_embeddings=256) for name, path in PAIR.items()}
    config = parsed(init(**pair, prompts=prompts(20)))
    check_lengths(config.pair, config.data)
    assert config.data.max_new_tokens == config.decode.max_new_tokens
    assert config.data.max_prompt_tokens + config.decode.max_new_tokens + config.decode.max_draft_length == 256


def test_the_parts_of_few_prompts_are_said_once(capsys):
    config = parsed(init(**PAIR, prompts=prompts(20)))
    capsys.readouterr()
    plan(config, sample=0)
    assert Experiment(config).data.num_train == 10, "evaluation settles the same section"
    lines = capsys.readouterr().out.splitlines()
    parts = "prompts.jsonl: 20 prompts, 10 for train, 5 for dev and 5 for test"
    assert [line for line in lines if "for train" in line] == [parts]
    assert not [line for line in lines if line.startswith("next:")], "an experiment from Python has no command"


@pytest.mark.parametrize(
    ("count", "num_repeats", "parts"),
    [
        (10, 0, (6, 2, 2)),
        (24, 0, (12, 6, 6)),
        (39, 0, (21, 9, 9)),
        (40, 0, (20, 10, 10)),  # from here on there is a verdict
        (60, 120, (40, 10, 10)),
        (500, 0, (400, 50, 50)),
    ],
)
def test_the_sizes_follow_the_different_prompts_and_every_split_has_as_many(count, num_repeats, parts):
    config = parsed(init(**PAIR, prompts=prompts(count, num_repeats=num_repeats)))
    data = settled(config.data)
    assert tuple(len(load_prompts(data, split)) for split in SPLITS) == parts
    experiment = Experiment(config)
    for split, num in zip(SPLITS[1:], parts[1:], strict=True):
        assert len(experiment.prompts("prompts", split)) == min(num, 50)
    assert key_of(experiment)["prompts"], "times are measured on dev prompts"


@pytest.mark.parametrize(
    ("of_file", "flags", "sampling", "lines"),
    [
        ({}, {}, {}, []),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20},
            {},
            {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
            ["sampling: temperature 0.6, top_p 0.95, top_k 20, from generation_config.json"],
        ),
        (
            {"temperature": 0.6, "top_p": 0.95, "top_k": 50},
            {"temperature": 0.7, "top_p": 1.0, "top_k": 0},
            {"temperature": 0.7},
            [],
        ),
        ({"temperature": 0.6, "top_p": 1.0}, {"top_k": 5}, {"temperature": 0.6, "top_k": 5}, ["sampling: temp"]),
        ({"top_p": 0.9, "top_k": 9}, {"temperature": 0.0}, {"temperature": 0.0}, []),
        ({"do_sample": False}, {}, {}, ["note: generation_config.json of", "pass --temperature 0"]),
        (
            {"repetition_penalty": 1.05, "top_p": 0.8, "min_p": 0.1},
            {},
            {"top_p": 0.8},
            ["sampling: top_p 0.8,", "repetition_penalty 1.05", "min_p 0.1", "which data and heads do not model"],
        ),
    ],
)
def test_sampling_is_that_of_the_generation_config_and_init_says_so(of_file, flags, sampling, lines, tmp_path, capsys):
    pair = PAIR | {"target": changed(PAIR["target"], tmp_path / "target", **of_file)}
    path = init(**pair, prompts=prompts(20), **flags)
    assert parsed(path).pair.sampling == SamplingConfig(**sampling)
    shown = " ".join(capsys.readouterr().out.replace("#", " ").split())
    assert [line for line in lines if line not in shown] == []
    assert ("generation_config.json" in shown) == bool(lines)


@pytest.mark.parametrize("capability", ["AVX2", "AVX512"])
def test_the_yaml_names_the_setting_for_cpus_without_bfloat16_arithmetic(capability, monkeypatch, capsys):
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: capability)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    text = init(**PAIR, prompts=prompts(20)).read_text()
    assert ("#   note: this CPU has no bfloat16 arithmetic" in text) == (capability == "AVX2")


def test_a_generation_config_that_cannot_be_read_is_refused_by_name(tmp_path):
    target = changed(PAIR["target"], tmp_path / "target")
    Path(target, "generation_config.json").write_text("{")
    with pytest.raises((ValueError, OSError), match=r"the generation_config\.json of .*target cannot be read"):
        init(**PAIR | {"target": target}, prompts=prompts(20))


def test_a_draft_that_is_not_smaller_is_refused_until_it_is_allowed(tmp_path):
    same = dict.fromkeys(PAIR, PAIR["target"])
    swapped = {"target": PAIR["draft"], "draft": PAIR["target"]}
    copied = PAIR | {"draft": str(shutil.copytree(PAIR["target"], tmp_path / "copy"))}
    for pair, problem in (
        (same, "--target and --draft are the same model"),
        (swapped, r"--draft .*target has [\d,]+ weights and --target .*draft [\d,]+, so .* swap the two"),
        (copied, "so drafting is no faster"),
    ):
        with pytest.raises(ValueError, match=rf"{problem}.*or pass --allow_large_draft"):
            init(**pair, prompts=prompts(20))
        assert parsed(init(**pair, prompts=prompts(20), allow_large_draft=True, force=True))
        Path("experiment.yaml").unlink()


@pytest.mark.slow
@pytest.mark.parametrize(("count", "num_repeats"), [(10, 0), (24, 0), (60, 120)])
def test_all_ends_with_a_verdict_or_with_a_line_why_there_is_none(count, num_repeats, capsys):
    init(**PAIR, prompts=prompts(count, num_repeats=num_repeats))
    small = ["--heads.depths=[0]", "--heads.embeddings=[false]", "--trainer.max_epochs=2", "--data.max_new_tokens=24"]
    times = ["--decode.t_draft_s=0.001", "--decode.t_target_s=0.005", "--decode.max_new_tokens=24"]
    called("all", "--config=experiment.yaml", *small, *times)
    shown = capsys.readouterr().out
    num_test = Experiment(parsed(Path("experiment.yaml"))).data.num_test
    assert (f"No verdict: {num_test} test prompts are too few" in shown) == (num_test < 10)


def test_what_init_cannot_do_is_refused():
    path = prompts(20, "query")
    with pytest.raises(ValueError, match="map one of them"):
        init(**PAIR, prompts=path)
    assert "columns: {prompt: query}" in init(**PAIR, prompts=path, column="query").read_text()
    with pytest.raises(ValueError, match="already exists; choose another --out, or pass --force"):
        init(**PAIR, prompts=prompts(20))
    init(**PAIR, prompts=prompts(30), force=True)
    with pytest.raises(ValueError, match=r"has 9 different prompts \(3 of 12 repeat another\); give at least 10"):
        init(**PAIR, prompts=prompts(9, num_repeats=3), force=True)
    for flags, problem in (({"temperature": -1.0}, "temperature is -1"), ({"top_p": 1.5}, r"top_p is 1\.5")):
        with pytest.raises(ValueError, match=rf"pair\.sampling\.{problem}"):
            init(**PAIR, prompts=prompts(20), force=True, **flags)


def test_a_draft_without_logits_for_all_tokens_is_refused_before_a_yaml_is_written(tmp_path: Path):
    draft = changed(PAIR["draft"], tmp_path / "narrow-draft", vocab_size=100)
    with pytest.raises(ValueError, match=r"draft has logits for 100 ids and \d+ are in use; resize its embeddings"):
        init(**PAIR | {"draft": draft}, prompts=prompts(20), out="narrow.yaml")
    assert not Path("narrow.yaml").exists()

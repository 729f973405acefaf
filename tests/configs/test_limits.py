"""Settings beyond their limits, and URLs instead of paths: each is refused in one line before anything is made."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from checkpoints.recipes.tiny import make_drafts, make_trio
from configs.command import SECTIONS, run
from configs.limits import LIMITS, check_limits
from configs.paths import check_local, local_path
from configs.schema import Config, ModelSource, PairConfig, PromptSource
from configs.screens import section_options
from data_gen.official import import_ as import_data
from data_gen.pipeline.inspect import responses
from decode.generate.command import generate
from evaluation.flags.command import flags
from evaluation.report.evaluate import evaluate
from heads.command import export, import_, push
from heads.command import inspect as inspect_head
from heads.model.head import AcceptanceHead
from papers.command import paper_tables
from store.lock import only_writer
from store.shards import write_atomic

ROOT = Path(__file__, "../../..").resolve()
PAIR = PairConfig(target=ModelSource(path="big"), draft=ModelSource(path="small"), micro=ModelSource(path="tiny"))
CONFIG = Config(pair=PAIR)


def changed(section: Any, name: str, value: Any) -> Any:
    """A section in which the entry at a dotted name has another value."""
    first, _, rest = name.partition(".")
    if isinstance(section, dict):
        return {**section, first: value}
    if isinstance(section, str):
        section = (PromptSource(path="stories"), PromptSource(path=section))
    if isinstance(section, tuple):
        return *section[:-1], changed(section[-1], name, value)
    return replace(section, **{first: changed(getattr(section, first), rest, value) if rest else value})


@pytest.mark.parametrize("value", [-3, float("nan"), float("inf")])
def test_every_number_of_the_schema_has_a_limit_that_refuses_what_no_setting_takes(value: float):
    options = [option for section in SECTIONS for option in section_options(section) if "str | int" not in option.kind]
    numbers = {option.flag.removeprefix("--") for option in options if re.search(r"\b(int|float)\b", option.kind)}
    assert len(numbers) > 40
    assert numbers <= set(LIMITS)
    for name in LIMITS:
        config = changed(CONFIG, name, (40, value, 2) if name == "data.split_weights" else value)
        with pytest.raises(ValueError, match=f"{name} is {value}; it must be a number, "):
            check_limits(config)


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("heads.depths", (0, -1), "heads.depths is -1"),
        ("data.mixing_ratio", 1.5, "data.mixing_ratio is 1.5; it must be a number, at least 0 and at most 1"),
        ("trainer.limit_test_batches", 0, "trainer.limit_test_batches is 0; it must be a number, greater than 0"),
        ("trainer.max_epochs", 0, "trainer.max_epochs is 0"),
        ("data.server.url", "localhost:8000", "it must begin with http"),
        ("pair.target.path", "", "pair.target.path is '', not a valid file name"),
        ("data.dir", " ", "data.dir is ' ', not a valid file name"),
    ],
)
def test_a_setting_beyond_its_limit_is_named_with_value_and_limit(name: str, value: object, complaint: str):
    with pytest.raises(ValueError, match=complaint):
        check_limits(changed(CONFIG, name, value))


@pytest.mark.parametrize("line", ["heads: null", "trainer: null", "pair: {sampling: 1}", "data: {server: {url: null}}"])
@pytest.mark.parametrize("more", ["", "decode: {dir: null, datasets: null, heads: null}", "data: {prompts: null}"])
def test_a_section_or_setting_that_a_yaml_leaves_empty_is_refused_in_one_line(line, more, tmp_path, capsys):
    argv = ["show", "--config", "tiny"]
    for name, text in (("line", line), ("more", more)):  # a section may occur once in a file
        (tmp_path / f"{name}.yaml").write_text(text)
        argv += ["--config", str(tmp_path / f"{name}.yaml")] if text else []
    with pytest.raises(SystemExit, match="2"):
        run({"show": lambda config: 1 / 0}, argv=argv)
    [said] = capsys.readouterr().err.splitlines()
    assert "give it" in said


def test_the_command_line_checks_limits_before_the_command_begins_and_defaults_are_within(capsys):
    with pytest.raises(SystemExit, match="2"):
        run({"show": lambda config: 1 / 0}, argv=["show", "--config", "tiny", "--heads.batch_size", "0"])
    limit = "it must be a number, at least 1 and at most 1,000,000,000"
    assert capsys.readouterr().err == f"error: heads.batch_size is 0; {limit}\n"
    trainer = {"max_epochs": -1, "max_steps": 10, "devices": "auto", "limit_val_batches": 1.0}
    check_limits(Config(pair=replace(PAIR, micro=None), trainer=trainer))


URLS = ("s3://bucket/run", "gs://bucket", "hf://owner/name", "https://host/x.jsonl", "file:///data/run", "S3://bucket")
URLS += ("s3:/bucket/run",)
NAMES = ("data/run", "C:/run", "C:\\run", "run:2/seed:0", "a:b", "../x", "/data/s3:/run", "2:/run", "owner/name")
NAMES += ("~/run", "head:best")
PATHS = [f"pair.{model}.path" for model in ("target", "draft", "micro")] + ["heads.dir"]
PATHS += [f"data.{name}" for name in ("dir", "prompts", "split_ids", "responses")]
PATHS += [f"decode.{name}" for name in ("dir", "datasets", "heads")]


def with_path(name: str, value: str) -> Config:
    """The config in which a setting has this path."""
    forms = {
        "decode.datasets": (value,),
        "decode.heads": (value,),
        "data.prompts": ("stories", PromptSource(path=value)),
    }
    return changed(CONFIG, name, forms.get(name, value))


@pytest.mark.parametrize("name", PATHS)
def test_no_config_with_a_url_for_a_path_can_be_made(name: str):
    for url in URLS:
        with pytest.raises(ValueError, match=rf"{name} is '{url}', a URL, but must be"):
            check_limits(with_path(name, url))
    for plain in NAMES:
        check_limits(with_path(name, plain))


@pytest.mark.parametrize(
    ("value", "may_be_on_hub", "remedy"),
    [
        ("s3://bucket/run", False, "must be a local path; mount the s3:// storage and give the mounted path"),
        ("file:///data/run", False, "must be a local path; write the path alone, /data/run"),
        ("hf://owner/name", True, r"must be a local path or a hub id \(owner/name\); write owner/name alone"),
    ],
)
def test_the_message_says_what_to_do(value: str, may_be_on_hub: bool, remedy: str):
    with pytest.raises(ValueError, match=remedy):
        check_local(value, "data.dir", may_be_on_hub=may_be_on_hub)
    assert [local_path(name, "--out") for name in NAMES] == [Path(name) for name in NAMES]


URL = "s3://bucket/run"
CALLS: dict[str, Callable[[], Any]] = {
    "data_gen import --file": lambda: import_data(CONFIG, file=URL),
    "data_gen responses --out": lambda: responses(CONFIG, out=URL),
    "recipes tiny --dir": lambda: make_trio(URL),
    "recipes tiny --models feature_drafts --dir": lambda: make_drafts(URL, ["eagle"]),
    "heads export --out": lambda: export(CONFIG, out=URL),
    "heads export --checkpoint": lambda: export(CONFIG, checkpoint=URL),
    "heads import --source": lambda: import_(CONFIG, source=URL, out="head", reject_weight=6.0),
    "heads import --out": lambda: import_(CONFIG, source="head", out=URL, reject_weight=6.0),
    "heads push --path": lambda: push(path=URL, repo="owner/name"),
    "heads inspect --path": lambda: inspect_head(path=URL),
    "evaluation evaluate --transfer_from": lambda: evaluate(CONFIG, transfer_from=URL),
    "decode generate --svg": lambda: generate(CONFIG, prompt="Hi", svg=URL),
    "evaluation flags --log": lambda: flags(CONFIG, for_="llama.cpp", log=URL),
    "evaluation paper_tables --eagle": lambda: paper_tables(CONFIG, paper="hsddw", eagle=URL),
    "AcceptanceHead.save_pretrained": lambda: AcceptanceHead(4, 0).save_pretrained(URL),
    "AcceptanceHead.save_pretrained of a Path": lambda: AcceptanceHead(4, 0).save_pretrained(Path(URL)),
    "AcceptanceHead.from_pretrained": lambda: AcceptanceHead.from_pretrained(URL),
    "only_writer": lambda: only_writer(URL, setting="data.dir").__enter__(),
    "write_atomic": lambda: write_atomic(Path(URL), b""),
}


@pytest.mark.parametrize("what", CALLS)
def test_every_flag_and_function_that_takes_a_path_refuses_a_url_and_makes_nothing(what, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"is 's3:/+bucket/run', a URL, but must be a local path"):
        CALLS[what]()
    assert list(tmp_path.iterdir()) == []

"""URLs in place of paths: each is refused in one line before anything is made; names with a colon are no URLs."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from checkpoints.recipes.tiny import make_drafts, make_trio
from configs.command import run
from configs.paths import check_local, local_path
from configs.schema import Config, ModelSource, PairConfig, PromptSource
from data_gen.official import import_ as import_data
from data_gen.pipeline.inspect import responses
from decode.generate.command import generate
from evaluation.flags.command import flags
from evaluation.papers.command import paper_tables
from evaluation.report.evaluate import evaluate
from heads.command import export, import_, push
from heads.command import inspect as inspect_head
from heads.model.head import AcceptanceHead
from store.lock import only_writer
from store.shards import write_atomic

ROOT = Path(__file__, "../../..").resolve()
PAIR = PairConfig(target=ModelSource(path="big"), draft=ModelSource(path="small"), micro=ModelSource(path="tiny"))
CONFIG = Config(pair=PAIR)
URLS = ("s3://bucket/run", "gs://bucket", "hf://owner/name", "https://host/x.jsonl", "file:///data/run", "S3://bucket")
URLS += ("s3:/bucket/run",)
NAMES = ("data/run", "C:/run", "C:\\run", "run:2/seed:0", "a:b", "../x", "/data/s3:/run", "2:/run", "owner/name")
NAMES += ("~/run", "head:best")
PATHS: dict[str, Callable[[str], Any]] = {
    **{
        f"pair.{model}.path": lambda value, model=model: replace(PAIR, **{model: ModelSource(path=value)})
        for model in ("target", "draft", "micro")
    },
    **{
        f"{section}.{name}": lambda value, section=section, name=name: replace(
            getattr(CONFIG, section), **{name: (value,) if name in ("datasets", "heads") else value}
        )
        for section, names in {
            "data": ("dir", "prompts", "split_ids", "responses"),
            "heads": ("dir",),
            "decode": ("dir", "datasets", "heads"),
        }.items()
        for name in names
    },
    "data.prompts": lambda value: replace(CONFIG.data, prompts=("stories", PromptSource(path=value))),
}
"""Setting -> a section in which it has a value."""


@pytest.mark.parametrize("name", PATHS)
def test_no_config_with_a_url_for_a_path_can_be_made(name: str):
    for url in URLS:
        with pytest.raises(ValueError, match=rf"{name} is '{url}', a URL, but must be"):
            PATHS[name](url)
    for plain in NAMES:
        PATHS[name](plain)


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
def test_every_flag_and_function_that_takes_a_path_refuses_a_url_and_makes_nothing(
    what: str, tmp_path: Path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"is 's3:/+bucket/run', a URL, but must be a local path"):
        CALLS[what]()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "argv",
    [
        ["-m", "data_gen", "--config", "tiny", "--data.dir", URL],
        ["train.py", "--config", "tiny", "--heads.dir", URL],
        ["-m", "heads", "export", "--config", "tiny", "--out", URL],
        ["-m", "data_gen", "plan", "--config", URL],
    ],
    ids=["data_gen", "train", "export", "config"],
)
def test_the_command_line_refuses_a_url_with_one_line_and_exit_code_2(argv: list[str], tmp_path: Path):
    argv = [str(ROOT / argument) if argument.endswith(".py") else argument for argument in argv]
    done = subprocess.run(
        [sys.executable, *argv],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "is 's3://bucket/run', a URL" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_url_in_the_yaml_is_refused_too(tmp_path: Path, capsys: pytest.CaptureFixture):
    path = tmp_path / "experiment.yaml"
    path.write_text(
        "pair:\n  target: {path: big}\n  draft: {path: small}\ndata: {prompts: [stories, {path: "
        "'s3://bucket/x.jsonl'}]}\n"
    )
    with pytest.raises(SystemExit, match="2"):
        run({"show": lambda config: 1 / 0}, argv=["show", "--config", str(path)])
    assert capsys.readouterr().err.startswith(
        "error: data.prompts is 's3://bucket/x.jsonl', a URL, but must be a local path or a hub id"
    )

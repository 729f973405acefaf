"""URLs where a path belongs: each is refused in one line before anything is made, and names with a colon in them are no
URLs.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from checkpoints.recipes.tiny import make_drafts, make_trio, tiny
from configs.command import run
from configs.paths import check_local, local_path
from configs.schema import Config, ModelSource, PairConfig, PromptSource
from data_gen.official.command import import_ as import_data
from data_gen.pipeline.check import check
from data_gen.pipeline.command import make
from data_gen.pipeline.plan import plan
from data_gen.pipeline.reuse import responses
from data_gen.stats.command import stats
from decode.generate.command import generate
from evaluation.__main__ import COMMANDS as EVALUATION
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
URLS = (
    "s3://bucket/run",
    "gs://bucket",
    "hf://owner/name",
    "https://host/x.jsonl",
    "file:///data/run",
    "S3://bucket",
    "s3:/bucket/run",
)
NAMES = (
    "data/run",
    "C:/run",
    "C:\\run",
    "run:2/seed:0",
    "a:b",
    "../x",
    "/data/s3:/run",
    "2:/run",
    "owner/name",
    "~/run",
    "head:best",
)
_OF_FORWARDS = ("attn_implementation", "quantization")
NO_PATHS = {f"pair.{model}.{name}" for model in ("target", "draft", "micro") for name in ("revision", "device_map")} | {
    "pair.gpus"
}
NO_PATHS |= {f"pair.{model}.{name}" for model in ("target", "draft", "micro") for name in _OF_FORWARDS}
NO_PATHS |= {f"data.prompts.{name}" for name in ("name", "split", "test_split", "columns")} | {
    "data.template",
    "data.ray.address",
    "data.ray.resources",
}
NO_PATHS |= {f"data.server.{name}" for name in ("url", "model", "extra", "api_key_variable")}
NO_PATHS |= {"heads.scalars", "heads.architectures", "decode.grid", "decode.policies", "trainer"}
"""Settings that hold text and are no paths; `trainer` is Lightning's, which reads and writes URLs itself."""
NO_PATH_FLAGS = {
    "data_gen import": {"split", "draft_key", "target_key"},
    "data_gen stats": {"split"},
    "heads push": {"repo"},
}
NO_PATH_FLAGS |= {
    "heads export": {"head", "metric"},
    "decode generate": {"prompt", "policy"},
    "evaluation replay_policy": {"policy"},
}
NO_PATH_FLAGS |= {
    "evaluation bench": {"batch", "policies", "families"},
    "evaluation evaluate": {"batch"},
    "evaluation flags": {"batch", "for_", "t_draft_ms", "t_target_ms"},
    "evaluation paper_tables": {"stops"},
    "evaluation hierarchy": {"level_heads"},
}
"""Flags that hold text and are no paths, or hold those of heads, which `AcceptanceHead.from_pretrained` opens."""


def texts(section: type, name: str = "") -> list[str]:
    """Dotted names of every field of a section that holds text."""
    found = []
    for field in fields(section):
        hint = get_type_hints(section)[field.name]
        kinds = [hint, *get_args(hint), *(part for kind in get_args(hint) for part in get_args(kind))]
        inner = next((kind for kind in kinds if is_dataclass(kind)), None)
        if inner:
            found += texts(inner, f"{name}{field.name}.")
        if re.search(r"\bstr\b|<class 'str'>", str(hint)):
            found.append(name + field.name)
    return found


def with_text(name: str, value: str) -> Config:
    """The config with another value at a dotted name."""
    section, *rest = name.split(".")
    if name == "data.prompts.path":
        rest, changed = ["prompts"], (PromptSource(path="stories"), PromptSource(path=value))
    elif section == "pair":
        rest, changed = [rest[0]], replace(getattr(PAIR, rest[0]), path=value)
    else:
        changed = (value,) if name in ("decode.heads", "decode.datasets") else value
    return replace(CONFIG, **{section: replace(getattr(CONFIG, section), **{rest[0]: changed})})


PATHS = sorted(set(texts(Config)) - NO_PATHS)


def test_every_text_of_the_schema_is_a_path_or_known_to_be_none():
    assert set(texts(Config)) >= NO_PATHS
    assert set(PATHS) == {
        *(f"pair.{model}.path" for model in ("target", "draft", "micro")),
        *(f"data.{name}" for name in ("dir", "prompts", "prompts.path", "split_ids", "responses")),
        *("heads.dir", "decode.dir", "decode.datasets", "decode.heads"),
    }


@pytest.mark.parametrize("name", PATHS)
def test_no_config_with_a_url_for_a_path_can_be_made(name: str):
    for url in URLS:
        with pytest.raises(
            ValueError,
            match=rf"{name.removesuffix('.path') if 'prompts' in name else name} is '{url}', a URL, but must be",
        ):
            with_text(name, url)
    for plain in NAMES:
        with_text(name, plain)


def test_the_line_says_what_to_do():
    for value, name, remedy in (
        ("s3://bucket/run", "data.dir", "must be a local path; mount the s3:// storage and give the mounted path"),
        ("file:///data/run", "data.dir", "must be a local path; write the path alone, /data/run"),
    ):
        with pytest.raises(ValueError, match=remedy):
            check_local(value, name)
    with pytest.raises(ValueError, match=r"must be a local path or a hub id \(owner/name\); write owner/name alone"):
        check_local("hf://owner/name", "pair.draft.path", may_be_on_hub=True)
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
    "evaluation evaluate --home": lambda: evaluate(CONFIG, home=URL),
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


def test_every_flag_that_holds_text_is_among_them_or_is_no_path():
    rooms = {
        "data_gen": [import_data, make, plan, responses, stats, check],
        "heads": [export, import_, inspect_head, push],
    }
    for room, commands in (
        rooms | {"evaluation": list(EVALUATION.values()), "decode": [generate], "recipes": [tiny]}
    ).items():
        for command in commands:
            name = f"{room} {command.__name__.rstrip('_')}"
            hints = get_type_hints(command)
            texts = {
                flag for flag in hints if flag != "return" and re.search(r"\bstr\b|<class 'str'>", str(hints[flag]))
            }
            for flag in texts - NO_PATH_FLAGS.get(name, set()):
                assert any(call.startswith(name) and call.endswith(f"--{flag}") for call in CALLS), (name, flag)


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

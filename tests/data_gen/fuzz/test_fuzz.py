"""Broken input: every boundary reads it, or refuses it in one clear line that names the file or the setting."""

import json
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from pytorch_lightning import Trainer
from safetensors.torch import save_file

from configs.command import run
from configs.schema import Config, PromptSource
from data_gen.official import _parse, _read
from data_gen.pipeline.command import make
from data_gen.pipeline.plan import plan
from data_gen.prompts.sets import read, set_of, split_by_id
from data_gen.responses.exchange import Request
from data_gen.responses.text import ResponseFile, Spelling
from data_gen.store.manifest import read_manifest, settle
from data_gen.store.rows import account, read_rows
from evaluation.costs.machine import kept_costs
from evaluation.traces.recording import trace
from heads.batches.module import FeatureData
from heads.command import load_sweep
from heads.model.head import AcceptanceHead, Provenance
from heads.model.official import read_official_head
from heads.training.command import train
from lm import load_pair, load_pair_tokenizer
from store.shards import list_shards, shard_path, sidecar_path, verify_shard
from tests.data_gen.faults.test_faults import Child, at, experiment

_COSTS: dict[str, Any] = {"t_draft_s": 1.0, "t_target_s": [1.0], "origin": "", "errors": {}, "fit": {}, "stops": {}}
_LISTS = {"prefix": [70, 71], "tokens": [72, 73], "draft": [72, 74], "p_acc": [1, 0.5]}
_LISTS |= {"log_p_7b": [-1.0, -2.0], "log_p_70b": [-1.5, -0.5]}
TEXTS: dict[str, list[dict[str, Any]] | dict[str, Any]] = {
    "prompts.jsonl": [
        {"id": 1, "instruction": "a", "input": "b"},
        {"id": 2, "messages": [{"role": "user", "content": "c"}]},
        {"id": 3, "turns": ["d", "e"], "category": "f"},
    ],
    "responses.jsonl": [
        {"id": 1, "response": "a"},
        {"id": 2, "response_ids": [70, 1], "finish_reason": "stop"},
        {"id": 3, "turn": 2, "response": "b"},
    ],
    "official.json": [
        {"prompt": "p", "continuation": "c", **_LISTS},
        {"prompt": "p", **{name: str(values) for name, values in _LISTS.items()}},
    ],
    "split.json": {"dev": [1, 2], "test": [3]},
}
_OFFICIAL_HEAD = {"0.linear.weight": (8, 8), "0.linear.bias": (8,), "1.weight": (2, 8), "1.bias": (2,)}


class Boundary(NamedTuple):
    """A file, how it is read, how it is broken (a key of `BROKEN`), and what a refusal must name."""

    read: Callable[[], object]
    path: Path
    kind: str
    name: str


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Config:
    """The experiment of a few rows, with data and heads."""
    config = experiment(tmp_path_factory.mktemp("fuzz"))
    config = replace(config, data=replace(config.data, num_train=4, num_dev=2, num_test=2))
    make(config)
    train(replace(config, trainer=config.trainer | {"max_epochs": 1, "logger": False}))
    return config


def texts(folder: Path, config: Config) -> dict[str, Boundary]:
    """Files that users write."""
    paths = {name: folder / name for name in TEXTS}
    for path, records in zip(paths.values(), TEXTS.values(), strict=True):
        lines = "".join(json.dumps(record) + "\n" for record in records)
        path.write_text(lines if path.suffix == ".jsonl" else json.dumps(records))
    prompts, responses, official, split = paths.values()
    spelling = Spelling(load_pair_tokenizer(config.pair), frozenset({1}))

    def read_prompts() -> None:
        _, problems = read(set_of(PromptSource(path=str(prompts))))
        for where, reason in problems.items():
            raise ValueError(f"{where}: {reason}")

    def read_responses() -> None:
        source = ResponseFile(str(responses), spelling, max_new_tokens=4)
        source.respond([Request(name, "<u>q", [2, 84]) for name in ("1", "2", "3#2", "4")], 0, lambda count: None)

    def read_official() -> None:
        for number, item in enumerate(_read(official)):
            _parse(item, str(number), where=f"{official} item {number}")

    reads: list[Callable[[], object]] = [read_prompts, read_responses, read_official]
    reads += [lambda: split_by_id([], weights=(1, 1, 1), seed=0, split_ids=str(split))]
    pairs = zip(reads, paths.values(), strict=True)
    return {path.name: Boundary(read, path, path.suffix[1:], path.name) for read, path in pairs}


def files(folder: Path, config: Config) -> dict[str, Boundary]:
    """Files that the project wrote, and models."""
    data = Path(config.data.dir)
    rows, labels = shard_path(data, "rows", "train", 0), shard_path(data, "labels", "train", 0)
    settled, costs = read_manifest(data), kept_costs(folder / "whole" / "decode")
    costs.keep([({"a": 1}, _COSTS)])

    def read_shard() -> None:
        list_shards(data, "train")
        verify_shard(rows)
        read_rows(rows)
        account([rows])

    def read_labels() -> None:
        module = FeatureData(config.data, config.heads, pair=config.pair)
        module.setup()
        next(iter(module.first_shard()))
        next(iter(module.loader("train")))

    def read_settled() -> None:
        settle(config.data.dir, settled)
        FeatureData(config.data, config.heads, pair=config.pair)

    head, official, checkpoint = folder / "head", folder / "official", folder / "whole" / "heads" / "last.ckpt"
    next(iter(load_sweep(checkpoint).heads().values())).save_pretrained(head)
    official.mkdir()
    weights = {f"model.{name}": torch.zeros(shape) for name, shape in _OFFICIAL_HEAD.items()}
    save_file(weights, official / "model.safetensors")
    official_config = {"hidden_size": 8, "num_layers": 1, "architectures": ["AcceptancePredictionHead"]}
    (official / "config.json").write_text(json.dumps(official_config))
    empty: dict[str, Any] = {name: {} for name in ("sampling", "training", "draft", "target")}
    provenance = Provenance(accept_weight=1.0, reject_weight=6.0, mixing_ratio=0.15, **empty)
    models: dict[str, tuple[Callable[[], object], Path]] = {
        "head": (partial(AcceptanceHead.from_pretrained, str(head)), head),
        "official": (partial(read_official_head, str(official), provenance), official),
        "draft": (partial(load_pair, config.pair), Path(config.pair.draft.path)),
    }
    found = {
        "sidecar of rows": Boundary(read_shard, sidecar_path(rows), "json", rows.name),
        "rows": Boundary(read_shard, rows, "bytes", rows.name),
        "sidecar of labels": Boundary(read_labels, sidecar_path(labels), "json", labels.stem),
        "labels": Boundary(read_labels, labels, "safetensors", labels.stem),
        "manifest": Boundary(read_settled, data / "manifest.json", "json", "manifest.json"),
        "costs": Boundary(costs.entries, costs.path, "jsonl", costs.path.name),
        "checkpoint": Boundary(partial(load_sweep, checkpoint), checkpoint, "bytes", "last.ckpt"),
        "tokenizer of draft": Boundary(models["draft"][0], models["draft"][1] / "tokenizer.json", "json", "draft"),
    }
    for name, (read_model, path) in models.items():
        found[f"config of {name}"] = Boundary(read_model, path / "config.json", "json", name)
        found[f"weights of {name}"] = Boundary(read_model, path / "model.safetensors", "safetensors", name)
    return found


Draw = Callable[[st.SearchStrategy[Any]], Any]
NASTY = st.one_of(
    st.sampled_from([None, True, False, 0, -1, 1, 10**20, 1e308, float("nan"), float("inf")]),
    st.sampled_from(["", " ", "x", "\ud800", "\0", "../x", [], {}, [[]], [None]]),
    st.integers(-(2**70), 2**70),
    st.text(max_size=8),
    st.lists(st.one_of(st.integers(), st.booleans(), st.none(), st.text(max_size=3)), max_size=3),
    st.dictionaries(st.text(max_size=4), st.integers(), max_size=2),
)


def _break_bytes(content: bytes, draw: Draw) -> bytes:
    at = draw(st.integers(0, max(0, len(content) - 1)))
    how = draw(st.sampled_from(["cut", "flip", "insert", "nothing", "zeros"]))
    if how == "cut":
        return content[:at]
    if how == "flip" and content:
        return content[:at] + bytes([content[at] ^ 1 << draw(st.integers(0, 7))]) + content[at + 1 :]
    if how == "zeros":
        return content[:at] + bytes(len(content) - at)
    return b"" if how == "nothing" else content[:at] + draw(st.binary(min_size=1, max_size=8)) + content[at:]


def _break_json(content: bytes, draw: Draw) -> bytes:
    if draw(st.integers(0, 4)) == 0:
        return _break_bytes(content, draw)
    return json.dumps(_changed(json.loads(content), draw)).encode()


def _changed(value: Any, draw: Draw) -> Any:
    """The document with one random entry, at any depth, changed or removed."""
    if isinstance(value, dict) and value and draw(st.integers(0, 5)):
        key = draw(st.sampled_from(sorted(value)))
        if draw(st.integers(0, 4)) == 0:
            return {name: entry for name, entry in value.items() if name != key}
        return {**value, key: _changed(value[key], draw)}
    if isinstance(value, list) and value and draw(st.integers(0, 5)):
        at = draw(st.integers(0, len(value) - 1))
        return [*value[:at], _changed(value[at], draw), *value[at + 1 :]]
    return draw(NASTY)


def _break_lines(content: bytes, draw: Draw) -> bytes:
    lines = content.splitlines()
    at = draw(st.integers(0, len(lines) - 1))
    return b"\n".join([*lines[:at], _break_json(lines[at], draw), *lines[at + 1 :]]) + b"\n"


def _break_safetensors(content: bytes, draw: Draw) -> bytes:
    """A broken header before the same numbers, or broken bytes."""
    if draw(st.integers(0, 3)) == 0:
        return _break_bytes(content, draw)
    (size,) = struct.unpack("<Q", content[:8])
    header = _break_json(content[8 : 8 + size], draw)
    length = draw(st.sampled_from([len(header), len(header) + 1, 2**63, 0]))
    return struct.pack("<Q", length) + header + content[8 + size :]


BROKEN = {"json": _break_json, "jsonl": _break_lines, "safetensors": _break_safetensors, "bytes": _break_bytes}

_MAX_LINE = 1500
_FILES = ["rows", "sidecar of rows", "labels", "sidecar of labels", "manifest", "costs", "checkpoint"]
_FILES += [f"{part} of {whole}" for part in ("config", "weights") for whole in ("head", "official", "draft")]
_FILES += ["tokenizer of draft"]


def num_refused(boundary: Boundary, num: int) -> int:
    """How many of `num` seeded ways to break a file are refused in one line that names it; all others are read."""
    intact, refusals, silent = boundary.path.read_bytes(), list[str](), list(HealthCheck)

    @seed(num)
    @settings(max_examples=num, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=silent)
    @given(st.data())
    def cases(data: st.DataObject) -> None:
        boundary.path.write_bytes(BROKEN[boundary.kind](intact, data.draw))
        try:
            boundary.read()
        except (ValueError, OSError) as error:
            line = " ".join(str(error).split())
            assert 0 < len(line) <= _MAX_LINE, f"a line of {len(line)} characters"
            assert boundary.name in line, f"it does not name {boundary.name}: {line[:300]}"
            refusals.append(line)

    try:
        cases()
    finally:
        boundary.path.write_bytes(intact)
    return len(refusals)


@pytest.mark.parametrize("name", TEXTS)
def test_broken_texts_are_refused_by_name(toy_config, tmp_path, name: str):
    assert num_refused(texts(tmp_path, toy_config)[name], 60) > 8


@pytest.fixture(scope="module")
def stored(prepared) -> dict[str, Boundary]:
    return files(Path(prepared.data.dir).parents[1], prepared)


@pytest.mark.slow
@pytest.mark.parametrize("name", _FILES)
def test_broken_files_are_refused_by_name(stored, name: str):
    assert stored.keys() == set(_FILES)
    assert num_refused(stored[name], 40) > 8


_BAD_SETTINGS = """
make data.rows_per_shard=1000000000 data.max_new_tokens=100000000 data.max_prompt_tokens=1 data.template=none
make data.num_train=1000000000000000000 data.template=llama2 data.prompts=/dev/null data.prompts=nothing.jsonl
make data.source=file data.source=server data.split_weights=[0,0,0]
make data.split_weights=[1] data.dir=/dev/null/x data.dir=/proc/x data.engine=slurm pair.target.path=/
make pair.target.path=/no/such pair.draft.device_map=cuda:7 pair.draft.device_map={x:1} pair.sampling.top_k=1000000000
train heads.batch_size=1000000000 heads.depths=[] heads.depths=[0,0] heads.reject_weights=[1e300] heads.dir=/dev/null
train heads.num_train=1000000 heads.scalars=[[x]] heads.scalars=[] trainer.devices=99 trainer.devices=x
train trainer.accelerator=cuda trainer.limit_test_batches=2.5 trainer.limit_train_batches=0.0001 trainer.precision=x
train trainer.limit_val_batches=0 trainer.precision=16-true trainer.max_epochs=-7 trainer.max_steps=0
train trainer.val_check_interval=1000000000 trainer.max_time=x trainer.strategy=x
trace decode.heads=[/no/such] decode.dir=/dev/null
"""
"""Settings within their ranges (`tests/configs/test_limits.py` tries the others)."""
SETTINGS: dict[str, list[str]] = {"make": [], "train": [], "trace": []}
for name, *bad_settings in map(str.split, _BAD_SETTINGS.strip().splitlines()):
    SETTINGS[name] += bad_settings
SETTINGS["plan"] = SETTINGS["make"][::3]


@pytest.mark.slow
@pytest.mark.parametrize("command", SETTINGS)
def test_a_command_with_one_bad_setting_runs_or_is_refused_in_one_line(prepared, tmp_path: Path, command: str):
    commands = {"make": make, "plan": plan, "train": train, "trace": trace}
    failed, outcomes = {}, Counter[int]()
    for number, setting in enumerate(SETTINGS[command]):
        fresh = at(prepared, tmp_path / str(number))  # nothing is there yet
        config = asdict(fresh) | ({"data": asdict(prepared.data)} if command in ("train", "trace") else {})
        path = tmp_path / "settings.json"
        path.write_text(json.dumps(config | {"trainer": {**prepared.trainer, "max_epochs": 1}}))
        argv = [command, "--config", str(path), f"--{setting}"]
        child = Child(lambda argv=argv: run(commands, argv=argv, trainer=Trainer if argv[0] == "train" else None))
        status = child.wait()
        outcomes[status] += 1
        if status and not (status == 2 and child.has_one_clear_line()):
            failed[setting] = (status, child.said[-300:])
    assert not failed, "\n".join(map(str, failed.items()))
    assert outcomes[2] > len(SETTINGS[command]) / 3, "few are refused: is it the setting that is tried?"

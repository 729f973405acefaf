"""Every file that the project reads, valid at first, in a tiny run."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from configs.schema import Config, PromptSource
from data_gen.official import _parse, _read
from data_gen.pipeline.command import make
from data_gen.prompts import sets as hub
from data_gen.prompts.splits import split_by_id
from data_gen.responses.exchange import Request
from data_gen.responses.text import ResponseFile, Spelling
from data_gen.store.errors import account
from data_gen.store.manifest import read_manifest, settle
from data_gen.store.rows import read_rows
from evaluation.costs.machine import kept_costs
from heads.batches.module import FeatureData
from heads.command import load_sweep
from heads.model.head import AcceptanceHead
from heads.model.official import read_official_head
from heads.model.provenance import Provenance
from heads.training.command import train
from lm import load_pair, load_pair_tokenizer
from store.shards import list_shards, rows_path, verify_shard

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


def made(config: Config, folder: Path) -> Config:
    """The experiment of a few rows, with data and heads."""
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
        intact, problems = hub.read(hub.set_of(PromptSource(path=str(prompts))), "train")
        split_by_id(intact, weights=(1, 1, 1), seed=0)
        for where, reason in problems.items():
            raise ValueError(f"{where}: {reason}")

    def read_responses() -> None:
        source = ResponseFile(str(responses), spelling, max_new_tokens=4)
        source.respond([Request(name, "<u>q", [2, 84]) for name in ("1", "2", "3#2", "4")], 0, lambda count: None)

    def read_official() -> None:
        for number, item in enumerate(_read(official)):
            keys = ("log_p_7b", "log_p_70b")
            _parse(item, str(number), keys=keys, where=f"{official} item {number}")

    reads: list[Callable[[], object]] = [read_prompts, read_responses]
    reads += [read_official, lambda: split_by_id([], weights=(1, 1, 1), seed=0, split_ids=str(split))]
    return {
        path.name: Boundary(read, path, path.suffix[1:], path.name)
        for read, path in zip(reads, paths.values(), strict=True)
    }


def files(folder: Path, config: Config) -> dict[str, Boundary]:
    """Files that the project wrote, and models."""
    data = Path(config.data.dir)
    rows, features = rows_path(data, "train", 0), data / "features" / "drawn" / "train-00000.safetensors"
    settled, costs = read_manifest(data), kept_costs(folder / "whole" / "decode")
    costs.keep([({"a": 1}, _COSTS)])

    def read_shard() -> None:
        list_shards(data, "train")
        verify_shard(rows)
        read_rows(rows)
        account([rows])

    def read_features() -> None:
        module = FeatureData(config.data, config.heads, pair=config.pair)
        for timing in module.timings:
            module.first_scalars(timing)
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
        "sidecar of rows": Boundary(read_shard, rows.with_name(f"{rows.name}.json"), "json", rows.name),
        "rows": Boundary(read_shard, rows, "bytes", rows.name),
        "sidecar of features": Boundary(
            read_features, features.with_name(f"{features.name}.json"), "json", features.stem
        ),
        "features": Boundary(read_features, features, "safetensors", features.stem),
        "labels": Boundary(read_features, data / "labels" / features.name, "safetensors", features.stem),
        "manifest": Boundary(read_settled, data / "manifest.json", "json", "manifest.json"),
        "costs": Boundary(costs.entries, costs.path, "jsonl", costs.path.name),
        "checkpoint": Boundary(partial(load_sweep, checkpoint), checkpoint, "bytes", "last.ckpt"),
        "tokenizer of draft": Boundary(models["draft"][0], models["draft"][1] / "tokenizer.json", "json", "draft"),
    }
    for name, (read, path) in models.items():
        found[f"config of {name}"] = Boundary(read, path / "config.json", "json", name)
        found[f"weights of {name}"] = Boundary(read, path / "model.safetensors", "safetensors", name)
    return found

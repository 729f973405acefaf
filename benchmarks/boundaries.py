"""The boundaries that `benchmarks.fuzz` tries: what each reads, valid at first, and how it is broken."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from jsonargparse import ArgumentError
from pytorch_lightning import Trainer
from safetensors.torch import save_file

from benchmarks.breakage import BROKEN, NASTY, Draw
from benchmarks.stages_under_fault import experiment
from configs.command import config_of, one_line, parser_for
from configs.schema import Config
from data_gen.official import json_file
from data_gen.pipeline.command import make
from data_gen.prompts.prompt import read_jsonl
from data_gen.prompts.splits import split_by_id
from data_gen.responses.exchange import Request
from data_gen.responses.from_file import ResponseFile
from data_gen.responses.spelling import Spelling
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


@dataclass(frozen=True)
class Boundary:
    """A place where the project reads a file or a setting."""

    name: str
    read: Callable[[], object]
    path: Path | None
    """The file that is broken."""
    kind: str = "json"
    """How: json, jsonl, safetensors, or bytes."""
    must_name: str | None = None
    """Words that a refusal must have in its line."""
    breaks: Callable[[Draw], None] | None = None
    """Damage that is done instead of breaking a file."""

    def broken(self, draw: Draw) -> tuple[Path | None, bytes]:
        """Break the input; returns the file and its intact bytes."""
        if self.breaks is not None:
            self.breaks(draw)
            return None, b""
        assert self.path is not None
        intact = self.path.read_bytes()
        self.path.write_bytes(BROKEN[self.kind](intact, draw))
        return self.path, intact


def boundaries(folder: Path) -> list[Boundary]:
    """Every boundary, over a tiny run that is made in `folder`."""
    config = experiment(folder)
    config = replace(config, data=replace(config.data, num_train=4, num_dev=2, num_test=2))
    make(config)
    train(replace(config, trainer=config.trainer | {"max_epochs": 1, "logger": False}))
    return [*_settings(), *texts(folder, config), *_stored(folder, config), *_heads(folder, config)]


def _settings() -> list[Boundary]:
    parser, cell = parser_for(_nothing, trainer=Trainer), [""]
    base = {"pair": {"target": {"path": "a"}, "draft": {"path": "b"}}}
    names = sorted(_leaves(parser.get_defaults().as_dict()))

    def breaks(draw: Draw) -> None:
        name = draw(st.sampled_from(names)) if draw(st.integers(0, 9)) else draw(st.text(max_size=12))
        whole: dict[str, Any] = json.loads(json.dumps(base))
        place = whole
        *sections, last = name.split(".")
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = draw(NASTY)
        cell[0] = json.dumps(whole)

    def read() -> None:
        try:
            config_of(parser, parser.parse_string(cell[0]))
        except ArgumentError as error:
            raise ValueError(one_line(error)) from error

    return [Boundary("config", read, None, breaks=breaks)]


def texts(folder: Path, config: Config) -> list[Boundary]:
    """Boundaries of the texts that users write."""
    prompts, responses, official, split = (
        folder / name for name in ("prompts.jsonl", "responses.jsonl", "official.json", "split.json")
    )
    records: list[dict[str, Any]] = [
        {"id": 1, "instruction": "a", "input": "b"},
        {"id": 2, "messages": [{"role": "user", "content": "c"}]},
    ]
    prompts.write_text(
        "".join(json.dumps(record) + "\n" for record in [*records, {"id": 3, "turns": ["d", "e"], "category": "f"}])
    )
    answers = [
        {"id": 1, "response": "a"},
        {"id": 2, "response_ids": [70, 1], "finish_reason": "stop"},
        {"id": 3, "turn": 2, "response": "b"},
    ]
    responses.write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    lists = {
        "prefix": [70, 71],
        "tokens": [72, 73],
        "draft": [72, 74],
        "log_p_7b": [-1.0, -2.0],
        "log_p_70b": [-1.5, -0.5],
        "p_acc": [1, 0.5],
    }
    official.write_text(
        json.dumps(
            [{"prompt": "p", "continuation": "c", **lists}, {"prompt": "p", **{k: str(v) for k, v in lists.items()}}]
        )
    )
    split.write_text(json.dumps({"dev": [1, 2], "test": [3]}))
    spelling = Spelling(load_pair_tokenizer(config.pair), frozenset({1}))

    def read_responses() -> None:
        source = ResponseFile(str(responses), spelling, max_new_tokens=4)
        source.respond([Request(name, "<u>q", [2, 84]) for name in ("1", "2", "3#2", "4")], 0, lambda count: None)

    def read_official() -> None:
        keys = ("log_p_7b", "log_p_70b")
        for number, item in enumerate(json_file.read(official)):
            json_file.parse(item, str(number), keys=keys, where=f"{official} item {number}")

    return [
        Boundary(
            "prompts.jsonl",
            lambda: split_by_id(read_jsonl(prompts), weights=(1, 1, 1), seed=0),
            prompts,
            "jsonl",
            prompts.name,
        ),
        Boundary("responses.jsonl", read_responses, responses, "jsonl", responses.name),
        Boundary("official JSON", read_official, official, "json", official.name),
        Boundary(
            "split_ids",
            lambda: split_by_id([], weights=(1, 1, 1), seed=0, split_ids=str(split)),
            split,
            "json",
            split.name,
        ),
    ]


def _stored(folder: Path, config: Config) -> list[Boundary]:
    """Boundaries of the files that the project itself wrote."""
    whole = folder / "whole"
    shard = rows_path(config.data.dir, "train", 0)
    features = whole / "data" / "features" / "drawn" / "train-00000.safetensors"
    manifest = whole / "data" / "manifest.json"
    settled = read_manifest(whole / "data")
    costs = kept_costs(whole / "decode")
    costs.keep(
        [({"a": 1}, {"t_draft_s": 1.0, "t_target_s": [1.0], "origin": "", "errors": {}, "fit": {}, "stops": {}})]
    )

    def read_shard() -> None:
        list_shards(config.data.dir, "train")
        verify_shard(shard)
        read_rows(shard)
        account([shard])

    def read_features() -> None:
        data = FeatureData(config.data, config.heads, pair=config.pair)
        for timing in data.timings:
            data.first_scalars(timing)

    def read_settled() -> None:
        settle(config.data.dir, settled)
        FeatureData(config.data, config.heads, pair=config.pair)

    return [
        Boundary("sidecar of rows", read_shard, shard.with_name(shard.name + ".json"), "json", shard.name),
        Boundary("shard of rows", read_shard, shard, "bytes", shard.name),
        Boundary(
            "sidecar of features", read_features, features.with_name(features.name + ".json"), "json", features.stem
        ),
        Boundary("shard of features", read_features, features, "safetensors", features.stem),
        Boundary("manifest", read_settled, manifest, "json", "manifest.json"),
        Boundary("costs.jsonl", costs.entries, costs.path, "jsonl", "costs.jsonl"),
    ]


def _heads(folder: Path, config: Config) -> list[Boundary]:
    """The boundaries of heads, checkpoints and models."""
    whole, head = folder / "whole", folder / "head"
    checkpoint = whole / "heads" / "last.ckpt"
    next(iter(load_sweep(checkpoint).heads().values())).save_pretrained(head)
    official = folder / "official"
    official.mkdir()
    shapes = {
        "model.0.linear.weight": (8, 8),
        "model.0.linear.bias": (8,),
        "model.1.weight": (2, 8),
        "model.1.bias": (2,),
    }
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, official / "model.safetensors")
    (official / "config.json").write_text(
        json.dumps({"hidden_size": 8, "num_layers": 1, "architectures": ["AcceptancePredictionHead"]})
    )
    provenance = Provenance(
        accept_weight=1.0, reject_weight=6.0, mixing_ratio=0.15, sampling={}, training={}, draft={}, target={}
    )
    read_head, read_official = (
        partial(AcceptanceHead.from_pretrained, str(head)),
        partial(read_official_head, str(official), provenance),
    )
    model = Path(config.pair.draft.path)
    return [
        Boundary("config.json of a head", read_head, head / "config.json", "json", "head"),
        Boundary("weights of a head", read_head, head / "model.safetensors", "safetensors", "head"),
        Boundary("official head's config", read_official, official / "config.json", "json", "official"),
        Boundary("official head's weights", read_official, official / "model.safetensors", "safetensors", "official"),
        Boundary("checkpoint", partial(load_sweep, checkpoint), checkpoint, "bytes", "last.ckpt"),
        Boundary("config.json of a model", partial(load_pair, config.pair), model / "config.json", "json", "draft"),
        Boundary(
            "weights of a model", partial(load_pair, config.pair), model / "model.safetensors", "safetensors", "draft"
        ),
        Boundary("tokenizer.json", partial(load_pair, config.pair), model / "tokenizer.json", "json", "draft"),
    ]


def _nothing(config: Config) -> None:
    """Do nothing."""


def _leaves(values: dict[str, Any], name: str = "") -> list[str]:
    """The dotted names of all settings."""
    return [
        leaf
        for key, value in values.items()
        for leaf in (_leaves(value, f"{name}{key}.") if isinstance(value, dict) and value else [name + key])
        if key not in ("config", "print_config")
    ]

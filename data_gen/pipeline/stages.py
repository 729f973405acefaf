"""One shard from prompts to files. With both models loaded (`mode: together`) in one go; with one at a time (`sequential`) in three stages
that leave their results in DIR/stages until the last has written the shard.

    together    responses, labels of both models, mixings, features
    respond     responses                                    target (or none: a server or a file answers)
    draft       Y, log q, entropy, mixings, hidden states    draft
    target      log p, acceptance_prob                       target

Every random number of a shard comes from seeds of (run seed, stage, split, shard index), and nothing else of the run reaches its bytes: so
the same shard is the same on any engine, in any order, and after any interruption.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import safetensors.torch
import torch
from torch import Tensor

from configs.schema import DataConfig
from data_gen.labels.labeller import Labeller
from data_gen.labels.laws import mixed
from data_gen.labels.layout import Layout
from data_gen.responses.conversation import ShardSpec
from data_gen.responses.exchange import Exchange, Problem, Progress
from data_gen.store import features, rows
from data_gen.store.shards import features_path, is_whole, rows_path, write_shard
from lm.uniforms import seed_of, uniforms

Stage = Literal["together", "respond", "draft", "target"]


def stages_of(config: DataConfig) -> tuple[Stage, ...]:
    """The stages of a run, in order."""
    return ("together",) if config.mode == "together" else ("respond", "draft", "target")


def is_done(config: DataConfig, spec: ShardSpec, stage: Stage = "together") -> bool:
    """Whether a stage need not be run on a shard: its own result or the whole shard is there."""
    paths = [features_path(config.dir, timing, spec.split, spec.index) for timing in config.features]
    if all(map(is_whole, [*paths, rows_path(config.dir, spec.split, spec.index)])):
        return True
    return stage in ("respond", "draft") and is_whole(_stage_path(config, spec, stage))


def label_and_mix(
    exchanges: Sequence[Exchange],
    spec: ShardSpec,
    labeller: Labeller,
    config: DataConfig,
    progress: Progress,
    known: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Everything that the draft decides, and with the target loaded the rest too: columns, `from_target`, and `drawn` and `fed` states
    as wanted. `known` may hold `target_states`, which spare the target's forward, and `draft_ids`, where Y was drawn elsewhere.
    """
    layout = _layout(exchanges)
    given = {"uniform": uniforms(seed_of(config.seed, "draft", spec.split, spec.index), layout.num_tokens), **(known or {})}
    columns = labeller.label(exchanges, given, with_hidden="drawn" in config.features, progress=progress)
    coins = uniforms(seed_of(config.seed, "mixing", spec.split, spec.index), layout.num_tokens * config.mixes)
    columns["from_target"] = coins < config.mixing_ratio
    if "fed" in config.features:
        order = layout.order(config.mixes)
        response_ids = torch.tensor([token for exchange in exchanges for token in exchange.response_ids], dtype=torch.int64)
        mixed_ids = mixed(response_ids[order], columns["draft_ids"][order], columns["from_target"])
        columns["fed"] = labeller.fed_hidden(exchanges, mixed_ids, config.mixes)
    return columns


def write_files(
    exchanges: Sequence[Exchange], problems: Sequence[Problem], columns: dict[str, Tensor], spec: ShardSpec, config: DataConfig
) -> None:
    """Features first, rows last: rows that are there have their features."""
    layout = _layout(exchanges)
    for timing in config.features:
        mixes = config.mixes if timing == "fed" else 1
        is_drafted = ~columns["from_target"] if timing == "fed" else torch.ones(layout.num_tokens)
        content = features.to_safetensors(columns[timing], columns, is_drafted, layout, mixes)
        path = features_path(config.dir, timing, spec.split, spec.index)
        write_shard(path, content, rows=len(exchanges) * mixes, tokens=layout.num_tokens * mixes)
    table = rows.to_parquet(exchanges, columns, from_target=columns["from_target"], mixes=config.mixes)
    facts = {"input": spec.num_requests, "ok": len(exchanges), "problems": [problem._asdict() for problem in problems]}
    write_shard(rows_path(config.dir, spec.split, spec.index), table, rows=len(exchanges), tokens=layout.num_tokens, **facts)


def save_responses(exchanges: Sequence[Exchange], problems: Sequence[Problem], spec: ShardSpec, config: DataConfig) -> None:
    """End of the stage `respond`."""
    content = {"exchanges": [exchange._asdict() for exchange in exchanges], "problems": [problem._asdict() for problem in problems]}
    write_shard(_stage_path(config, spec, "respond"), json.dumps(content).encode())


def load_responses(spec: ShardSpec, config: DataConfig) -> tuple[list[Exchange], list[Problem]]:
    """What `save_responses` left."""
    content = json.loads(_stage_path(config, spec, "respond").read_text())
    return [Exchange(**exchange) for exchange in content["exchanges"]], [Problem(**problem) for problem in content["problems"]]


def save_drafted(columns: dict[str, Tensor], spec: ShardSpec, config: DataConfig) -> None:
    """End of the stage `draft`."""
    write_shard(_stage_path(config, spec, "draft"), safetensors.torch.save(columns))


def add_target(
    exchanges: Sequence[Exchange], spec: ShardSpec, labeller: Labeller, config: DataConfig, progress: Progress
) -> dict[str, Tensor]:
    """The stage `target`: what `save_drafted` left, with log_p and acceptance_prob."""
    columns = safetensors.torch.load(_stage_path(config, spec, "draft").read_bytes())
    given = {name: columns[name] for name in ("draft_ids", "log_q")}
    return columns | labeller.label(exchanges, given, with_hidden=False, progress=progress)


def forget_stages(spec: ShardSpec, config: DataConfig) -> None:
    """Remove the results of earlier stages of a shard that is whole."""
    for stage in ("respond", "draft"):
        path = _stage_path(config, spec, stage)
        for name in (path, path.with_name(path.name + ".json")):
            name.unlink(missing_ok=True)


def _stage_path(config: DataConfig, spec: ShardSpec, stage: str) -> Path:
    suffix = {"respond": "responses", "draft": "safetensors"}[stage]
    return Path(config.dir) / "stages" / stage / f"{spec.split}-{spec.index:05d}.{suffix}"


def _layout(exchanges: Sequence[Exchange]) -> Layout:
    return Layout(tuple(len(exchange.response_ids) for exchange in exchanges))

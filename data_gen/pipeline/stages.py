"""The stages that take one shard from prompts to files: one stage with both models (`mode: together`), or three with
one model at a time (`sequential`), which keep their results in DIR/stages until the last has written the shard.

    together    responses, labels of both models, mixings, features
    respond     responses                                    target (or none: a server or a file answers)
    draft       Y, log q, entropy, mixings, hidden states    draft
    target      log p, acceptance_prob                       target

Hidden states are in DIR/features from the stage `draft` on. With `labels: server` the responses come with
the target's distributions, and there is no stage `target`.

A larger run keeps the shards of the smaller one; only a short last shard is made again. Each shard's sidecar has a
digest of every prompt that it was made from, so that shards of other prompts are refused.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import safetensors.torch
from safetensors import safe_open
from torch import Tensor

from configs.schema import DataConfig
from data_gen.prompts.prompt import Prompt
from data_gen.prompts.sets import load_prompts, sources_of
from data_gen.prompts.splits import SPLITS
from data_gen.responses.conversation import ShardSpec
from data_gen.responses.exchange import Answers, Exchange, Problem
from data_gen.store import labels, rows
from data_gen.store.labels import Layout, layout_of
from store.shards import features_path, is_whole, labels_path, read_sidecar, rows_path, sidecar_path, write_shard

_FACTS = Exchange._fields[:5]
"""All fields of an exchange but tensors."""
Stage = Literal["together", "respond", "draft", "target"]


def stages_of(data: DataConfig) -> tuple[Stage, ...]:
    """The stages of a run, in order."""
    if data.mode == "together":
        return ("together",)
    return ("respond", "draft") if data.labels == "server" else ("respond", "draft", "target")


def shards_of(data: DataConfig) -> list[ShardSpec]:
    """The shards of all splits, in the order in which they are made; ValueError for fewer prompts than requested."""
    return [spec for split in SPLITS for spec in cut_shards(split, load_prompts(data, split), data.rows_per_shard)]


def cut_shards(split: str, prompts: Sequence[Prompt], size: int) -> list[ShardSpec]:
    """Shards of `size` consecutive prompts."""
    starts = range(0, len(prompts), size)
    return [ShardSpec(split, index, tuple(prompts[start : start + size])) for index, start in enumerate(starts)]


def refuse_other_prompts(specs: Iterable[ShardSpec], data: DataConfig) -> None:
    """Forget short shards that have grown; ValueError if a shard was made from other prompts."""
    for spec in specs:
        path = rows_path(data.dir, spec.split, spec.index)
        for file in (path, stage_path(spec, data, "respond")):
            made = read_sidecar(file, keys=("prompts",))["prompts"] if sidecar_path(file).is_file() else spec.digests
            num = min(len(made), len(spec.digests))
            if made[:num] != spec.digests[:num]:
                sources = ", ".join(str(Path(source.path)) for source in data.prompt_sources)
                raise ValueError(
                    f"{spec.name} of {data.dir} was made from other prompts than {sources} has now; restore the "
                    f"earlier prompts, choose another data.dir, or delete {data.dir} to start over"
                )
            if num < len(spec.digests):
                sidecar_path(path).unlink(missing_ok=True)
                forget_stages([spec], data)


def is_done(spec: ShardSpec, data: DataConfig, stage: Stage = "together") -> bool:
    """Whether the result of this stage or the whole shard is on disk."""
    name = (spec.split, spec.index)
    states = [features_path(data.dir, timing, *name) for timing in data.feature_sets]
    if all(map(is_whole, [rows_path(data.dir, *name), labels_path(data.dir, *name), *states])):
        return True
    if stage in ("together", "target"):
        return False
    return all(map(is_whole, [stage_path(spec, data, stage), *(states if stage == "draft" else ())]))


def write_states(spec: ShardSpec, columns: Mapping[str, Tensor], num_rows: int, data: DataConfig) -> None:
    """Write the hidden states that `columns` has, one file per timing. Rows of other states are forgotten first."""
    sidecar_path(rows_path(data.dir, spec.split, spec.index)).unlink(missing_ok=True)
    for timing in data.feature_sets:
        if timing in columns:
            # if this run is killed, the stage draft is made again: its result has other states
            sidecar_path(stage_path(spec, data, "draft")).unlink(missing_ok=True)
            content = safetensors.torch.save({"hidden": columns[timing].contiguous()})
            times = data.mixes if timing == "fed" else 1
            path = features_path(data.dir, timing, spec.split, spec.index)
            write_shard(path, content, rows=num_rows * times, tokens=len(columns[timing]))


def read_states(spec: ShardSpec, data: DataConfig) -> dict[str, Tensor]:
    """The hidden states on disk, by timing."""
    paths = {timing: features_path(data.dir, timing, spec.split, spec.index) for timing in data.feature_sets}
    return {timing: safetensors.torch.load_file(path)["hidden"] for timing, path in paths.items()}


def write_files(
    spec: ShardSpec,
    answers: Answers,
    *,
    columns: Mapping[str, Tensor],
    layout: Layout | None = None,
    rows_columns: Mapping[str, Tensor] | None = None,
    data: DataConfig,
) -> None:
    """Write the hidden states, the labels and then the rows of a shard, so that rows on disk always have both; the
    sidecar of the rows has the outcome of every prompt. A feature draft, whose labels are not those of the response
    tokens, needs `layout` and `rows_columns` too.
    """
    num_rows, written = len(answers.exchanges), (data.dir, spec.split, spec.index)
    layout = layout or layout_of(answers.exchanges)
    write_states(spec, columns, num_rows, data)
    content = labels.to_safetensors(columns, layout)
    write_shard(labels_path(*written), content, rows=num_rows, tokens=layout.num_tokens)
    columns, has_sets = rows_columns or columns, len(sources_of(data)) > 1
    table = rows.to_parquet(answers.exchanges, columns, mixes=data.mixes, has_sets=has_sets)
    problems = [problem._asdict() for problem in answers.problems]
    account = {"prompts": spec.digests, "input": spec.num_requests, "ok": num_rows, "problems": problems}
    sizes = {"batch_size": data.batch_size, "chunk_mb": data.chunk_mb}  # the rounding of forwards depends on them
    num_tokens = layout_of(answers.exchanges).num_tokens
    write_shard(rows_path(*written), table, rows=num_rows, tokens=num_tokens, **account, **sizes)
    forget_stages([spec], data)


def kept_responses(spec: ShardSpec, data: DataConfig) -> dict[str, Exchange]:
    """The responses of a shard that is on disk, by row id."""
    table = rows.read_rows(rows_path(data.dir, spec.split, spec.index), _FACTS)
    return {row["id"]: Exchange(**row) for row in table.to_pylist()}


def save(spec: ShardSpec, stage: Stage, answers: Answers, columns: Mapping[str, Tensor], data: DataConfig) -> None:
    """Save the result of the stage `respond` or `draft`: first the hidden states, then the rest in one file."""
    write_states(spec, columns, len(answers.exchanges), data)
    small = {name: values for name, values in columns.items() if name not in data.feature_sets}
    metadata = {
        "exchanges": json.dumps([dict(zip(_FACTS, exchange, strict=False)) for exchange in answers.exchanges]),
        "problems": json.dumps([problem._asdict() for problem in answers.problems]),
    }
    content = safetensors.torch.save(small, metadata=metadata)
    write_shard(stage_path(spec, data, stage), content, prompts=spec.digests)


def answers_in(path: Path) -> Answers:
    """The answers in a file of the stage `respond` or `draft`."""
    with safe_open(path, framework="pt") as file:
        turns = {name: json.loads(text) for name, text in file.metadata().items()}
    return Answers([Exchange(**turn) for turn in turns["exchanges"]], [Problem(**turn) for turn in turns["problems"]])


def forget_stages(specs: Iterable[ShardSpec], data: DataConfig) -> None:
    """Remove the results of the earlier stages of complete shards."""
    for path in [stage_path(spec, data, stage) for spec in specs for stage in ("respond", "draft")]:
        for file in (path, sidecar_path(path)):
            file.unlink(missing_ok=True)


def stage_path(spec: ShardSpec, data: DataConfig, stage: str) -> Path:
    """The result of the stage `respond` or `draft`."""
    return Path(data.dir) / "stages" / stage / f"{spec.name}.safetensors"

"""A trace on disk: shards of prompts under one manifest.

    DIR/manifest.json, DIR/errors.jsonl
    DIR/{dataset}/rows/{split}-{index:05d}.parquet              id, category, prompt, prompt_ids, response_ids, limit
    DIR/{dataset}/signals/{split}-{index:05d}.safetensors       the columns of `evaluation.traces.trace.Trace`, path
        first, then branches

Further draws of the coins for the same prompts are separate shards, {split}-{index:05d}-draw{draw} from draw 1 on.
Written atomically with sidecars (`store.shards`): present means complete. The sidecar of the rows has a digest of each
prompt (`evaluation.traces.prompts`).
"""

import json
import shutil
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import safetensors.torch
import torch
from safetensors import safe_open

from configs.paths import local_path
from data_gen.store.manifest import num_prompts, read_manifest
from evaluation.traces.trace import InputTensors, Trace, TraceRow, join_traces, whole_piece
from heads.model.head import AcceptanceHead
from lm import Sampling
from store.shards import atomic_directory, check_sums, is_whole, read_sidecar, sidecar_path, write_atomic, write_shard

_ROWS = pa.schema(
    {
        "id": pa.string(),
        "category": pa.string(),
        "prompt_ids": pa.list_(pa.int32()),
        "response_ids": pa.list_(pa.int32()),
        "limit": pa.int32(),
    }
)
_PER_POSITION = ("is_rejected", "branch_lengths", "acceptance_rate", "num_passing")
"""Columns of a file of signals that are `Trace.positions`; what else it has, except inputs, is `Trace.drafts`."""


class ShardKey(NamedTuple):
    """Address of one shard."""

    dataset: str
    split: str
    shard: int
    draw: int = 0
    """Number of the draw of the coins, each independent of the others."""

    def paths(self, directory: Path) -> tuple[Path, Path]:
        """The files of the shard's rows and of its signals."""
        name = f"{self.split}-{self.shard:05d}" + (f"-draw{self.draw}" if self.draw else "")
        folder = directory / self.dataset
        return folder / "rows" / f"{name}.parquet", folder / "signals" / f"{name}.safetensors"

    def whole(self, directory: Path) -> list[Path]:
        """The files of the shard that are complete on disk."""
        return list(filter(is_whole, self.paths(directory)))

    def is_done(self, directory: Path) -> bool:
        return len(self.whole(directory)) == 2


def recorded_keys(directory: Path) -> list[ShardKey]:
    """The first draw of every shard of a trace, as its manifest lists them."""
    manifest = read_manifest(directory, command="trace", keys=["prompts_per_shard"])
    if "split" in manifest:
        size = manifest["prompts_per_shard"]
        num_shards = {part: -(-num_prompts(manifest, part) // size) for part in manifest["split"]}
    else:  # format 1
        num_shards = read_manifest(directory, command="trace", keys=["recorded"])["recorded"]["num_shards"]
    parts = [(part.rpartition("."), num) for part, num in num_shards.items()]
    return [ShardKey(dataset, split, index) for (dataset, _, split), num in parts for index in range(num)]


def _without_unfinished(keys: Sequence[ShardKey], directory: Path) -> list[ShardKey]:
    """The shards up to the last one of each split that is there: a run for more prompts may have been stopped."""
    last: dict[tuple[str, str], int] = {}
    for key in keys:
        if key.paths(directory)[0].is_file():
            last[key.dataset, key.split] = key.shard
    return [key for key in keys if key.shard <= last.get((key.dataset, key.split), key.shard)]


def _prompts_of_splits(keys: Sequence[ShardKey], directory: Path) -> dict[str, dict[str, int]]:
    """The entry "split" of a manifest of these shards."""
    prompts: Counter[str] = Counter()
    for key in keys:
        facts = read_sidecar(key.paths(directory)[0])
        prompts[f"{key.dataset}.{key.split}"] += len(facts.get("prompts", ())) or facts["rows"]
    return {part: {"prompts": number} for part, number in prompts.items()}


def write_trace(
    directory: Path,
    key: ShardKey,
    trace: Trace | None,
    problems: Sequence[Mapping[str, str]],
    *,
    prompts: Sequence[str] = (),
) -> None:
    """Write one shard from the prompts with these digests; `trace` is None when none of them has a response."""
    rows_path, signals_path = key.paths(directory)
    sidecar_path(rows_path).unlink(missing_ok=True)  # earlier rows have other signals than these
    columns: dict[str, Any] = {}
    rows = () if trace is None else trace.rows
    if trace is not None:
        arrays = trace.positions | trace.drafts | {"branch_lengths": trace.branch_lengths[trace.is_rejected]}
        del arrays["is_eos"]
        narrow = {name: values.astype(np.int32) for name, values in arrays.items() if values.dtype == np.int64}
        sizes = {} if trace.block_size is None else {"block_size": np.array([trace.block_size])}
        columns = {name: torch.from_numpy(np.ascontiguousarray(v)) for name, v in (arrays | narrow | sizes).items()}
        columns |= trace.inputs()._asdict() if trace.pieces else {}
    content = safetensors.torch.save({name: tensor.contiguous() for name, tensor in columns.items()})
    write_shard(signals_path, content, rows=len(rows))
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist([vars(row) for row in rows], schema=_ROWS), sink, compression="zstd")
    write_shard(
        rows_path,
        bytes(sink.getvalue()),
        rows=len(rows),
        tokens=sum(len(row.response_ids) for row in rows),
        prompts=list(prompts),
        problems=list(problems),
    )


def read_trace(directory: Path, keys: Sequence[ShardKey], *, ids: Container[str] | None = None) -> Trace:
    """Some shards as one trace, or their rows of these ids; what heads read stays on disk until one needs it.
    FileNotFoundError if a shard is missing, ValueError if one is corrupted or no prompt has a response.
    """
    manifest = read_manifest(directory, command="trace")
    paths = list(chain.from_iterable(key.paths(directory) for key in keys))
    if missing := [path for path in paths if not path.is_file()]:
        raise FileNotFoundError(
            f"{missing[0]} is missing; run `acceptance-heads trace` with this config to continue, or copy all files of "
            "the recorded trace"
        )
    check_sums(paths, command="trace")
    traces = [trace for key in keys if (trace := read_shard(directory, key, manifest)) is not None]
    trace = join_traces(traces) if traces else None
    names = [] if trace is None else [row.id for row in trace.rows]
    rows = [number for number, name in enumerate(names) if ids is None or name in ids]
    if trace is None or not rows:
        raise ValueError(f"no prompt of these shards has a response; see {directory / 'errors.jsonl'}")
    return trace if len(rows) == len(names) else trace.select(rows)


def read_shard(directory: Path, key: ShardKey, manifest: Mapping[str, Any]) -> Trace | None:
    """One shard as a trace, its sums unchecked; None if none of its prompts has a response."""
    rows_path, path = key.paths(directory)
    if not (table := pq.read_table(rows_path).to_pylist()):
        return None
    lists = ("prompt_ids", "response_ids")
    rows = [TraceRow(**row | {name: tuple(row[name]) for name in lists}, dataset=key.dataset) for row in table]
    with safe_open(path, framework="pt") as file:
        has_inputs = "hidden" in file.keys()  # noqa: SIM118
        names = sorted(set(file.keys()).difference(InputTensors._fields))
        arrays: dict[str, np.ndarray] = {name: file.get_tensor(name).numpy() for name in names}
    arrays |= {name: values.astype(np.int64) for name, values in arrays.items() if values.dtype == np.int32}
    positions = {name: arrays.pop(name) for name in _PER_POSITION if name in arrays}
    block_size = arrays.pop("block_size", None)
    lengths = np.zeros(len(positions["is_rejected"]), dtype=np.int64)
    lengths[positions["is_rejected"]] = positions["branch_lengths"]
    return Trace(
        rows=tuple(rows),
        sampling=Sampling(**manifest["sampling"]),
        draft_sampling=Sampling(**manifest["draft_sampling"]) if "draft_sampling" in manifest else None,
        max_draft_length=manifest["max_draft_length"],
        drafts=arrays | {"is_eos": np.isin(arrays["token"], manifest["eos_ids"])},
        positions=positions | {"branch_lengths": lengths},
        pieces=(whole_piece(partial(_inputs, path), len(arrays["token"])),) if has_inputs else (),
        block_size=None if block_size is None else int(block_size[0]),
    )


def _inputs(path: Path) -> InputTensors:
    with safe_open(path, framework="pt") as file:
        return InputTensors(*map(file.get_tensor, InputTensors._fields))


def without_hidden(trace: Trace, heads: Sequence[AcceptanceHead]) -> Trace:
    """A trace that has the logits of some heads instead of the hidden states that other heads would need."""
    trace.score(heads)
    return replace(trace, pieces=())


def record(*, decode_dir: str, out: str, heads: tuple[str, ...] = ()) -> None:
    """Copy a trace and its times for others to evaluate, replay and tune on (`--decode.as_recorded true`), without
    prompts and hidden states.

    Args:
        decode_dir: decode.dir of the evaluation; its trace has first draws only, and hidden states.
        out: the folder that becomes another decode.dir.
        heads: directories of the heads whose logits the copy holds.
    """
    source = local_path(decode_dir, "--decode_dir")
    directory = local_path(out, "--out")
    if directory.exists():
        raise ValueError(f"{directory} exists already; choose another --out, or delete it")
    trace = source / "trace"
    scorers = [AcceptanceHead.from_pretrained(path).eval() for path in heads]
    manifest = read_manifest(trace, command="trace")
    keys = _without_unfinished(recorded_keys(trace), trace)
    check_sums([path for key in keys for path in key.paths(trace)], command="trace")
    with atomic_directory(directory) as unfinished:
        if (source / "costs.jsonl").is_file():
            shutil.copy(source / "costs.jsonl", unfinished)
        copied: dict[str, Any] = {**manifest, "trace_hidden": False, "heads": list(heads)}
        if "split" in manifest:
            copied["split"] = _prompts_of_splits(keys, trace)
        write_atomic(unfinished / "trace" / "manifest.json", json.dumps(copied, indent=1).encode())
        for key in keys:
            if (content := read_shard(trace, key, manifest)) is not None:
                rows = tuple(replace(row, prompt_ids=()) for row in content.rows)
                content = replace(without_hidden(content, scorers), rows=rows)
            facts = read_sidecar(key.paths(trace)[0])
            write_trace(unfinished / "trace", key, content, facts["problems"], prompts=facts.get("prompts", ()))
    num_bytes = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    print(f"{directory}: {len(keys)} shards, logits of {len(heads)} heads, {num_bytes / 1e6:.1f} MB")

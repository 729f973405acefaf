"""A trace on disk: shards of prompts, each a Parquet file of rows and a safetensors file of signals, under one manifest (design section 6).

    DIR/manifest.json, DIR/errors.jsonl
    DIR/{dataset}/rows/{split}-{index:05d}.parquet              id, category, prompt, prompt_ids, response_ids, limit
    DIR/{dataset}/signals/{split}-{index:05d}.safetensors       the arrays of `decode.traces.trace.Trace`, path first, then branches

Written atomically with sidecars (`data_gen.store.shards`): present means whole.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import safetensors.torch
import torch
from torch import Tensor

from data_gen.store import manifest as data_manifest
from data_gen.store.shards import is_whole, verify, write_shard
from decode.traces.trace import TokenInputs, Trace, TraceRow, join
from lm import Sampling

_SIGNALS = ("entropy", "max_prob", "log_token_prob", "acceptance_prob")
_ROWS = pa.schema(
    {
        "id": pa.string(),
        "category": pa.string(),
        "prompt_ids": pa.list_(pa.int32()),
        "response_ids": pa.list_(pa.int32()),
        "limit": pa.int32(),
    }
)


def settle(directory: Path, manifest: Mapping[str, Any]) -> None:
    """Write the manifest of a new directory, or compare it with the one that is there; raises ValueError where they differ."""
    data_manifest.settle(directory, manifest, setting="decode.dir")


def read_manifest(directory: Path) -> dict[str, Any]:
    """What a trace was recorded with.

    Raises:
        FileNotFoundError: nothing was recorded there.
    """
    path = directory / "manifest.json"
    if not path.is_file():
        raise FileNotFoundError(f"no {path}: run `python -m decode trace` with this config first")
    return dict(json.loads(path.read_text()))


def shard_paths(directory: Path, dataset: str, split: str, index: int) -> tuple[Path, Path]:
    """Rows and signals of one shard."""
    name = f"{split}-{index:05d}"
    return directory / dataset / "rows" / f"{name}.parquet", directory / dataset / "signals" / f"{name}.safetensors"


def is_done(directory: Path, dataset: str, split: str, index: int) -> bool:
    """Whether a shard is there and whole."""
    return all(map(is_whole, shard_paths(directory, dataset, split, index)))


def write_trace(
    directory: Path, dataset: str, split: str, index: int, *, trace: Trace | None, problems: Sequence[Mapping[str, str]]
) -> None:
    """Write one shard; `trace` is None when no prompt of it could be answered."""
    rows_path, signals_path = shard_paths(directory, dataset, split, index)
    tensors = {} if trace is None else _tensors(trace)
    rows = () if trace is None else trace.rows
    write_shard(signals_path, safetensors.torch.save(tensors), rows=len(rows))
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist([vars(row) for row in rows], schema=_ROWS), sink, compression="zstd")
    num_tokens = sum(len(row.response_ids) for row in rows)
    write_shard(rows_path, bytes(sink.getvalue()), rows=len(rows), tokens=num_tokens, problems=list(problems))


def read_trace(directory: Path, dataset: str, split: str, num_shards: int) -> Trace:
    """All shards of one split as one trace.

    Raises:
        FileNotFoundError: a shard is missing.
        ValueError: one is corrupted; no prompt could be answered.
    """
    manifest = read_manifest(directory)
    traces = []
    for index in range(num_shards):
        paths = shard_paths(directory, dataset, split, index)
        for path in paths:
            if not path.is_file():
                raise FileNotFoundError(f"no {path}: run `python -m decode trace` with this config to go on")
            verify(path)
        rows = pq.read_table(paths[0]).to_pylist()
        if rows:
            traces.append(_trace(rows, safetensors.torch.load_file(paths[1]), manifest))
    if not traces:
        raise ValueError(f"none of the {split} prompts of {dataset} could be answered; see {directory / 'errors.jsonl'}")
    return join(traces)


def _tensors(trace: Trace) -> dict[str, Tensor]:
    arrays = {
        "token": trace.token,
        "is_rejected": trace.is_rejected,
        "acceptance_rate": trace.acceptance_rate,
        "branch_lengths": trace.branch_lengths.astype(np.int32),
        **trace.signals,
        **{f"score.{name}": logit for name, logit in trace.scores.items()},
    }
    tensors = {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in arrays.items()}
    if trace.inputs is not None:
        tensors |= {name: tensor.contiguous() for name, tensor in vars(trace.inputs).items()}
    return tensors


def _trace(rows: Sequence[Mapping[str, Any]], tensors: dict[str, Tensor], manifest: Mapping[str, Any]) -> Trace:
    arrays = {name: tensor.numpy() for name, tensor in tensors.items() if name not in TokenInputs.__dataclass_fields__}
    inputs = TokenInputs(**{name: tensors[name] for name in TokenInputs.__dataclass_fields__}) if "hidden" in tensors else None
    return Trace(
        tuple(TraceRow(row["id"], row["category"], tuple(row["prompt_ids"]), tuple(row["response_ids"]), row["limit"]) for row in rows),
        Sampling(**manifest["sampling"]),
        manifest["max_draft_length"],
        arrays["token"],
        np.isin(arrays["token"], manifest["eos_ids"]),
        {name: arrays[name] for name in _SIGNALS},
        arrays["is_rejected"],
        arrays["acceptance_rate"],
        arrays["branch_lengths"].astype(np.int64),
        inputs,
        {name.removeprefix("score."): values for name, values in arrays.items() if name.startswith("score.")},
    )

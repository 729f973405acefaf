"""A trace on disk: shards of prompts, each a Parquet file of rows and a safetensors file of signals, under one
manifest.

    DIR/manifest.json, DIR/errors.jsonl
    DIR/{dataset}/rows/{split}-{index:05d}.parquet              id, category, prompt, prompt_ids, response_ids, limit
    DIR/{dataset}/signals/{split}-{index:05d}.safetensors       the arrays of `evaluation.traces.trace.Trace`, path
        first, then branches

Further draws of the coins for the same prompts are shards of their own, {split}-{index:05d}-draw{draw} from draw 1 on.
Written atomically with sidecars (`store.shards`): present means whole.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor

from data_gen.store.manifest import read_manifest
from evaluation.traces.branches import signal_names
from evaluation.traces.inputs import InputTensors, TokenInputs
from evaluation.traces.trace import CONFIDENCE, Trace, TraceRow, join_traces
from lm import Sampling
from store.shards import check_sums, is_whole, write_shard

_ROWS = pa.schema(
    {
        "id": pa.string(),
        "category": pa.string(),
        "prompt_ids": pa.list_(pa.int32()),
        "response_ids": pa.list_(pa.int32()),
        "limit": pa.int32(),
    }
)


class Place(NamedTuple):
    """Address of one shard."""

    dataset: str
    split: str
    shard: int
    draw: int = 0
    """Number of the coins, each independent of the others."""

    def paths(self, directory: Path) -> tuple[Path, Path]:
        """Paths of the shard's rows and signals."""
        name = f"{self.split}-{self.shard:05d}" + (f"-draw{self.draw}" if self.draw else "")
        folder = directory / self.dataset
        return folder / "rows" / f"{name}.parquet", folder / "signals" / f"{name}.safetensors"

    def is_done(self, directory: Path) -> bool:
        """Is the shard there and whole?"""
        return all(map(is_whole, self.paths(directory)))


def places_in(directory: Path, dataset: str, split: str) -> list[Place]:
    """The shards of a split that are there, first draws alone."""
    paths = sorted((directory / dataset / "rows").glob(f"{split}-?????.parquet"))
    return [Place(dataset, split, int(path.stem.rpartition("-")[2])) for path in paths]


def write_trace(directory: Path, place: Place, *, trace: Trace | None, problems: Sequence[Mapping[str, str]]) -> None:
    """Write one shard; `trace` is None when no prompt of it could be answered."""
    rows_path, signals_path = place.paths(directory)
    tensors = {} if trace is None else _tensors(trace)
    rows = () if trace is None else trace.rows
    write_shard(signals_path, safetensors.torch.save(tensors), rows=len(rows))
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist([vars(row) for row in rows], schema=_ROWS), sink, compression="zstd")
    num_tokens = sum(len(row.response_ids) for row in rows)
    write_shard(rows_path, bytes(sink.getvalue()), rows=len(rows), tokens=num_tokens, problems=list(problems))


def read_trace(directory: Path, dataset: str, split: str, num_shards: int, *, num_draws: int = 1) -> Trace:
    """All shards of one split as one trace, draw after draw; what heads read stays on disk until one asks for it.

    Raises:
        FileNotFoundError: a shard is missing.
        ValueError: one is corrupted; no prompt could be answered.
    """
    manifest = read_manifest(directory, command="trace")
    places = [Place(dataset, split, index, draw) for draw in range(num_draws) for index in range(num_shards)]
    paths = [place.paths(directory) for place in places]
    for path in chain.from_iterable(paths):
        if not path.is_file():
            raise FileNotFoundError(f"no {path}: run `acceptance-heads trace` with this config to go on")
    check_sums(chain.from_iterable(paths), command="trace")
    traces = [trace for place in places if (trace := read_shard(directory, place, manifest)) is not None]
    if not traces:
        raise ValueError(
            f"none of the {split} prompts of {dataset} could be answered; see {directory / 'errors.jsonl'}"
        )
    return join_traces(traces)


def read_shard(directory: Path, place: Place, manifest: Mapping[str, Any]) -> Trace | None:
    """One shard as a trace, its sums not looked at; None where no prompt of it could be answered."""
    rows_path, signals_path = place.paths(directory)
    rows = pq.read_table(rows_path).to_pylist()
    return _trace([_row(row, place.dataset) for row in rows], signals_path, manifest) if rows else None


def _tensors(trace: Trace) -> dict[str, Tensor]:
    arrays = {
        "token": trace.token,
        "is_rejected": trace.is_rejected,
        "acceptance_rate": trace.acceptance_rate,
        "branch_lengths": trace.branch_lengths.astype(np.int32),
        **trace.signals,
        **{f"score.{name}": logit for name, logit in trace.scores.items()},
    }
    if trace.num_passing is not None:
        arrays["num_passing"] = trace.num_passing.astype(np.int32)
    if trace.block_size is not None:
        arrays["block_size"] = np.array([trace.block_size])
    tensors = {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in arrays.items()}
    if trace.inputs is not None:
        tensors |= {name: tensor.contiguous() for name, tensor in trace.inputs.tensors._asdict().items()}
    return tensors


def _row(row: Mapping[str, Any], dataset: str) -> TraceRow:
    return TraceRow(
        row["id"], row["category"], tuple(row["prompt_ids"]), tuple(row["response_ids"]), row["limit"], dataset
    )


def _trace(rows: Sequence[TraceRow], path: Path, manifest: Mapping[str, Any]) -> Trace:
    with safe_open(path, framework="pt") as file:
        names = set(file.keys())
        arrays = {name: file.get_tensor(name).numpy() for name in sorted(names.difference(InputTensors._fields))}
    return Trace(
        rows=tuple(rows),
        sampling=Sampling(**manifest["sampling"]),
        draft_sampling=Sampling(**manifest["draft_sampling"]) if "draft_sampling" in manifest else None,
        max_draft_length=manifest["max_draft_length"],
        token=arrays["token"],
        is_eos=np.isin(arrays["token"], manifest["eos_ids"]),
        # a scalar that there was not when the trace was recorded is missed by the heads that read it
        signals={name: arrays[name] for name in (*signal_names(), "acceptance_prob", CONFIDENCE) if name in arrays},
        is_rejected=arrays["is_rejected"],
        acceptance_rate=arrays["acceptance_rate"],
        branch_lengths=arrays["branch_lengths"].astype(np.int64),
        inputs=TokenInputs(lambda: _inputs(path)) if "hidden" in names else None,
        scores={name.removeprefix("score."): values for name, values in arrays.items() if name.startswith("score.")},
        num_passing=arrays["num_passing"].astype(np.int64) if "num_passing" in names else None,
        block_size=int(arrays["block_size"][0]) if "block_size" in names else None,
    )


def _inputs(path: Path) -> InputTensors:
    with safe_open(path, framework="pt") as file:
        return InputTensors(*map(file.get_tensor, InputTensors._fields))

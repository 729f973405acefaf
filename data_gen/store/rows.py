"""Rows on disk: one Parquet row per response, per-position columns as lists.

    id, prompt, finish_reason            strings; finish_reason is stop, length or null
    prompt_ids, response_ids, draft_ids  lists of int32
    acceptance_prob, log_p, log_q, acceptance_rate
                                         lists of float16, one number per response token
    entropy, cross_entropy               the same as float32, rounded to 15 bits of mantissa
    from_target                          list of bool; with mixes > 1 a list of such lists, one per mix
    set                                  the name of the row's prompt set; only if there are several

log_p may be -inf: with top-k or top-p the target can give Y no probability at all. A column that a run cannot compute
is null.

Each shard's sidecar lists its problems, the prompts without a row: ok + error + skipped = input. errors.jsonl is built
from the sidecars when a run ends.

float16 moves an acceptance_prob or rate by less than 0.0003, and a log probability near -8 by 0.004; the entropies keep
2^-16, because their difference is a divergence near zero. Heads read the exact numbers of labels/ instead. `read_rows`
returns float32.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from data_gen.responses.exchange import Exchange
from store.shards import SIDECAR_REMEDY, read_sidecar, sidecar_path, write_atomic

_HALVES, _ENTROPIES = ("acceptance_prob", "log_p", "log_q", "acceptance_rate"), ("entropy", "cross_entropy")
POSITION_COLUMNS = (*_HALVES, *_ENTROPIES)
_COUNTS = ("input", "ok", "tokens")
_IDS = ("prompt_ids", "response_ids", "draft_ids")
_WRITTEN: dict[str, Any] = {
    "compression": "zstd",
    "compression_level": 9,
    "use_dictionary": False,
    # numbers rarely repeat but share their high bytes, so splitting them by byte compresses well
    "use_byte_stream_split": [f"{name}.list.element" for name in (*_IDS, *POSITION_COLUMNS)],
    # no reader searches by value, and statistics would be most of a small file
    "write_statistics": False,
    "store_schema": False,
}
COLUMNS = ("id", "prompt", "prompt_ids", "response_ids", "draft_ids", *POSITION_COLUMNS, "from_target", "finish_reason")


def to_parquet(
    exchanges: Sequence[Exchange],
    columns: Mapping[str, Tensor],
    *,
    from_target: Tensor | None,
    mixes: int = 1,
    has_sets: bool = False,
) -> bytes:
    """The Parquet file of one shard; the same rows give the same bytes.

    `columns`: draft_ids and `POSITION_COLUMNS`, each [token] over all rows, null if absent; `from_target`: the coins,
    [token of every mixing]. With `has_sets` ids begin with the name of the prompt's set.
    """
    lengths = [len(exchange.response_ids) for exchange in exchanges]
    arrays: dict[str, pa.Array] = {
        "id": pa.array([exchange.id for exchange in exchanges], pa.string()),
        "prompt": pa.array([exchange.prompt for exchange in exchanges], pa.string()),
        "prompt_ids": pa.array([exchange.prompt_ids for exchange in exchanges], pa.list_(pa.int32())),
        "response_ids": pa.array([exchange.response_ids for exchange in exchanges], pa.list_(pa.int32())),
        "draft_ids": _lists(columns["draft_ids"], lengths, pa.int32()),
        **{name: _lists(columns.get(name), lengths, pa.float16()) for name in _HALVES},
        **{name: _lists(_rounded(columns.get(name)), lengths, pa.float32()) for name in _ENTROPIES},
        "from_target": _coins(from_target, lengths, mixes),
        "finish_reason": pa.array([exchange.finish_reason for exchange in exchanges], pa.string()),
    }
    table = pa.table({name: arrays[name] for name in COLUMNS})
    if has_sets:
        table = table.append_column(
            "set", pa.array([exchange.id.partition("/")[0] for exchange in exchanges], pa.string())
        )
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, **_WRITTEN)
    return bytes(sink.getvalue())


def read_rows(path: str | Path, columns: Sequence[str] | None = None) -> pa.Table:
    """The rows of one shard, or some of their columns; every number as float32."""
    table = pq.read_table(path, columns=None if columns is None else list(columns))
    wide = [
        pa.field(field.name, pa.list_(pa.float32()) if field.name in _HALVES else field.type) for field in table.schema
    ]
    return table.cast(pa.schema(wide))


def account(paths: Iterable[Path]) -> dict[str, int]:
    """Totals of input, ok, error, skipped (prompts, turn by turn) and tokens over some shards of rows."""
    totals = Counter(dict.fromkeys((*_COUNTS, "error", "skipped"), 0))
    for path in paths:
        facts = read_sidecar(path, keys=(*_COUNTS, "problems"))
        try:
            outcomes = [problem["outcome"] for problem in facts["problems"]]
        except (TypeError, KeyError) as error:
            raise ValueError(f"{sidecar_path(path)}: problems have another form; {SIDECAR_REMEDY}") from error
        if facts["ok"] + len(outcomes) != facts["input"]:
            raise ValueError(f"{sidecar_path(path)}: some prompts have neither a row nor a reason; {SIDECAR_REMEDY}")
        totals.update({name: facts[name] for name in _COUNTS})
        totals.update({name: outcomes.count(name) for name in ("error", "skipped")})
    return dict(totals)


def has_errors(path: Path) -> bool:
    """Whether a prompt of this shard of rows ended in an error (a skipped prompt did not)."""
    return any(problem["outcome"] == "error" for problem in read_sidecar(path, keys=("problems",))["problems"])


def write_errors(directory: str | Path, paths: Iterable[Path], unreadable: Mapping[str, str] | None = None) -> None:
    """Write DIR/errors.jsonl, one {id, outcome, reason, shard} per line, in the order of the shards of rows in `paths`.
    `unreadable`: location -> reason of each record of data.prompts that cannot be read.
    """
    unread = [{"id": where, "outcome": "error", "reason": reason} for where, reason in (unreadable or {}).items()]
    lines = [json.dumps({**problem, "shard": None}) + "\n" for problem in unread]
    lines += [
        json.dumps({**problem, "shard": path.stem}) + "\n"
        for path in paths
        for problem in read_sidecar(path)["problems"]
    ]
    write_atomic(Path(directory) / "errors.jsonl", "".join(lines).encode())


def _lists(values: Tensor | None, lengths: Sequence[int], kind: pa.DataType) -> pa.Array:
    """[token] -> one list per row; null lists for None."""
    if values is None:
        return pa.nulls(len(lengths), pa.list_(kind))
    values = values.half() if kind == pa.float16() else values
    return pa.ListArray.from_arrays(_offsets(lengths), pa.array(values.numpy(), kind))


def _rounded(values: Tensor | None) -> Tensor | None:
    """The nearest float32 with 15 bits of mantissa; its last byte is zero and takes no space."""
    if values is None:
        return None
    return ((values.float().contiguous().view(torch.int32) + 0x80) & ~0xFF).view(torch.float32)


def _coins(from_target: Tensor | None, lengths: Sequence[int], mixes: int) -> pa.Array:
    """One list of coins per row, or with several mixings a list of such lists."""
    if mixes == 1 or from_target is None:
        return _lists(from_target, lengths, pa.bool_())
    inner = _lists(from_target, [length for length in lengths for _ in range(mixes)], pa.bool_())
    return pa.ListArray.from_arrays(_offsets([mixes] * len(lengths)), inner)


def _offsets(lengths: Sequence[int]) -> pa.Array:
    return pa.array(accumulate(lengths, initial=0), pa.int32())

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
from store.shards import SIDECAR_REMEDY, read_sidecar, sidecar_path

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
    exchanges: Sequence[Exchange], columns: Mapping[str, Tensor], *, mixes: int = 1, has_sets: bool = False
) -> bytes:
    """The Parquet file of one shard; the same rows give the same bytes.

    `columns`: draft_ids and `POSITION_COLUMNS`, each [token] over all rows, and from_target [token of every mixing];
    null if absent. With `has_sets` ids begin with the name of the prompt's set.
    """
    lengths = [len(exchange.response_ids) for exchange in exchanges]
    kinds = {"draft_ids": pa.int32()} | dict.fromkeys(_HALVES, pa.float16()) | dict.fromkeys(_ENTROPIES, pa.float32())
    arrays = {name: _lists(columns.get(name), lengths, kind) for name, kind in kinds.items()}
    arrays["from_target"] = _lists(columns.get("from_target"), lengths, pa.bool_(), mixes)
    for name in ("id", "prompt", "finish_reason"):
        arrays[name] = pa.array([getattr(exchange, name) for exchange in exchanges], pa.string())
    for name in ("prompt_ids", "response_ids"):
        arrays[name] = pa.array([getattr(exchange, name) for exchange in exchanges], pa.list_(pa.int32()))
    table = pa.table({name: arrays[name] for name in COLUMNS})
    if has_sets:
        sets = [exchange.id.partition("/")[0] for exchange in exchanges]
        table = table.append_column("set", pa.array(sets, pa.string()))
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


def account(paths: Iterable[Path]) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """Totals of input, ok, error, skipped (prompts, turn by turn) and tokens over some shards of rows; and each prompt
    without a row as {id, outcome, reason, shard}, in order.
    """
    totals, problems = Counter(dict.fromkeys((*_COUNTS, "error", "skipped"), 0)), list[dict[str, Any]]()
    for path in paths:
        facts = read_sidecar(path, keys=(*_COUNTS, "problems"))
        try:
            totals.update([problem["outcome"] for problem in facts["problems"]])
        except (TypeError, KeyError) as error:
            raise ValueError(f"{sidecar_path(path)}: problems have another form; {SIDECAR_REMEDY}") from error
        if facts["ok"] + len(facts["problems"]) != facts["input"]:
            raise ValueError(f"{sidecar_path(path)}: some prompts have neither a row nor a reason; {SIDECAR_REMEDY}")
        totals.update({name: facts[name] for name in _COUNTS})
        problems += [{**problem, "shard": path.stem} for problem in facts["problems"]]
    return dict(totals), problems


def _lists(values: Tensor | None, lengths: Sequence[int], kind: pa.DataType, mixes: int = 1) -> pa.Array:
    """[token] -> one list per row, or with several mixings a list of such lists; null lists for None. float32 is
    rounded to 15 bits of mantissa, so that its last byte is zero and takes no space.
    """
    if values is None:
        return pa.nulls(len(lengths), pa.list_(kind))
    if mixes > 1:
        inner = _lists(values, [length for length in lengths for _ in range(mixes)], kind)
        return pa.ListArray.from_arrays(_offsets([mixes] * len(lengths)), inner)
    if kind == pa.float16():
        values = values.half()
    elif kind == pa.float32():
        values = ((values.float().contiguous().view(torch.int32) + 0x80) & ~0xFF).view(torch.float32)
    return pa.ListArray.from_arrays(_offsets(lengths), pa.array(values.numpy(), kind))


def _offsets(lengths: Sequence[int]) -> pa.Array:
    return pa.array(accumulate(lengths, initial=0), pa.int32())

"""A shard on disk: rows for readers in Parquet, and labels for heads in safetensors.

docs/files.md has the columns of rows/*.parquet, one row per response, and the tensors of labels/, which have
every number exactly. Beyond it:

log_p may be -inf: with top-k or top-p the target can give Y no probability at all. A column that a run cannot
compute is null, and its tensor absent: acceptance_rate in a sequential run whose labels are the target's.
float16 moves an acceptance_prob or rate by less than 0.0003, and a log probability near -8 by 0.004; the
entropies, float32 rounded to 15 bits of mantissa, keep 2^-16, because their difference is a divergence near
zero. `read_rows` returns float32. The sidecar lists the problems, the prompts without a row: ok + error +
skipped = input.

Tensors are float32, `token` int32, offsets and lengths int64; is_drafted is true where Z_i came from Y. With a
feature draft (`data_gen.labels.chains`) a response has the tokens of all its drafts, draft after draft, all of
them drafted.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import safetensors.torch
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from data_gen.responses.exchange import Exchange
from lm.signals import stored_scalars
from store.shards import SIDECAR_REMEDY, read_sidecar, sidecar_path

_HALVES = ("acceptance_prob", "log_p", "log_q", "acceptance_rate")
_ENTROPIES = ("entropy", "cross_entropy")
POSITION_COLUMNS = (*_HALVES, *_ENTROPIES)
_COUNTS = ("input", "ok", "tokens")
_WRITTEN: dict[str, Any] = {
    "compression": "zstd",
    "compression_level": 9,
    "use_dictionary": False,
    # numbers rarely repeat but share their high bytes, so splitting them by byte compresses well
    "use_byte_stream_split": [
        f"{name}.list.element" for name in ("prompt_ids", "response_ids", "draft_ids", *POSITION_COLUMNS)
    ],
    # no reader searches by value, and statistics would be most of a small file
    "write_statistics": False,
    "store_schema": False,
}
COLUMNS = ("id", "prompt", "prompt_ids", "response_ids", "draft_ids", *POSITION_COLUMNS, "from_target", "finish_reason")


def to_parquet(exchanges: Sequence[Exchange], columns: Mapping[str, Tensor], *, has_sets: bool = False) -> bytes:
    """The Parquet file of one shard; the same rows give the same bytes.

    `columns`: draft_ids, `POSITION_COLUMNS` and from_target, each [token] over all rows; null if absent. With
    `has_sets` ids begin with the name of the prompt's set.
    """
    lengths = [len(exchange.response_ids) for exchange in exchanges]
    kinds = {"draft_ids": pa.int32(), "from_target": pa.bool_()}
    kinds |= dict.fromkeys(_HALVES, pa.float16()) | dict.fromkeys(_ENTROPIES, pa.float32())
    arrays = {name: _lists(columns.get(name), lengths, kind) for name, kind in kinds.items()}
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
    """Totals of input, ok, error, skipped (prompts, turn by turn) and tokens over some shards of rows; and each
    prompt without a row as {id, outcome, reason, shard}, in order.
    """
    totals = Counter(dict.fromkeys((*_COUNTS, "error", "skipped"), 0))
    problems = list[dict[str, Any]]()
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


def _lists(values: Tensor | None, lengths: Sequence[int], kind: pa.DataType) -> pa.Array:
    """[token] -> one list per row; null lists for None. float32 is rounded to 15 bits of mantissa, so that its
    last byte is zero and takes no space.
    """
    if values is None:
        return pa.nulls(len(lengths), pa.list_(kind))
    if kind == pa.float16():
        values = values.half()
    elif kind == pa.float32():
        values = ((values.float().contiguous().view(torch.int32) + 0x80) & ~0xFF).view(torch.float32)
    offsets = pa.array(accumulate(lengths, initial=0), pa.int32())
    return pa.ListArray.from_arrays(offsets, pa.array(values.numpy(), kind))


_NUMBERS = ("acceptance_prob", "log_q", *stored_scalars(), "acceptance_rate")


@dataclass(frozen=True)
class Layout:
    """Rows of `lengths` positions, one after the other.

    Worked example: lengths (2, 3) have offsets (0, 2, 5), and `positions([1, 0])` is 2 3 4 0 1.
    """

    lengths: tuple[int, ...]

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Row i covers offsets[i] to offsets[i + 1]; rows + 1 numbers."""
        return tuple(accumulate(self.lengths, initial=0))

    @property
    def num_tokens(self) -> int:
        """Number of positions in all rows."""
        return self.offsets[-1]

    def positions(self, rows: Sequence[int]) -> Int[Tensor, " token"]:
        """Flat positions of some rows, in the order of `rows`."""
        parts = [torch.arange(self.offsets[row], self.offsets[row + 1]) for row in rows]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)

    def rows_with(self, mask: Bool[Tensor, " token"]) -> dict[int, int]:
        """Row with a true position -> the first such position, counted from the row's start."""
        first: dict[int, int] = {}
        for position in mask.nonzero().squeeze(-1).tolist():
            row = bisect_right(self.offsets, position) - 1
            first.setdefault(row, position - self.offsets[row])
        return first


def layout_of(exchanges: Sequence[Exchange]) -> Layout:
    """The layout of some exchanges, with one position per response token."""
    return Layout(tuple(len(exchange.response_ids) for exchange in exchanges))


def to_safetensors(columns: Mapping[str, Tensor], layout: Layout) -> bytes:
    """The file of one shard's labels, from columns [token]; without from_target all tokens are drafted."""
    tensors = {name: columns[name].float() for name in _NUMBERS if name in columns}
    tensors |= {
        "target_prob": columns["log_p"].float().exp().clamp(max=1),
        "token": columns["draft_ids"].to(torch.int32),
        "is_drafted": ~columns.get("from_target", torch.zeros(layout.num_tokens, dtype=torch.bool)),
        "row_offsets": torch.tensor(layout.offsets, dtype=torch.int64),
    }
    if "draft_lengths" in columns:
        tensors["draft_lengths"] = columns["draft_lengths"]
    return safetensors.torch.save({name: tensor.contiguous() for name, tensor in tensors.items()})

"""Features on disk: one safetensors shard per timing, the hidden states beside everything that a head trains on.

    hidden [token, hidden]       feature dtype; fed: after feeding prompt + Z_<=i; drawn: over prompt + X_<i, which
                                 produced q_i
    acceptance_prob, target_prob (p_i(Y_i)), log_q, every scalar of `SCALARS`, acceptance_rate
                                 [token] float32, numbers of Y_i, both timings
    token [token] int32          Y_i, both timings
    is_drafted [token] bool      True where Z_i came from Y, so where the loss is taken; all True for drawn
    row_offsets [rows + 1] int64

With `mixes` > 1 each mixing is a row of the fed shard, row by row, then mix by mix. acceptance_rate is absent from a
sequential run whose labels are the target's.

A row of a feature draft (`data_gen.labels.chains`) has the tokens of all its drafts, draft after draft, and one more
tensor:

    draft_lengths [draft] int64     tokens of each draft, row by row; all of its tokens are drafted
"""

import json
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from data_gen.labels.chains import LabelledDrafts
from data_gen.labels.layout import Layout
from lm.signals import SCALARS


def to_safetensors(
    hidden: Tensor, columns: Mapping[str, Tensor], is_drafted: Tensor, layout: Layout, mixes: int = 1
) -> bytes:
    """The safetensors file of one shard.

    Args:
        hidden: [token, hidden] states in the layout of every mixing.
        columns: [token] columns of each row once; they are repeated here for each mixing.
        is_drafted: [token] flags in the layout of every mixing.
        layout: the layout of the rows, each once.
        mixes: rows per response.
    """
    order = layout.order(mixes)
    tensors = {name: values[order] for name, values in _floats(columns).items()}
    tensors |= {
        "hidden": hidden.contiguous(),
        "token": columns["draft_ids"].to(torch.int32)[order],
        "is_drafted": is_drafted.bool(),
        "row_offsets": torch.tensor(layout.repeated(mixes).offsets, dtype=torch.int64),
    }
    return safetensors.torch.save({name: tensor.contiguous() for name, tensor in tensors.items()})


def unlabelled(columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The columns of the stage `draft`, with zeros in place of the target's labels (`labels_at`)."""
    return {**columns, **dict.fromkeys(("acceptance_prob", "log_p"), torch.zeros(len(columns["draft_ids"])))}


def labels_at(path: Path, columns: Mapping[str, Tensor], layout: Layout, mixes: int = 1) -> dict[int, bytes]:
    """The target's labels for a shard that was written with `unlabelled` columns: byte offset -> bytes."""
    with path.open("rb") as file:  # a safetensors file: length of the header, header, tensors
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    order, floats = layout.order(mixes), _floats(columns)
    return {
        8 + length + header[name]["data_offsets"][0]: floats[name][order].numpy().tobytes()
        for name in ("acceptance_prob", "target_prob")
    }


def drafts_to_safetensors(drafts: LabelledDrafts, timing: str) -> bytes:
    """The safetensors file of one shard of a feature draft's drafts."""
    lengths = [length for row in drafts.lengths for length in row]
    tensors = _floats(drafts.columns)
    tensors |= {
        "hidden": drafts.hidden[timing],
        "token": drafts.columns["draft_ids"].to(torch.int32),
        "is_drafted": torch.ones(sum(lengths), dtype=torch.bool),
        "row_offsets": torch.tensor([0, *accumulate(map(sum, drafts.lengths))], dtype=torch.int64),
        "draft_lengths": torch.tensor(lengths, dtype=torch.int64),
    }
    return safetensors.torch.save({name: tensor.contiguous() for name, tensor in tensors.items()})


def _floats(columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
    target_prob = columns["log_p"].float().exp().clamp(max=1)
    names = ("acceptance_prob", "log_q", *SCALARS, "acceptance_rate")
    return {name: columns[name].float() for name in names if name in columns} | {"target_prob": target_prob}


def read_features(path: str | Path) -> dict[str, Tensor]:
    """Every tensor of one shard."""
    return safetensors.torch.load_file(path)
